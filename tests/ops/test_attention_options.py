"""Soft caps, sinks, biases, dropout, widths of values and layouts of queries, against dense."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from symm_cp import set_rotate_method
from symm_cp.ops.attention import philox
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.attention_reference import Problem, check
from tests.exhaustive import exhaustive, some

OP = torch.ops.symm_mem.fused_all_gather_attention
BACKWARD = torch.ops.symm_mem.fused_all_gather_attention_backward
ON_DEVICES = device.devices(*device.NAMES)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    layout: SequenceLayout
    queries: SequenceLayout | None = None  # if of another sequence, or spread differently
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    features: int = 8
    value_features: int = 8
    dtype: torch.dtype = torch.float64
    causal: bool = False
    left: int | None = None
    padded: bool = False
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    dropout_p: float = 0.0
    with_lse: bool = False
    scale: float | None = None
    rotate: str = "allgather"

    @property
    def of_queries(self) -> SequenceLayout:
        return self.layout if self.queries is None else self.queries

    def visible(self, key_mask: torch.Tensor | None) -> torch.Tensor:
        queries, keys = self.of_queries.length, self.layout.length
        offset = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
        mask = torch.ones(self.batch, 1, queries, keys, dtype=torch.bool)
        if self.causal:
            mask &= offset <= 0
        if self.left is not None:
            mask &= offset >= -self.left
        return mask if key_mask is None else mask & key_mask[:, None, None]

    def arguments(self) -> dict[str, Any]:
        queries = {}
        if self.queries is not None:
            queries = {
                "query_chunk_order": list(self.queries.chunk_order),
                "query_chunk_lengths": list(self.queries.chunk_lengths),
            }
        return {
            "is_causal": self.causal,
            "window_left": self.left,
            "scale": self.scale,
            "enable_gqa": self.heads != self.kv_heads,
            "chunk_order": list(self.layout.chunk_order),
            "chunk_lengths": list(self.layout.chunk_lengths),
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            **queries,
        }


def positions(layout: SequenceLayout, rank: int) -> torch.Tensor:
    return torch.tensor(list(layout.positions(rank)), dtype=torch.int64)


def kept(case: Case, seed: int) -> torch.Tensor | None:
    """Which weights dropout keeps, by torch's ops."""
    if not case.dropout_p:
        return None
    sizes = (case.batch, case.heads, case.of_queries.length, case.layout.length)
    return philox.kept(*map(torch.arange, sizes), p=case.dropout_p, seed=seed)  # type: ignore[arg-type]


