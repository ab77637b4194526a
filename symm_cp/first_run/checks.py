"""All ops at small sizes on one rank of a group, against dense references in float64 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp

_ROWS, _INNER, _COLUMNS = 64, 32, 48
_HEADS, _TOKENS, _FEATURES = 4, 64, 64
#: The largest error, as a part of the largest value: of sums of products of rounded numbers.
_TOLERANCES = {torch.bfloat16: 2**-5, torch.float32: 2**-14}
_TIMED_CALLS = 10
_FLOAT8 = torch.float8_e4m3fn
_OPS = torch.ops.symm_mem

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Check:
    """An op, called again and again on the same inputs, and what it must return on this rank."""

    name: str
    run: Callable[[], Tensors]
    expected: Tensors
    tolerance: float

    def wrong(self, results: Sequence[torch.Tensor]) -> str:
        """Says what is wrong with results, or nothing."""
        for index, (result, expected) in enumerate(zip(results, self.expected, strict=True)):
            if result.shape != expected.shape:
                return f"result {index}: {list(result.shape)=}, not {list(expected.shape)}"
            error = (result.detach().cpu().double() - expected).abs().max()
            limit = self.tolerance * expected.abs().max()
            if not error <= limit:  # also for NaN
                return f"result {index}: an error of {float(error):.3g}, above {float(limit):.3g}"
        return ""

    def milliseconds(self, synchronize: Callable[[], object]) -> float:
        """Returns how long a call takes, of several in a row."""
        synchronize()
        began = time.perf_counter()
        for _ in range(_TIMED_CALLS):
            self.run()
        synchronize()
        return (time.perf_counter() - began) / _TIMED_CALLS * 1e3


class _Inputs:
    """The same random tensors on all ranks, which each rank makes by itself."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tolerance = _TOLERANCES[self.dtype]
        self._generator = torch.Generator().manual_seed(1)

    def each(self, *shape: int) -> Tensors:
        """A tensor for each rank, rounded to the dtype, in float64 on the CPU."""
        return [
            torch.randn(shape, generator=self._generator).to(self.dtype).double().requires_grad_()
            for _ in range(self.ranks)
        ]

    def own(self, each: Tensors, *, grad: bool = True) -> torch.Tensor:
        """This rank's tensor, on the device."""
        return each[self.rank].detach().to(self.device, self.dtype).requires_grad_(grad)


def checks(group: dist.ProcessGroup, device: torch.device) -> Iterator[Check]:
    """Yields the checks, the same on all ranks; each allocates its tensors when it is reached."""
    inputs = _Inputs(group, device)
    yield _gather_matmul(inputs)
    yield _gather_matmul_in_place(inputs)
    yield _matmul_scatter(inputs)
    yield _gather(inputs)
    yield _scatter(inputs)
    yield _gather_kv(inputs)
    yield _attention(inputs, causal=False)
    yield _attention(inputs, causal=True)
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        yield _scaled(inputs)


def _with_gradients(
    function: Callable[[], Sequence[torch.Tensor]], leaves: Tensors
) -> Callable[[], Tensors]:
    """A call and its gradients, where the loss is the sum of the squares of all results."""

    def run() -> Tensors:
        results = list(function())
        loss = torch.stack([result.float().square().sum() for result in results]).sum()
        return [*results, *torch.autograd.grad(loss, leaves)]

    return run


def _expected(
    own: Sequence[torch.Tensor], of_all: Sequence[torch.Tensor], leaves: Tensors
) -> Tensors:
    """This rank's results, and the gradients of what all ranks' losses add up to."""
    loss = torch.stack([result.square().sum() for result in of_all]).sum()
    return [t.detach() for t in (*own, *torch.autograd.grad(loss, leaves, retain_graph=True))]


def _gather_matmul(inputs: _Inputs) -> Check:
    x, w, rank = inputs.each(_ROWS, _INNER), inputs.each(_INNER, _COLUMNS), inputs.rank
    products = [torch.cat(x) @ weight for weight in w]
    leaves = [inputs.own(x), inputs.own(w)]

    def call() -> Tensors:
        return [symm_cp.all_gather_matmul(*leaves, group=inputs.group)]

    expected = _expected([products[rank]], products, [x[rank], w[rank]])
    run = _with_gradients(call, leaves)
    return Check("all-gather-matmul, gradients", run, expected, inputs.tolerance)


