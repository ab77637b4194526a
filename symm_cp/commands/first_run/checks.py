"""Checks all ops at small sizes on one rank, against dense references in float64 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp

_ROWS, _INNER, _COLUMNS = 64, 32, 48
_HEADS, _TOKENS, _FEATURES = 4, 64, 64
_DELTA_TOKENS, _DELTA_FEATURES = 12, 8  # the reference is a loop over tokens
#: The largest error relative to the largest value, for sums of products of rounded numbers.
_TOLERANCES = {torch.bfloat16: 2**-5, torch.float32: 2**-14}
_TIMED_CALLS = 10
_FLOAT8 = torch.float8_e4m3fn
_OPS = torch.ops.symm_mem

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Check:
    """An op, called repeatedly on the same inputs, and its correct results on this rank."""

    name: str
    run: Callable[[], Tensors]
    expected: Tensors
    tolerance: float

    def wrong(self, results: Sequence[torch.Tensor]) -> str:
        """Describes the first error in results; "" if there is none."""
        for index, (result, expected) in enumerate(zip(results, self.expected, strict=True)):
            if result.shape != expected.shape:
                return f"result {index}: {list(result.shape)=}, not {list(expected.shape)}"
            error = (result.detach().cpu().double() - expected).abs().max()
            limit = self.tolerance * expected.abs().max()
            if not error <= limit:  # also for NaN
                return f"result {index}: an error of {float(error):.3g}, above {float(limit):.3g}"
        return ""

    def milliseconds(self, synchronize: Callable[[], object]) -> float:
        """Returns the mean time of several calls in a row."""
        synchronize()
        began = time.perf_counter()
        for _ in range(_TIMED_CALLS):
            self.run()
        synchronize()
        return (time.perf_counter() - began) / _TIMED_CALLS * 1e3


class _Inputs:
    """The same random tensors on all ranks; each rank makes them itself."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tolerance = _TOLERANCES[self.dtype]
        self._generator = torch.Generator().manual_seed(1)

    def each(self, *shape: int) -> Tensors:
        """Returns a tensor for each rank, rounded to the dtype, in float64 on the CPU."""
        return [
            torch.randn(shape, generator=self._generator).to(self.dtype).double().requires_grad_()
            for _ in range(self.ranks)
        ]

    def own(self, each: Tensors, *, grad: bool = True) -> torch.Tensor:
        """Returns this rank's tensor, on the device."""
        return each[self.rank].detach().to(self.device, self.dtype).requires_grad_(grad)


def checks(group: dist.ProcessGroup, device: torch.device) -> Iterator[Check]:
    """Yields the checks, the same on all ranks; each allocates its tensors when yielded."""
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


def cpu_checks(group: dist.ProcessGroup) -> Iterator[Check]:
    """Yields the checks of the CPU backend, the same on all ranks: signals, collectives, ops."""
    device = torch.device("cpu")
    inputs = _Inputs(group, device)
    yield _signals(inputs)
    yield _collectives(inputs)
    yield from checks(group, device)
    yield _matmul_all_reduce(inputs)
    yield _attention(inputs, causal=True, method="ulysses")
    yield _sequence_to_heads(inputs)
    yield _halo(inputs)
    yield _scan(inputs)
    yield _delta_rule(inputs)


def _with_gradients(
    function: Callable[[], Sequence[torch.Tensor]], leaves: Tensors
) -> Callable[[], Tensors]:
    """Returns a call that adds gradients; the loss is the sum of the squares of all results."""

    def run() -> Tensors:
        results = list(function())
        loss = torch.stack([result.float().square().sum() for result in results]).sum()
        return [*results, *torch.autograd.grad(loss, leaves)]

    return run


def _expected(
    own: Sequence[torch.Tensor], of_all: Sequence[torch.Tensor], leaves: Tensors
) -> Tensors:
    """Returns this rank's results, and the gradients of the sum of all ranks' losses."""
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
    symmetric = symm_mem.empty(*own.shape, dtype=own.dtype, device=own.device)
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


def _attention(
    inputs: _Inputs, *, causal: bool, method: Literal["allgather", "ulysses"] = "allgather"
) -> Check:
    shape, rank = (1, _HEADS, _TOKENS, _FEATURES), inputs.rank
    heads = [inputs.each(*shape) for _ in range(3)]
    q, k, v = (torch.cat(t, 2) for t in heads)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    leaves = [inputs.own(t) for t in heads]

    def call() -> Tensors:
        attend = symm_cp.all_gather_attention
        return [attend(*leaves, group=inputs.group, is_causal=causal, method=method)]

    own = whole.chunk(inputs.ranks, 2)[rank]
    expected = _expected([own], [whole], [t[rank] for t in heads])
    name = f"{'causal' if causal else 'full'} attention, gradients"
    if method != "allgather":
        name = f"{method} {name}"
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


def _signals(inputs: _Inputs) -> Check:
    """Each rank signals to all peers that its tensor is ready, and reads all tensors."""
    x, peers = inputs.each(_ROWS), range(inputs.ranks)
    own = inputs.own(x, grad=False)
    symmetric = symm_mem.empty(_ROWS, dtype=own.dtype, device="cpu")
    handle = symm_mem.rendezvous(symmetric, inputs.group)

    def run() -> Tensors:
        symmetric.copy_(own)
        for peer in peers:
            if peer != inputs.rank:
                handle.put_signal(peer, channel=0)
        for peer in peers:
            if peer != inputs.rank:
                handle.wait_signal(peer, channel=0)
        read = [handle.get_buffer(peer, (_ROWS,), own.dtype).clone() for peer in peers]
        handle.barrier(channel=0)  # no rank writes before all have read
        return read

    return Check("signals, and peers' memory", run, [t.detach() for t in x], 0.0)