def run(group: dist.ProcessGroup, case: Case, seed: int, **method: Any) -> None:
    """Checks a case; `method` are the options of a method."""
    generator = torch.Generator(device.name()).manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).double()

    S, keys, rank = case.of_queries.length, case.layout.length, group.rank()
    q = draw(case.batch, case.heads, S, case.features)
    k = draw(case.batch, case.kv_heads, keys, case.features)
    v = draw(case.batch, case.kv_heads, keys, case.value_features)
    grad_out = draw(case.batch, case.heads, S, case.value_features)
    grad_lse = draw(*q.shape[:3]) if case.with_lse else None
    # Those of 16-bit models are often kept in float32.
    wide = random.Random(seed).choice([case.dtype, torch.promote_types(case.dtype, torch.float32)])
    options: dict[str, torch.Tensor] = {}
    if case.sinks:
        options["sinks"] = draw(case.heads, dtype=wide)
        options["sinks"][0] = -torch.inf if seed % 4 == 0 else 3.0
    if case.bias:
        options["bias"] = draw(case.heads, max(0, S + keys - 1), dtype=wide)
    key_mask = None
    if case.padded:
        key_mask = torch.rand(case.batch, keys, generator=generator) < 0.7
        key_mask[0] = False  # a sample without a key
    problem = Problem(
        q, k, v, case.visible(key_mask), grad_out, grad_lse, case.scale, case.softcap,
        options.get("sinks"), options.get("bias"), kept(case, seed), case.dropout_p,
    )  # fmt: skip
    exact, dense = problem.solve(torch.float64), problem.solve(case.dtype)

    at = {"k": positions(case.layout, rank), "v": positions(case.layout, rank)}
    at["q"] = at["out"] = at["lse"] = positions(case.of_queries, rank)
    inputs = {
        name: t[:, :, at[name]].to(case.dtype).requires_grad_()
        for name, t in (("q", q), ("k", k), ("v", v))
    }
    inputs |= {name: t.to(wide).requires_grad_() for name, t in options.items()}
    set_rotate_method(case.rotate)
    try:
        q, k, v, *_ = inputs.values()
        out, lse = OP(
            q, k, v, group.group_name, **case.arguments(), **method, key_mask=key_mask,
            dropout_seed=torch.tensor([seed], device="cpu"),
            **{name: inputs[name] for name in options},
        )  # fmt: skip
        outputs, grads = [out], [grad_out[:, :, at["q"]].to(case.dtype)]
        if grad_lse is not None:
            outputs.append(lse)
            grads.append(grad_lse[:, :, at["q"]].to(lse.dtype))
        found = torch.autograd.grad(outputs, list(inputs.values()), grads)
    finally:
        set_rotate_method("allgather")
    results = {"out": out, "lse": lse, **dict(zip(inputs, found, strict=True))}
    sizes = problem.terms()
    for name, result in results.items():
        text = f"{name} of {case}, seed {seed}"
        if name not in options:
            given = [result, exact[name], dense[name]]
            size = sizes.get(name, 1.0)
            check(text, *given, at[name], result.dtype, dropped=case.dropout_p, size=size)
            continue
        assert result.dtype == wide, text
        dist.all_reduce(result, group=group)  # each rank has its part
        given = [t.reshape(1, 1, -1) for t in (result, exact[name], dense[name])]
        terms = case.batch * S * (case.features + case.value_features)
        entries = torch.arange(given[0].shape[2])
        size = max(sizes.values(), default=1.0)
        check(text, *given, entries, case.dtype, terms, dropped=case.dropout_p, size=size)


def run_all(group: dist.ProcessGroup, cases: list[Case], seed: int, **method: Any) -> None:
    for number, case in enumerate(cases):
        run(group, case, seed + number, **method)


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 0.7},
    {"sinks": True},
    {"bias": True},
    {"dropout_p": 0.3},
    {"value_features": 5},
    {"value_features": 11, "features": 4},
]


def layouts(world_size: int) -> list[SequenceLayout]:
    """An even layout, an uneven one in random order, and one with ranks without keys."""
    order = list(range(3 * world_size))
    random.shuffle(order)
    lengths = [(5, 0, 9)[i % 3] for i in order]
    lonely = SequenceLayout(world_size, tuple(range(world_size)), (0,) * (world_size - 1) + (17,))
    return [
        head_tail(12 * world_size + 3, world_size),
        SequenceLayout(world_size, tuple(order), tuple(lengths)),
        lonely,
    ]


MASKS: list[dict[str, Any]] = [
    {"with_lse": True},
    {"causal": True, "kv_heads": 1, "rotate": "alltoall"},
    {"causal": True, "left": 4, "with_lse": True},
    {"padded": True, "causal": True},
]


def each(world_size: int) -> list[Case]:
    return [
        Case(layout, **{**mask, **option})
        for layout in layouts(world_size)
        for option in OPTIONS
        for mask in MASKS
    ]


@ON_DEVICES
def test_each_option(ranks: Ranks) -> None:
    ranks.run(3, run_all, random.sample(each(3), 16), int(torch.randint(1 << 30, ())))


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_option_with_each_mask(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, run_all, each(world_size), int(torch.randint(1 << 30, ())))


def combined(layout: SequenceLayout, chosen: random.Random) -> Case:
    """A random combination of options."""
    pick, kv_heads = chosen.choice, chosen.choice([1, 2])
    return Case(
        layout,
        batch=pick([1, 3]),
        heads=kv_heads * pick([1, 2, 3]),
        kv_heads=kv_heads,
        features=pick([4, 8, 17]),
        value_features=pick([4, 8, 17]),
        dtype=pick(DTYPES),
        causal=pick([False, True]),
        left=pick([None, 0, 7]),
        padded=pick([False, True]),
        softcap=pick([None, 0.5, 30.0]),
        sinks=pick([False, True]),
        bias=pick([False, True]),
        dropout_p=pick([0.0, 0.1, 0.9]),
        with_lse=pick([False, True]),
        scale=pick([None, 0.3, -0.5]),
        rotate=pick(["allgather", "alltoall"]),
    )