def _gather_matmul_in_place(inputs: _Inputs) -> Check:
    x, w = inputs.each(_ROWS, _INNER), inputs.each(_INNER, _COLUMNS)
    own, weight = inputs.own(x, grad=False), inputs.own(w, grad=False)
    symmetric = torch.distributed._symmetric_memory.empty(
        *own.shape, dtype=own.dtype, device=own.device
    )
    symm_cp.read_in_place(symmetric, inputs.group)
    symmetric.copy_(own)

    def run() -> Tensors:
        return [symm_cp.all_gather_matmul(symmetric, weight, group=inputs.group)]

    expected = [(torch.cat(x) @ w[inputs.rank]).detach()]
    return Check("all-gather-matmul of a symmetric tensor", run, expected, inputs.tolerance)


def _matmul_scatter(inputs: _Inputs) -> Check:
    a, w = inputs.each(_ROWS * inputs.ranks, _INNER), inputs.each(_INNER, _COLUMNS)
    rank = inputs.rank
    total = torch.stack([x @ y for x, y in zip(a, w, strict=True)]).sum(0)
    leaves = [inputs.own(a), inputs.own(w)]

    def call() -> Tensors:
        return [symm_cp.matmul_reduce_scatter(*leaves, group=inputs.group)]

    own = total.chunk(inputs.ranks)[rank]
    expected = _expected([own], [total], [a[rank], w[rank]])
    run = _with_gradients(call, leaves)
    return Check("matmul-reduce-scatter, gradients", run, expected, inputs.tolerance)


def _gather(inputs: _Inputs) -> Check:
    x, name = inputs.each(_ROWS, _INNER), inputs.group.group_name
    own = inputs.own(x, grad=False)

    def run() -> Tensors:
        gathered = _OPS._low_contention_all_gather(own, name)
        return [torch.ops._c10d_functional.wait_tensor(gathered)]

    return Check("low-contention all-gather", run, [torch.cat(x).detach()], 0.0)


def _scatter(inputs: _Inputs) -> Check:
    x, name = inputs.each(_ROWS * inputs.ranks, _INNER), inputs.group.group_name
    own = inputs.own(x, grad=False)

    def run() -> Tensors:
        scattered = _OPS._low_contention_reduce_scatter(own, "sum", name)
        return [torch.ops._c10d_functional.wait_tensor(scattered)]

    total = torch.stack(x).sum(0).chunk(inputs.ranks)[inputs.rank]
    return Check("low-contention reduce-scatter", run, [total.detach()], inputs.tolerance)


def _gather_kv(inputs: _Inputs) -> Check:
    shape, rank = (1, _HEADS, _TOKENS, _FEATURES), inputs.rank
    k, v = inputs.each(*shape), inputs.each(*shape)
    leaves = [inputs.own(k), inputs.own(v)]

    def call() -> Sequence[torch.Tensor]:
        return symm_cp.all_gather_kv(*leaves, group=inputs.group)

    gathered = [torch.cat(k, 2), torch.cat(v, 2)]
    expected = _expected(gathered, gathered * inputs.ranks, [k[rank], v[rank]])
    run = _with_gradients(call, leaves)
    return Check("all-gather of keys and values, gradients", run, expected, inputs.tolerance)


def _attention(inputs: _Inputs, *, causal: bool) -> Check:
    shape, rank = (1, _HEADS, _TOKENS, _FEATURES), inputs.rank
    heads = [inputs.each(*shape) for _ in range(3)]
    q, k, v = (torch.cat(t, 2) for t in heads)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    leaves = [inputs.own(t) for t in heads]

    def call() -> Tensors:
        return [symm_cp.all_gather_attention(*leaves, group=inputs.group, is_causal=causal)]

    own = whole.chunk(inputs.ranks, 2)[rank]
    expected = _expected([own], [whole], [t[rank] for t in heads])
    name = f"{'causal' if causal else 'full'} attention, gradients"
    return Check(name, _with_gradients(call, leaves), expected, inputs.tolerance)


def _scaled(inputs: _Inputs) -> Check:
    x, w = inputs.each(_ROWS, _INNER), inputs.each(_COLUMNS, _INNER)
    x8, w8 = ([t.detach().to(_FLOAT8) for t in each] for each in (x, w))
    own, weight = x8[inputs.rank].to(inputs.device), w8[inputs.rank].to(inputs.device).t()
    scale = torch.full((), 0.5, device=inputs.device)

    def run() -> Tensors:
        _, product = symm_cp.scaled_all_gather_matmul(
            own, weight, scale, scale, group=inputs.group, out_dtype=torch.bfloat16
        )
        return [product]

    product = torch.cat(x8).double() @ w8[inputs.rank].double().t() / 4
    return Check("all-gather-matmul in float8", run, [product], _TOLERANCES[torch.bfloat16])
