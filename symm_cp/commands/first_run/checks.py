"""Checks all ops at small sizes on one rank, against dense references in float64 on the CPU.

All ranks make the inputs of all ranks, W in number. A reference takes, for each input, its tensors
on all ranks, and returns the results of each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp

_ROWS, _INNER, _COLUMNS = 64, 32, 48
_HEADS, _TOKENS, _FEATURES = 4, 64, 64
_DELTA_TOKENS, _DELTA_FEATURES = 12, 8  # the reference is a loop over tokens
_DECAY, _STRENGTH = -0.1, 0.05
#: The largest error relative to the largest value, for sums of products of rounded numbers.
_TOLERANCES = {torch.bfloat16: 2**-5, torch.float32: 2**-14}
_TIMED_CALLS = 10
_OPS, _FUNCTIONAL = torch.ops.symm_mem, torch.ops._c10d_functional

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Check:
    """An op, called repeatedly on the same inputs, and its correct results on this rank."""

    name: str
    run: Callable[[], Tensors]
    expected: Tensors
    tolerance: float
    inputs: Sequence[torch.Tensor] = ()

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


class _Maker:
    """Makes checks; each rank makes the same random inputs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._generator = torch.Generator().manual_seed(1)

    def check(
        self,
        name: str,
        shapes: Sequence[Sequence[int]],
        op: Callable[..., torch.Tensor | Sequence[torch.Tensor]],
        reference: Callable[..., Sequence[Sequence[torch.Tensor]]],
        *,
        gradients: bool = True,
        exact: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Check:
        """Checks an op of one input for each of `shapes`, with its gradients.

        The loss is the sum of the squares of the results of all ranks.
        """
        rank, dtype = self.group.rank(), dtype or self.dtype
        every = [[self._random(shape, dtype) for _ in range(self.group.size())] for shape in shapes]
        own = [
            each[rank].detach().to(self.device, dtype).requires_grad_(gradients) for each in every
        ]

        def run() -> Tensors:
            found = op(*own)
            results = [found] if isinstance(found, torch.Tensor) else list(found)
            if gradients:
                loss = torch.stack([each.float().square().sum() for each in results]).sum()
                results += torch.autograd.grad(loss, own)
            return results

        of_all = reference(*every)
        expected = list(of_all[rank])
        if gradients:
            loss = torch.stack([t.square().sum() for results in of_all for t in results]).sum()
            leaves = [each[rank] for each in every]
            expected += torch.autograd.grad(loss, leaves, materialize_grads=True)
            name += ", gradients"
        tolerance = 0.0 if exact else _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])
        return Check(name, run, [each.detach() for each in expected], tolerance, own)

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        rounded = torch.randn(tuple(shape), generator=self._generator).to(dtype)
        return rounded.double().requires_grad_()


def _products(x: Tensors, w: Tensors) -> list[Tensors]:
    return [[torch.cat(x) @ weight] for weight in w]


def _sum(x: Tensors, w: Tensors) -> torch.Tensor:
    return torch.stack([each @ weight for each, weight in zip(x, w, strict=True)]).sum(0)


def _parts(whole: torch.Tensor, ranks: int, dim: int = 0) -> list[Tensors]:
    return [[part] for part in whole.chunk(ranks, dim)]


def _attended(q: Tensors, k: Tensors, v: Tensors, *, causal: bool) -> list[Tensors]:
    query, key, value = (torch.cat(each, 2) for each in (q, k, v))
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return _parts(whole, len(q), 2)


def checks(group: dist.ProcessGroup, device: torch.device) -> Iterator[Check]:
    """Yields the checks, the same on all ranks; each allocates its tensors when yielded."""
    maker, W, name = _Maker(group, device), group.size(), group.group_name
    check, plain = maker.check, partial(maker.check, gradients=False)
    rows, weight = (_ROWS, _INNER), (_INNER, _COLUMNS)
    gather = partial(symm_cp.all_gather_matmul, group=group)
    yield check("all-gather-matmul", (rows, weight), gather, _products)

    symmetric = symm_mem.empty(*rows, dtype=maker.dtype, device=device)
    symm_cp.read_in_place(symmetric, group)
    in_place = plain("all-gather-matmul of a symmetric tensor", (rows, weight),
                     lambda _, w: gather(symmetric, w), _products)  # fmt: skip
    symmetric.copy_(in_place.inputs[0])
    yield in_place

    yield check("matmul-reduce-scatter", ((W * _ROWS, _INNER), weight),
                partial(symm_cp.matmul_reduce_scatter, group=group),
                lambda x, w: _parts(_sum(x, w), W))  # fmt: skip

    def wait(started: torch.Tensor) -> torch.Tensor:
        return _FUNCTIONAL.wait_tensor(started)  # type: ignore[no-any-return]

    yield plain("low-contention all-gather", (rows,),
                lambda x: wait(_OPS._low_contention_all_gather(x, name)),
                lambda x: [[torch.cat(x)]] * W, exact=True)  # fmt: skip
    yield plain("low-contention reduce-scatter", ((W * _ROWS, _INNER),),
                lambda x: wait(_OPS._low_contention_reduce_scatter(x, "sum", name)),
                lambda x: _parts(torch.stack(x).sum(0), W))  # fmt: skip

    tokens = (1, _HEADS, _TOKENS, _FEATURES)
    yield check("all-gather of keys and values", (tokens, tokens),
                partial(symm_cp.all_gather_kv, group=group),
                lambda k, v: [[torch.cat(k, 2), torch.cat(v, 2)]] * W)  # fmt: skip
    for causal in (False, True):
        attend = partial(symm_cp.all_gather_attention, group=group, is_causal=causal)
        yield check(f"{'causal' if causal else 'full'} attention", [tokens] * 3, attend,
                    partial(_attended, causal=causal))  # fmt: skip

    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        scale = torch.full((), 0.5, device=device)
        scaled = partial(symm_cp.scaled_all_gather_matmul, group=group, out_dtype=torch.bfloat16)
        yield plain("all-gather-matmul in float8", (rows, (_COLUMNS, _INNER)),
                    lambda x, w: [scaled(x, w.t(), scale, scale)[1]],
                    lambda x, w: _products(x, [each.t() / 4 for each in w]),
                    dtype=torch.float8_e4m3fn)  # fmt: skip