@ON_DEVICES
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_combinations(ranks: Ranks, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    chosen = random.Random(seed)
    cases = [combined(layout, chosen) for layout in layouts(world_size) for _ in range(6)]
    ranks.run(world_size, run_all, cases, seed)


@ON_DEVICES
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 4]))
@pytest.mark.exhaustive
def test_many_rows(ranks: Ranks, world_size: int) -> None:
    """Enough rows and keys for several blocks of the kernels, and tiles with bands."""
    layout = head_tail(300 * world_size + 1, world_size)
    cases = [
        Case(layout, batch=1, dtype=dtype, causal=True, features=16, value_features=24, **more)
        for dtype, more in itertools.product(
            (torch.float32, torch.bfloat16),
            (
                {"softcap": 2.0, "sinks": True, "bias": True, "dropout_p": 0.2, "with_lse": True},
                {"left": 100, "softcap": 2.0, "bias": True},
            ),
        )
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@ON_DEVICES
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_queries_of_another_layout(ranks: Ranks, world_size: int) -> None:
    W = world_size
    keys, uneven = head_tail(11 * W + 2, W), sequential(7 * W + 1, W)
    same = sequential(11 * W + 2, W)  # the keys' sequence, spread differently
    cases = [
        Case(keys, uneven, bias=True, dropout_p=0.2, sinks=True, softcap=1.0),
        Case(keys, uneven, bias=True, padded=True, with_lse=True),
        Case(keys, uneven, dropout_p=0.5, value_features=3),
        Case(keys, uneven, causal=True, left=5),
        Case(keys, same, causal=True, bias=True),
        Case(keys, same, causal=True),
        Case(same, keys, left=3, dropout_p=0.3),
        Case(keys, same, padded=True),
        Case(sequential(0, W), uneven, sinks=True, with_lse=True),
        Case(sequential(0, W), uneven, bias=True, value_features=3),
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


# --- dropout ---------------------------------------------------------------------------------


def masks_of_dropout(
    group: dist.ProcessGroup, layout: SequenceLayout, rotate: str, seed: int
) -> None:
    """One-hot values show which weights forward, backward and recomputed passes drop."""
    B, H, S, p, rank = 2, 3, layout.length, 0.4, group.rank()
    rows = positions(layout, rank)
    weights = philox.kept(*map(torch.arange, (B, H, S, S)), p=p, seed=seed).double()  # type: ignore[arg-type]
    weights = weights.tril() / (1 - p) / torch.arange(1, S + 1).unsqueeze(1)
    q, k = (torch.zeros(B, H, len(rows), 4, dtype=torch.float64) for _ in range(2))
    v = torch.eye(S, dtype=torch.float64)[rows].expand(B, H, -1, -1).clone().requires_grad_()
    options = {"chunk_order": layout.chunk_order, "chunk_lengths": layout.chunk_lengths}

    def attend(v: torch.Tensor) -> torch.Tensor:
        drawn = torch.tensor(seed, device="cpu")
        out: torch.Tensor = OP(
            q, k, v, group.group_name, is_causal=True, dropout_p=p, dropout_seed=drawn, **options
        )[0]
        return out

    set_rotate_method(rotate)
    try:
        for recomputed in (False, True):
            out = checkpoint(attend, v, use_reentrant=False) if recomputed else attend(v)
            torch.testing.assert_close(out, weights[:, :, rows], rtol=1e-12, atol=0)
            # The gradient of value j is the sum of the weights that it has in each row.
            (grad,) = torch.autograd.grad(out, v, v.detach())
            torch.testing.assert_close(grad, weights.mT[:, :, rows], rtol=1e-12, atol=0)
    finally:
        set_rotate_method("allgather")


@ON_DEVICES
@pytest.mark.parametrize("world_size", some(1, 2, 4, of=[1, 2, 3, 4]))
def test_the_same_weights_are_dropped_in_every_layout(ranks: Ranks, world_size: int) -> None:
    order = list(range(2 * world_size))
    random.shuffle(order)
    lengths = [0] * len(order)
    for _ in range(37):
        lengths[random.randrange(len(order))] += 1
    custom = SequenceLayout(world_size, tuple(order), tuple(lengths))
    seed = random.choice([0, 7, -1, (1 << 63) - 1, random.randrange(1 << 63)])
    for layout in (head_tail(37, world_size), sequential(37, world_size), custom):
        for rotate in ("allgather", "alltoall"):
            ranks.run(world_size, masks_of_dropout, layout, rotate, seed)


def heads_apart(group: dist.ProcessGroup, seed: int) -> None:
    """The last heads alone give their part of the attention and gradients of all heads."""
    rank, W, first = group.rank(), group.size(), 1
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = torch.randn(
        4, 2, 3, 6 * W, 4, generator=generator, dtype=torch.float64
    ).unbind()
    at = positions(head_tail(6 * W, W), rank)
    options = {"dropout_p": 0.4, "dropout_seed": torch.tensor(seed), "is_causal": True}
    options |= {"chunk_order": head_tail(6 * W, W).chunk_order}

    def results(heads: slice, **given: int) -> list[torch.Tensor]:
        inputs = [t[:, heads, at].contiguous().requires_grad_() for t in (q, k, v)]
        out, lse = OP(*inputs, group.group_name, **options, **given)
        return [out, lse, *torch.autograd.grad(out, inputs, grad[:, heads, at])]

    for part, whole in zip(
        results(slice(first, None), head_offset=first), results(slice(None)), strict=True
    ):
        assert torch.equal(part, whole[:, first:])
    with pytest.raises(ValueError, match="head_offset=-1 must not be negative"):
        results(slice(None), head_offset=-1)
    dist.barrier(group)


@ON_DEVICES
def test_the_same_weights_are_dropped_in_part_of_the_heads(ranks: Ranks) -> None:
    ranks.run(2, heads_apart, random.randrange(1 << 62))


def differing_seeds(group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    seed = torch.tensor([(1 << 62) + group.rank()])
    with pytest.raises(RuntimeError, match=r"dropout_seed=-?\d+: must be equal") as caught:
        OP(q, q, q, group.group_name, dropout_p=0.1, dropout_seed=seed)
    assert f"dropout_seed={int(seed)}" in str(caught.value)
    dist.barrier(group)
    out, lse = OP(q, q, q, group.group_name, dropout_p=0.1, dropout_seed=torch.tensor(1))
    given = [t.detach() for t in (out, q, q, q, out, lse)]
    with pytest.raises(RuntimeError, match=r"dropout_seed=-?\d+: must be equal"):
        BACKWARD(*given, group.group_name, dropout_p=0.1, dropout_seed=seed)
    dist.barrier(group)
    unused = OP(q, q, q, group.group_name, dropout_seed=seed)[0]  # nothing is dropped
    assert unused.isfinite().all()


def test_ranks_with_different_seeds_are_told_to_seed_alike(ranks: Ranks) -> None:
    ranks.run(2, differing_seeds)


# --- rows without keys, gradients, modes -----------------------------------------------------


def only_sinks(group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    hidden = torch.zeros(1, 6 * group.size(), dtype=torch.bool)
    out, lse = OP(q, k, v, group.group_name, sinks=sinks, key_mask=hidden)
    assert not out.any()
    assert torch.equal(lse, sinks.detach().view(1, 2, 1).expand_as(lse))
    grads = torch.autograd.grad(out.sum() + lse[:, 0].sum(), (q, k, v, sinks))
    assert not any(grad.any() for grad in grads[:3])
    assert torch.equal(grads[3], torch.tensor([12.0, 0.0]))


def test_rows_that_see_only_a_sink(ranks: Ranks) -> None:
    ranks.run(2, only_sinks)
