"""Calls of the ops for recurrent layers and of exchanges of heads: see bad_input.py.

Shapes: each of W ranks holds S positions; H heads; E, K or V features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import symm_cp
from tests.faults.calls_as_data import Case, Kind, Tensors, gathered, wide

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


# --- recurrent layers ------------------------------------------------------------------------


def _halo(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    whole, mine = gathered(ranks, case.dim), ranks[rank][0].shape[case.dim]
    left, right = case.option("left", 1), case.option("right", 1)
    _require(left >= 0 and right >= 0, "negative")
    shape = list(whole.shape)
    shape[case.dim] += left + right
    padded = whole.new_zeros(shape)
    padded.narrow(case.dim, left, whole.shape[case.dim]).copy_(whole)
    return [padded.narrow(case.dim, rank * mine, left + mine + right)]


def _scan(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    matrices, own = case.flag, ranks[rank]
    state, factor = own
    _require(state.dtype in (*_FLOATS, torch.complex64), "dtype")
    _require(factor.dtype == state.dtype and factor.device == state.device, "not alike")
    if matrices:
        _require(state.dim() >= 2 and [*factor.shape] == [*state.shape[:-1], state.shape[-2]], "T")
    else:
        _require(factor.dim() == state.dim(), "decay")
        _require(all(a in (1, b) for a, b in zip(factor.shape, state.shape, strict=True)), "decay")
    begun = torch.zeros_like(wide(state))
    for S, T in (map(wide, tensors) for tensors in ranks[:rank]):
        begun = (T @ begun if matrices else T * begun) + S
    return [begun]


def _small(tensors: Tensors) -> Tensors:
    """Scales tensors down, so that a recurrence does not grow without bounds."""
    return [t / 10 if t.dtype in _FLOATS else t for t in tensors]


def _delta_rule(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    """The delta rule, or linear attention if there is no beta."""
    ranks = [_small(own) for own in ranks]
    for own in ranks:
        query, key, value, g, *strength = own
        _require(all(t.dtype in _FLOATS and t.device == query.device for t in own), "dtypes")
        _require(query.shape == key.shape and key.dim() == value.dim() == 4, "shapes")
        _require(value.shape[:2] == key.shape[:2] and key.shape[2] > 0, "value")
        _require(value.shape[2] % key.shape[2] == 0, "heads")
        of_features = (*value.shape[:3], key.shape[3])
        _require(g.shape in (value.shape[:3], of_features), "g")
        _require(all(t.shape == value.shape[:3] for t in strength), "beta")
    _require(case.option("chunk_size", 2) >= 1, "chunk_size")
    query, key, value, g, *strength = (
        wide(torch.cat(parts, 1)) for parts in zip(*ranks[: rank + 1], strict=True)
    )
    each = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(each, 2) for t in (query, key))
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    out = torch.zeros_like(value)
    for t in range(value.shape[1]):
        k, q = key[:, t, :, :, None], query[:, t, :, :, None]
        decay = g[:, t].exp().unsqueeze(-1)
        state = state * (decay if g.dim() == 4 else decay.unsqueeze(-1))
        told = value[:, t, :, None]
        for beta in strength:
            told = beta[:, t][..., None, None] * (told - k.mT @ state)
        state = state + k @ told
        out[:, t] = (q.mT @ state).squeeze(-2) * (key.shape[3] or 1) ** -0.5
    own = ranks[rank][2].shape[1]
    return [out[:, out.shape[1] - own :], state]


def _convolution(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    x, weight, bias = ranks[rank]
    alike = (x.dtype, x.device)
    _require(x.dtype in _FLOATS, "dtype")
    _require(all((t.dtype, t.device) == alike for t in (weight, bias)), "not alike")
    _require(x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[1], "weight")
    _require(weight.shape[1] >= 1 and bias.shape == weight.shape[:1], "weight")
    whole, taps = wide(gathered(ranks[: rank + 1], 2)), weight.shape[1]
    padded = torch.cat([whole.new_zeros(*whole.shape[:2], taps - 1), whole], 2)
    out = sum(
        padded[..., tap : tap + whole.shape[2]] * wide(weight)[:, tap, None] for tap in range(taps)
    )
    return [(out + wide(bias)[:, None])[..., whole.shape[2] - x.shape[2] :]]


def _call_scan(t: Tensors, case: Case, group: Any) -> torch.Tensor:
    named = {"transition" if case.flag else "decay": t[1]}
    return symm_cp.scan_states(t[0], **named, group=group)


# --- exchanges of heads ----------------------------------------------------------------------


def _ranges(case: Case, heads: int, world_size: int) -> list[tuple[int, int]]:
    """The range of heads of each rank; `heads` is the total number."""
    ranges = case.option("heads")
    if ranges is None:
        _require(heads % world_size == 0, "heads")
        each = heads // world_size
        return [(rank * each, (rank + 1) * each) for rank in range(world_size)]
    _require(len(ranges) == world_size and all(0 <= a <= b for a, b in ranges), "ranges")
    held = {head for begin, end in ranges for head in range(begin, end)}
    _require(len(held) == max(end for _, end in ranges) == heads, "ranges")
    return list(ranges)


def _alike(tensors: Tensors) -> None:
    _require(all(t.dim() == 4 for t in tensors), "4 dimensions")
    _require(len({(t.dtype, t.device, t.shape[2]) for t in tensors}) == 1, "not alike")


def _to_heads(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    _alike(ranks[rank])
    found = []
    for index, own in enumerate(ranks[rank]):
        begin, end = _ranges(case, own.shape[1], len(ranks))[rank]
        found.append(gathered(ranks, 2, index)[:, begin:end])
    return found


def _to_sequence(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    _alike(ranks[rank])
    length = ranks[rank][0].shape[2]
    _require(length % len(ranks) == 0, "length")
    each, found = length // len(ranks), []
    for index in range(len(ranks[rank])):
        ranges = case.option("heads")
        heads = max(e for _, e in ranges) if ranges else ranks[0][index].shape[1] * len(ranks)
        of_ranks = _ranges(case, heads, len(ranks))
        whole = wide(ranks[0][index].new_zeros(()))
        B, _, S, E = ranks[rank][index].shape
        whole = whole.expand(B, heads, S, E).clone()
        for (begin, end), tensors in zip(of_ranks, ranks, strict=True):
            _require(tensors[index].shape[1] == end - begin, "heads")
            whole[:, begin:end] += wide(tensors[index])
        overlap = sum(end - begin for begin, end in of_ranks) > heads
        _require(not overlap or whole.dtype.is_floating_point, "cannot be summed")
        found.append(whole[:, :, rank * each : (rank + 1) * each])
    return found


def _projection(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    x, weight, bias = ranks[rank]
    features = case.option("features", 2)
    _require(x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[2], "weight")
    _require(features >= 1 and weight.shape[1] % features == 0, "features")
    _require(bias.shape == weight.shape[1:], "bias")
    alike = (x.dtype, x.device)
    _require(all((t.dtype, t.device) == alike for t in (weight, bias)), "not alike")
    # Every rank multiplies with its own weight.
    of_ranks = []
    for own in ranks:
        product = wide(own[0]) @ wide(own[1]) + wide(own[2])
        of_ranks.append([product.unflatten(2, (-1, features)).transpose(1, 2)])
    return _to_heads(of_ranks, rank, case)


def _output_projection(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    x, weight, bias = ranks[rank]
    _require(weight.dim() == 2 and bias.shape == weight.shape[1:], "bias")
    alike = (x.dtype, x.device)
    _require(all((t.dtype, t.device) == alike for t in (weight, bias)), "not alike")
    (local,) = _to_sequence([own[:1] for own in ranks], rank, case)
    rows = local.transpose(1, 2).flatten(2)
    return [rows @ wide(weight) + wide(bias)]


_HEADS = (
    ((0, 1), (1, 2)), ((0, 2), (1, 2)), ((0, 3), (3, 4)), ((1, 2), (2, 4)), ((0, 2), (2, -1)),
    ((0, 2),), ((0, 1), (1, 2), (2, 3)), (),
)  # fmt: skip


def _heads_of(case: Case, tensors: int) -> Any:
    """The heads as the entry points take them: the same for each tensor."""
    heads = case.option("heads")
    return None if heads is None else [heads] * tensors


def _exchange(good: Any, op: Callable[..., Any], expected: Any) -> Kind:
    """One of the two exchanges between sequence and heads, with two tensors."""
    return Kind(
        op.__name__,
        ("x", "x[0]", "x[1]", "tensors", "positions", "heads", "head_ranges", "group"),
        good,
        lambda t, case, group: list(op(t, group=group, heads=_heads_of(case, len(t)))),
        expected,
        {"heads": _HEADS},
    )


KINDS: dict[str, Kind] = {
    "exchange_halo": Kind(
        "exchange_halo",
        ("x", "left", "right", "dim", "group"),
        lambda W, r, k, n: ((r, k, n),),
        lambda t, case, group: symm_cp.exchange_halo(
            t[0], case.option("left", 1), case.option("right", 1), case.dim, group=group
        ),
        _halo,
        {"left": (-1, 0, 2, 9), "right": (-2, 0, 3, 11)},
    ),
    "scan_states": Kind(
        "scan_states",
        ("state", "decay", "transition", "group"),
        lambda W, r, k, n: ((r, k, k), (r, k, k)),  # valid as a decay and as a transition
        _call_scan,
        _scan,
    ),
    "gated_delta_rule": Kind(
        "gated_delta_rule",
        ("query", "key", "value", "g", "beta", "chunk_size", "group"),
        lambda W, r, k, n: (*((1, 3, r, k),) * 2, (1, 3, 2 * r, n), *((1, 3, 2 * r),) * 2),
        lambda t, case, group: list(
            symm_cp.gated_delta_rule(
                *_small(t), group=group, chunk_size=case.option("chunk_size", 2)
            )
        ),
        _delta_rule,
        {"chunk_size": (-1, 0, 1, 64)},
    ),
    "gated_linear_attention": Kind(
        "gated_linear_attention",
        ("query", "key", "value", "g", "chunk_size", "group"),
        lambda W, r, k, n: (*((1, 3, r, k),) * 2, (1, 3, 2 * r, n), (1, 3, 2 * r)),
        lambda t, case, group: list(
            symm_cp.gated_linear_attention(
                *_small(t), group=group, chunk_size=case.option("chunk_size", 2)
            )
        ),
        _delta_rule,
        {"chunk_size": (-1, 0, 1, 64)},
    ),
    "causal_convolution": Kind(
        "causal_convolution",
        ("x", "weight", "bias", "group"),
        lambda W, r, k, n: ((2, r, 3), (r, k + 1), (r,)),  # with one tap no rank needs another
        lambda t, case, group: symm_cp.causal_convolution(*t, group=group),
        _convolution,
    ),
    "sequence_to_heads": _exchange(
        lambda W, r, k, n: ((1, r * W, k, n),) * 2, symm_cp.sequence_to_heads, _to_heads
    ),
    "heads_to_sequence": _exchange(
        lambda W, r, k, n: ((1, r, k * W, n),) * 2, symm_cp.heads_to_sequence, _to_sequence
    ),
    "ulysses_projection": Kind(
        "ulysses_projection",
        ("x", "weights", "biases", "features", "positions", "heads", "head_ranges", "group"),
        lambda W, r, k, n: ((1, r, k), (k, 2 * n * W), (2 * n * W,)),
        lambda t, case, group: symm_cp.ulysses_projection(
            t[0], t[1], biases=t[2], features=case.option("features", 2), group=group,
            heads=case.option("heads"),
        ),
        _projection,
        {"heads": _HEADS, "features": (-1, 0, 1, 3)},
    ),
    "ulysses_output_projection": Kind(
        "ulysses_output_projection",
        ("x", "weight", "bias", "positions", "heads", "head_ranges", "group"),
        lambda W, r, k, n: ((1, r, k * W, 2), (2 * r * W, n), (n,)),
        lambda t, case, group: symm_cp.ulysses_output_projection(
            t[0], t[1], bias=t[2], group=group, heads=case.option("heads")
        ),
        _output_projection,
        {"heads": _HEADS},
    ),
}  # fmt: skip


def attention_methods(attention: Callable[[list[Tensors], int, Case], Tensors]) -> Kind:
    """Attention by heads, by an automatically chosen method, and by methods that do not exist."""

    def expected(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
        method = case.option("method", "ulysses")
        _require(method in ("ulysses", "auto", "allgather"), "method")
        _require(ranks[rank][0].dim() != 4 or ranks[rank][0].shape[1] >= len(ranks), "heads")
        return attention(ranks, rank, case)

    return Kind(
        "all_gather_attention",
        ("query", "key", "value", "is_causal", "method", "group"),
        lambda W, r, k, n: ((1, r + W, k, n),) * 3,
        lambda t, case, group: symm_cp.all_gather_attention(
            *t, group=group, is_causal=case.flag, method=case.option("method", "ulysses")
        ),
        expected,
        {"method": ("auto", "ring", "", 3, ("ulysses",), ("ulysses", "allgather"))},
    )
