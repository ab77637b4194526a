"""Calls of the ops that are right or nearly so, and their expected results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed._functional_collectives import wait_tensor

import symm_cp
from symm_cp.ops.attention import philox
from tests.faults import bad_sequences
from tests.faults.calls_as_data import Case, Given, Kind, Tensors, gathered, part, total, wide

OPS = torch.ops.symm_mem


def _gather_matmul(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    full = gathered(ranks, case.dim)
    if any(b.dtype != full.dtype for b in ranks[rank][1:]):
        raise TypeError("dtypes")
    return [full, *(wide(full) @ wide(b) for b in ranks[rank][1:])]


def _matmul_scatter(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    if any(a.dtype != b.dtype for a, b in ranks):
        raise TypeError("dtypes")
    products = [wide(a) @ wide(b) for a, b in ranks]
    return [part(total(products, case.reduce_op), rank, len(ranks), case.dim)]


def _scatter(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    parts = [part(wide(x[0]), rank, len(ranks), 0) for x in ranks]
    return [total(parts, case.reduce_op)]


def _all_reduce(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    out = ranks[rank][-1]
    if out.shape != ranks[rank][0].shape or out.dtype != ranks[rank][0].dtype:
        raise ValueError("out")
    return [total([wide(x[0]) for x in ranks], case.reduce_op)]


def _scatter_out(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    dim = -1 if case.flag else 0
    found = total([part(wide(x[0]), rank, len(ranks), dim) for x in ranks], "sum")
    out = ranks[rank][1]
    if out.shape != found.shape or out.dtype != ranks[rank][0].dtype:
        raise ValueError("out")
    return [found]


def _gather_kv(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    key, value = (gathered(ranks, case.dim, index) for index in (0, 1))
    lengths = {ranks[rank][index].shape[case.dim] for index in (0, 1)}
    if key.dim() != value.dim() or key.dtype != value.dtype or len(lengths) > 1:
        raise ValueError("key and value")
    return [key, value]


def _attention(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    q, k, v = wide(ranks[rank][0]), wide(gathered(ranks, 2, 1)), wide(gathered(ranks, 2, 2))
    if len({t.dtype for t in ranks[rank]}) > 1 or len({t.dim() for t in (q, k, v)} | {4}) > 1:
        raise ValueError("not alike")
    equally_long = q.shape[2] * len(ranks) == k.shape[2]
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == k.shape[3]
    if not alike or k.shape[2] != v.shape[2] or (case.flag and not equally_long):
        raise ValueError("not alike")
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] or 1) ** -0.5
    out = torch.zeros_like(q @ k.transpose(-1, -2) @ v)
    for row in range(q.shape[2]):
        seen = rank * q.shape[2] + row + 1 if case.flag else k.shape[2]
        score = scores[:, :, row, :seen]
        nothing = (score == -torch.inf).all(-1, keepdim=True)
        weight = score.softmax(-1).masked_fill(nothing, 0)
        out[:, :, row] = (weight.unsqueeze(-2) @ v[:, :, :seen]).squeeze(-2)
    return [out]


_SOFTCAP, _DROPOUT, _SEED = 1.5, 0.4, 11
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _attention_with_options(ranks: list[Tensors], rank: int, case: Case) -> Tensors:
    own, (sinks, bias) = ranks[rank][:3], ranks[rank][3:]
    _attention([tensors[:3] for tensors in ranks], rank, case)  # raises if the tensors do not fit
    q, k, v = wide(own[0]), wide(gathered(ranks, 2, 1)), wide(gathered(ranks, 2, 2))
    heads, queries, keys = q.shape[1], q.shape[2] * len(ranks), k.shape[2]
    if q.shape[2] != own[1].shape[2]:
        raise ValueError("a bias by distance needs to know where the queries are")
    fits = sinks.shape == (heads,) and bias.shape == (heads, max(0, queries + keys - 1))
    on_cpu = {t.device.type for t in (q, sinks, bias)} == {q.device.type}
    if not fits or not on_cpu or sinks.dtype not in _FLOATS or bias.dtype not in _FLOATS:
        raise ValueError("sinks or bias")
    rows = torch.arange(q.shape[2]) + rank * q.shape[2]
    distance = torch.arange(keys) - rows.unsqueeze(1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] or 1) ** -0.5
    scores = _SOFTCAP * torch.tanh(scores / _SOFTCAP) + wide(bias)[:, distance + queries - 1]
    if case.flag:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    lse = torch.logaddexp(scores.logsumexp(-1), wide(sinks).unsqueeze(-1))
    kept = philox.kept(
        torch.arange(q.shape[0]), torch.arange(heads), rows, torch.arange(keys),
        p=_DROPOUT, seed=_SEED,
    )  # fmt: skip
    return [((scores - lse.unsqueeze(-1)).exp() * kept / (1 - _DROPOUT)) @ v]


def _call_attention_with_options(t: Tensors, case: Case, group: Any) -> Any:
    return symm_cp.all_gather_attention(
        *t[:3], group=group, is_causal=case.flag, softcap=_SOFTCAP, sinks=t[3], bias=t[4],
        dropout_p=_DROPOUT, dropout_seed=torch.tensor([_SEED]),
    )  # fmt: skip


def _call_gather_matmul(t: Tensors, case: Case, group: Any) -> Tensors:
    gathered, products = symm_cp.all_gather_matmul(
        t[0], t[1:], gather_dim=case.dim, group=group, return_gathered=True
    )
    return [gathered, *products]


def _all_reduce_kind(name: str) -> Kind:
    return Kind(
        name,
        ("input", "reduce_op", "group"),
        lambda W, r, k, n: ((r, k),),
        lambda t, case, group: getattr(OPS, name)(t[0], case.reduce_op, group),
        _all_reduce,
    )


#: `good` takes the number of ranks and three small sizes.
KINDS: dict[str, Kind] = {
    "all_gather_matmul": Kind(
        "all_gather_matmul",
        ("shard", "weights[0]", "weights[1]", "gather_dim", "group"),
        lambda W, r, k, n: ((r, k), (k, n), (k, 2)),
        _call_gather_matmul,
        _gather_matmul,
    ),
    "matmul_reduce_scatter": Kind(
        "matmul_reduce_scatter",
        ("a", "weight", "scatter_dim", "reduce_op", "group"),
        lambda W, r, k, n: ((r * W, k), (k, n)),
        lambda t, case, group: symm_cp.matmul_reduce_scatter(
            t[0], t[1], scatter_dim=case.dim, reduce_op=case.reduce_op, group=group
        ),
        _matmul_scatter,
    ),
    "low_contention_all_gather": Kind(
        "low_contention_all_gather",
        ("tensor", "group"),
        lambda W, r, k, n: ((r, k),),
        lambda t, case, group: wait_tensor(symm_cp.low_contention_all_gather(t[0], group=group)),
        lambda ranks, rank, case: [gathered(ranks, 0)],
    ),
    "low_contention_reduce_scatter": Kind(
        "low_contention_reduce_scatter",
        ("tensor", "dim", "reduce_op", "group"),
        lambda W, r, k, n: ((r * W, k),),
        lambda t, case, group: wait_tensor(
            symm_cp.low_contention_reduce_scatter(t[0], reduce_op=case.reduce_op, group=group)
        ),
        _scatter,
    ),
    "one_shot_all_reduce": _all_reduce_kind("one_shot_all_reduce"),
    "one_shot_all_reduce_out": Kind(
        "one_shot_all_reduce",
        ("input", "reduce_op", "group", "out"),
        lambda W, r, k, n: ((r, k), (r, k)),
        lambda t, case, group: OPS.one_shot_all_reduce_out(t[0], case.reduce_op, group, t[1]),
        _all_reduce,
    ),
    "two_shot_all_reduce_": _all_reduce_kind("two_shot_all_reduce_"),
    "reduce_scatter_out": Kind(
        "reduce_scatter_out",
        ("input", "group", "output", "dim"),
        lambda W, r, k, n: ((r * W, k), (r, k)),
        lambda t, case, group: OPS.reduce_scatter_out(t[0], group, case.flag, t[1]),
        _scatter_out,
    ),
    "all_gather_kv": Kind(
        "all_gather_kv",
        ("key", "value", "seq_dim", "group"),
        lambda W, r, k, n: ((1, r, k, n),) * 2,
        lambda t, case, group: list(
            symm_cp.all_gather_kv(t[0], t[1], group=group, seq_dim=case.dim)
        ),
        _gather_kv,
    ),
    "all_gather_attention": Kind(
        "all_gather_attention",
        ("query", "key", "value", "is_causal", "group"),
        lambda W, r, k, n: ((1, r, k, n),) * 3,
        lambda t, case, group: symm_cp.all_gather_attention(
            t[0], t[1], t[2], group=group, is_causal=case.flag
        ),
        _attention,
    ),
    "attention_options": Kind(
        "all_gather_attention",
        ("query", "key", "value", "sinks", "bias", "is_causal", "group"),
        lambda W, r, k, n: (*((1, r, k, n),) * 3, (r,), (r, 2 * k * W - 1)),
        _call_attention_with_options,
        _attention_with_options,
    ),
    "attention_methods": bad_sequences.attention_methods(_attention),
    **bad_sequences.KINDS,
}

_DTYPES = (
    "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64",
    "float8_e4m3fn",
)  # fmt: skip
_CHANGES = (
    "longer", "shorter", "fewer", "more", "dtype", "dtypes", "meta", "strided", "special", "dim",
    "reduce_op", "group", "flag", "option",
)  # fmt: skip


def _changed_tensor(draw: st.DrawFn, change: str, tensor: Given) -> Given:
    shape = list(tensor.shape)
    axis = draw(st.integers(0, max(0, len(shape) - 1)))
    if change in ("longer", "shorter") and shape:
        shape[axis] = max(0, shape[axis] + (1 if change == "longer" else -1))
    if change == "fewer":
        shape = shape[1:]
    if change == "more":
        shape.insert(axis, 2)
    changed = replace(tensor, shape=tuple(shape))
    if change == "dtype":
        changed = replace(changed, dtype=draw(st.sampled_from(_DTYPES)))
    if change == "meta":
        changed = replace(changed, device="meta")
    return replace(
        changed,
        strided=tensor.strided or change == "strided",
        special=tensor.special or change == "special",
    )


def _option(draw: st.DrawFn, kind: Kind) -> list[tuple[str, Any]]:
    if not kind.options:
        return []
    name = draw(st.sampled_from(sorted(kind.options)))
    return [(name, draw(st.sampled_from(kind.options[name])))]


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """A valid call with up to two changes; or a valid call that differs on the last rank."""
    op = draw(st.sampled_from(sorted(KINDS)))
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    tensors = [Given(shape) for shape in KINDS[op].good(world_size, *sizes)]
    case = Case(op, tuple(tensors), seed=draw(st.integers(0, 1 << 20)))
    if world_size > 1 and draw(st.integers(0, 9)) == 0:
        larger = KINDS[op].good(world_size, sizes[0] + 1, *sizes[1:])
        if draw(st.booleans()):
            return replace(case, differs=tuple(Given(shape) for shape in larger))
        return replace(case, differs=tuple(replace(t, dtype="float64") for t in tensors))
    for change in draw(st.lists(st.sampled_from(_CHANGES), max_size=2)):
        index = draw(st.integers(0, len(tensors) - 1))
        if change == "dim":
            case = replace(case, dim=draw(st.integers(-4, 4)))
        elif change == "reduce_op":
            case = replace(case, reduce_op=draw(st.sampled_from(["avg", "max", "SUM", ""])))
        elif change == "group":
            case = replace(case, group=draw(st.sampled_from(["nobody", "none", "number"])))
        elif change == "flag":
            case = replace(case, flag=True)
        elif change == "option":
            case = replace(case, options=(*case.options, *_option(draw, KINDS[op])))
        elif change == "dtypes":
            dtype = draw(st.sampled_from(_DTYPES))
            tensors = [replace(tensor, dtype=dtype) for tensor in tensors]
        elif change != "special" or not any(tensor.special for tensor in tensors):
            tensors[index] = _changed_tensor(draw, change, tensors[index])
    recurrent = ("scan_states", "gated_delta_rule", "gated_linear_attention", "causal_convolution")
    if case.flag or op in ("attention_options", *recurrent):
        # Kernels multiply masked values and zero states by zero or skip them, and zero times
        # infinity is NaN.
        tensors = [replace(tensor, special=False) for tensor in tensors]
    return replace(case, tensors=tuple(tensors))


def group_argument(case: Case, group: dist.ProcessGroup) -> Any:
    """The value passed as the group."""
    by_name = hasattr(OPS, case.op) and not hasattr(symm_cp, case.op)
    this: Any = group.group_name if by_name else group
    return {"this": this, "nobody": "nobody", "none": None, "number": 3}[case.group]