def _collectives(inputs: _Inputs) -> Check:
    """Collectives of torch.distributed, over the group's backend."""
    rank, ranks, group = inputs.rank, inputs.ranks, inputs.group
    each = [t.detach() for t in inputs.each(ranks * _INNER)]
    own = each[rank].float()
    total = torch.stack(each).sum(0)

    def run() -> Tensors:
        summed, part, last = own.clone(), own.new_empty(_INNER), own.clone()
        gathered, exchanged = [torch.empty_like(own) for _ in each], torch.empty_like(own)
        dist.all_reduce(summed, group=group)
        dist.all_gather(gathered, own, group=group)
        dist.reduce_scatter(part, list(own.chunk(ranks)), group=group)
        dist.all_to_all_single(exchanged, own, group=group)
        dist.broadcast(last, group=group, group_src=ranks - 1)
        return [summed, torch.cat(gathered), part, exchanged, last]

    exchanged = torch.cat([t.chunk(ranks)[rank] for t in each])
    expected = [total, torch.cat(each), total.chunk(ranks)[rank], exchanged, each[-1]]
    return Check("collectives of torch.distributed", run, expected, inputs.tolerance)


def _matmul_all_reduce(inputs: _Inputs) -> Check:
    a, w, rank = inputs.each(_ROWS, _INNER), inputs.each(_INNER, _COLUMNS), inputs.rank
    total = torch.stack([x @ y for x, y in zip(a, w, strict=True)]).sum(0)
    leaves = [inputs.own(a), inputs.own(w)]

    def call() -> Tensors:
        return [symm_cp.matmul_all_reduce(*leaves, group=inputs.group)]

    expected = _expected([total], [total] * inputs.ranks, [a[rank], w[rank]])
    run = _with_gradients(call, leaves)
    return Check("matmul-all-reduce, gradients", run, expected, inputs.tolerance)


def _sequence_to_heads(inputs: _Inputs) -> Check:
    x, rank = inputs.each(1, inputs.ranks, _TOKENS, _FEATURES), inputs.rank
    whole, leaves = torch.cat(x, 2), [inputs.own(x)]

    def call() -> Tensors:
        return [symm_cp.sequence_to_heads(*leaves, group=inputs.group)]

    expected = _expected([whole[:, rank : rank + 1]], [whole], [x[rank]])
    run = _with_gradients(call, leaves)
    return Check("exchange of a sequence for heads, gradients", run, expected, inputs.tolerance)


def _halo(inputs: _Inputs) -> Check:
    x, rank, left, right = inputs.each(_ROWS, _INNER), inputs.rank, 3, 2
    padded = F.pad(torch.cat(x), (0, 0, left, right))
    parts = [padded.narrow(0, r * _ROWS, left + _ROWS + right) for r in range(inputs.ranks)]
    leaves = [inputs.own(x)]

    def call() -> Tensors:
        return [symm_cp.exchange_halo(leaves[0], left, right, 0, group=inputs.group)]

    expected = _expected([parts[rank]], parts, [x[rank]])
    run = _with_gradients(call, leaves)
    return Check("exchange of halos, gradients", run, expected, inputs.tolerance)


def _scan(inputs: _Inputs) -> Check:
    states, decays, rank = inputs.each(_ROWS, _INNER), inputs.each(_ROWS, 1), inputs.rank
    begins = [torch.zeros_like(states[0])]
    for state, decay in zip(states[:-1], decays[:-1], strict=True):
        begins.append(decay * begins[-1] + state)
    leaves = [inputs.own(states), inputs.own(decays)]

    def call() -> Tensors:
        return [symm_cp.scan_states(leaves[0], decay=leaves[1], group=inputs.group)]

    # No rank receives the last rank's state.
    nothing = 0 * (states[rank].sum() + decays[rank].sum())
    expected = _expected([begins[rank] + nothing], [b + nothing for b in begins],
                         [states[rank], decays[rank]])  # fmt: skip
    run = _with_gradients(call, leaves)
    return Check("scan of states, gradients", run, expected, inputs.tolerance)


def _delta_rule(inputs: _Inputs) -> Check:
    rank, shape = inputs.rank, (1, _DELTA_TOKENS, 1, _DELTA_FEATURES)
    q, k, v = (inputs.each(*shape) for _ in range(3))
    state, scale = torch.zeros(_DELTA_FEATURES, _DELTA_FEATURES).double(), _DELTA_FEATURES**-0.5
    outputs: Tensors = []
    decay, strength = torch.tensor(-0.1).double(), 0.05
    for queries, keys, values in zip(q, k, v, strict=True):
        rows = []
        for query, key, value in zip(queries[0, :, 0], keys[0, :, 0], values[0, :, 0], strict=True):
            state = decay.exp() * state
            state = state + torch.outer(key, strength * (value - key @ state))
            rows.append(scale * query @ state)
        outputs.append(torch.stack(rows)[None, :, None])
    leaves = [inputs.own(t) for t in (q, k, v)]
    decays = torch.full((1, _DELTA_TOKENS, 1), float(decay))

    def call() -> Tensors:
        strengths = torch.full_like(decays, strength)
        query, key, value = leaves
        rule = symm_cp.gated_delta_rule(query, key, value, decays, strengths, group=inputs.group)
        return [rule[0]]

    expected = _expected([outputs[rank]], outputs, [t[rank] for t in (q, k, v)])
    return Check(
        "gated delta rule, gradients", _with_gradients(call, leaves), expected, inputs.tolerance
    )