def cpu_checks(group: dist.ProcessGroup) -> Iterator[Check]:
    """Yields the checks of the CPU backend, the same on all ranks: signals, collectives, ops."""
    device, W = torch.device("cpu"), group.size()
    check = _Maker(group, device).check
    plain = partial(check, gradients=False)
    symmetric = symm_mem.empty(_ROWS, device="cpu")
    handle = symm_mem.rendezvous(symmetric, group)
    yield plain("signals, and peers' memory", ((_ROWS,),), partial(_signal, handle, symmetric),
                lambda x: [x] * W, exact=True)  # fmt: skip
    yield plain("collectives of torch.distributed", ((W * _INNER,),),
                partial(_collectives, group), _collected)  # fmt: skip
    yield from checks(group, device)
    yield check("matmul-all-reduce", ((_ROWS, _INNER), (_INNER, _COLUMNS)),
                partial(symm_cp.matmul_all_reduce, group=group),
                lambda x, w: [[_sum(x, w)]] * W)  # fmt: skip
    attend = partial(symm_cp.all_gather_attention, group=group, is_causal=True, method="ulysses")
    yield check("ulysses causal attention", [(1, _HEADS, _TOKENS, _FEATURES)] * 3, attend,
                partial(_attended, causal=True))  # fmt: skip
    yield check("exchange of a sequence for heads", ((1, W, _TOKENS, _FEATURES),),
                partial(symm_cp.sequence_to_heads, group=group),
                lambda x: _parts(torch.cat(x, 2), W, 1))  # fmt: skip
    yield check("exchange of halos", ((_ROWS, _INNER),),
                lambda x: symm_cp.exchange_halo(x, 3, 2, 0, group=group),
                lambda x: [[F.pad(torch.cat(x), (0, 0, 3, 2)).narrow(0, r * _ROWS, _ROWS + 5)]
                           for r in range(W)])  # fmt: skip
    yield check("scan of states", ((_ROWS, _INNER), (_ROWS, 1)),
                lambda x, decay: symm_cp.scan_states(x, decay=decay, group=group),
                _scanned)  # fmt: skip
    decays = torch.full((1, _DELTA_TOKENS, 1), _DECAY)
    strengths = torch.full_like(decays, _STRENGTH)

    def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return symm_cp.gated_delta_rule(q, k, v, decays, strengths, group=group)[0]

    yield check("gated delta rule", [(1, _DELTA_TOKENS, 1, _DELTA_FEATURES)] * 3, delta_rule,
                _delta_rule)  # fmt: skip


def _signal(handle: symm_mem._SymmetricMemory, symmetric: torch.Tensor, x: torch.Tensor) -> Tensors:
    """Signals to all peers that this rank's tensor is ready, and reads all tensors."""
    symmetric.copy_(x)
    ranks = range(handle.world_size)
    for signal in (handle.put_signal, handle.wait_signal):
        for peer in ranks:
            if peer != handle.rank:
                signal(peer, channel=0)
    read = [handle.get_buffer(peer, x.shape, x.dtype).clone() for peer in ranks]
    handle.barrier(channel=0)  # no rank writes before all have read
    return read


def _collectives(group: dist.ProcessGroup, x: torch.Tensor) -> Tensors:
    """Calls collectives of torch.distributed, over the group's backend."""
    W = group.size()
    summed, part, last = x.clone(), x.new_empty(_INNER), x.clone()
    gathered, exchanged = [torch.empty_like(x) for _ in range(W)], torch.empty_like(x)
    dist.all_reduce(summed, group=group)
    dist.all_gather(gathered, x, group=group)
    dist.reduce_scatter(part, list(x.chunk(W)), group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.broadcast(last, group=group, group_src=W - 1)
    return [summed, torch.cat(gathered), part, exchanged, last]


def _collected(x: Tensors) -> list[Tensors]:
    W, total = len(x), torch.stack(x).sum(0)
    return [
        [total, torch.cat(x), total.chunk(W)[r], torch.cat([t.chunk(W)[r] for t in x]), x[-1]]
        for r in range(W)
    ]


def _scanned(states: Tensors, decays: Tensors) -> list[Tensors]:
    begins = [torch.zeros_like(states[0])]
    for state, decay in zip(states[:-1], decays[:-1], strict=True):
        begins.append(decay * begins[-1] + state)
    return [[begin] for begin in begins]


def _delta_rule(q: Tensors, k: Tensors, v: Tensors) -> list[Tensors]:
    state, decay = torch.zeros(_DELTA_FEATURES, _DELTA_FEATURES).double(), torch.tensor(_DECAY)
    outputs = []
    for queries, keys, values in zip(q, k, v, strict=True):
        rows = []
        for query, key, value in zip(queries[0, :, 0], keys[0, :, 0], values[0, :, 0], strict=True):
            state = decay.double().exp() * state
            state = state + torch.outer(key, _STRENGTH * (value - key @ state))
            rows.append(_DELTA_FEATURES**-0.5 * query @ state)
        outputs.append([torch.stack(rows)[None, :, None]])
    return outputs
