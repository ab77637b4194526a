"""Options of attention, and layouts of queries, by keys and by heads, against dense attention."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
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
from tests.exhaustive import exhaustive, some
from tests.ops.attention_cases import OP, Case, layouts, positions, run_all

BACKWARD = torch.ops.symm_mem.fused_all_gather_attention_backward
ON_DEVICES = device.devices(*device.NAMES)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 0.7},
    {"sinks": True},
    {"bias": True},
    {"dropout_p": 0.3},
    {"value_features": 5},
    {"value_features": 11, "features": 4},
]


MASKS: list[dict[str, Any]] = [
    {"with_lse": True},
    {"causal": True, "kv_heads": 1, "rotate": "alltoall"},
    {"causal": True, "left": 4, "with_lse": True},
    {"padded": True, "causal": True},
    {"prefixed": True, "causal": True},
]


def made(
    layout: SequenceLayout,
    queries: SequenceLayout | None = None,
    *,
    padded: bool = False,
    prefixed: bool = False,
    **options: Any,
) -> Case:
    """A case with a sample that has no key, if padded, and with one that has no prefix."""
    chosen: dict[str, Any] = {"batch": 2, "features": 8, "dtype": torch.float64, **options}
    if padded:
        chosen["key_mask"] = torch.rand(chosen["batch"], layout.length) < 0.7
        chosen["key_mask"][0] = False
    if prefixed:
        chosen["prefixes"] = torch.randint(layout.length + 1, (chosen["batch"],))
        chosen["prefixes"][0] = 0
    return Case(layout, queries, **chosen)


def each(world_size: int) -> list[Case]:
    return [
        made(layout, **{**mask, **option})
        for layout in (head_tail(12 * world_size + 3, world_size), *layouts(world_size))
        for option in OPTIONS
        for mask in MASKS
    ]


METHODS = ("allgather", "ulysses")
#: Numbers of heads for exchanges of them, by up to 4 ranks.
HEADS: list[dict[str, int]] = [
    {"heads": 4, "kv_heads": 4},
    {"heads": 8, "kv_heads": 2},
    {"heads": 8, "kv_heads": 1},
    {"heads": 6, "kv_heads": 6},
    {"heads": 6, "kv_heads": 2},
]


def run_by(group: dist.ProcessGroup, method: str, cases: list[Case]) -> None:
    """Runs cases by a method; for exchanges of heads, the numbers of heads take turns."""
    if method == "ulysses":
        turns = zip(cases, itertools.cycle(HEADS), strict=False)
        cases = [replace(case, options={"method": method}, **heads) for case, heads in turns]
    run_all(group, cases, random.randrange(1 << 30))


@ON_DEVICES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.ranks(3)
def test_each_option(group: dist.ProcessGroup, method: str) -> None:
    run_by(group, method, random.sample(each(3), 11))


@exhaustive
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.ranks
def test_each_option_with_each_mask(group: dist.ProcessGroup, world_size: int, method: str) -> None:
    run_by(group, method, each(world_size))


def combined(layout: SequenceLayout, chosen: random.Random) -> Case:
    """A random combination of options."""
    pick, kv_heads = chosen.choice, chosen.choice([1, 2])
    return made(
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
@pytest.mark.parametrize(
    ("world_size", "method"),
    some((2, "allgather"), (4, "ulysses"), of=itertools.product((1, 2, 3, 4), METHODS)),
)
@pytest.mark.ranks
def test_combinations(group: dist.ProcessGroup, world_size: int, method: str) -> None:
    chosen = random.Random(random.randrange(1 << 30))
    cases = [combined(layout, chosen) for layout in layouts(world_size) for _ in range(5)]
    run_by(group, method, cases)


@ON_DEVICES
@pytest.mark.parametrize(
    ("world_size", "method"),
    some((2, "allgather"), of=[*itertools.product((1, 2, 4), METHODS[:1]), (3, "ulysses")]),
)
@pytest.mark.exhaustive
@pytest.mark.ranks
def test_many_rows(group: dist.ProcessGroup, world_size: int, method: str) -> None:
    """Enough rows and keys for several blocks of the kernels, and tiles with bands."""
    layout = head_tail(300 * world_size + 1, world_size)
    cases = [
        made(layout, batch=1, dtype=dtype, causal=True, features=16, value_features=24, **more)
        for dtype, more in itertools.product(
            (torch.float32, torch.bfloat16),
            (
                {"softcap": 2.0, "sinks": True, "bias": True, "dropout_p": 0.2, "with_lse": True},
                {"left": 100, "softcap": 2.0, "bias": True},
                {"with_lse": True},
            ),
        )
    ]
    run_by(group, method, cases)


@ON_DEVICES
@pytest.mark.parametrize(
    ("world_size", "method"),
    some((2, "allgather"), (2, "ulysses"), of=itertools.product((1, 2, 3, 4), METHODS)),
)
@pytest.mark.ranks
def test_queries_of_another_layout(group: dist.ProcessGroup, world_size: int, method: str) -> None:
    W = world_size
    keys, uneven = head_tail(11 * W + 2, W), sequential(7 * W + 1, W)
    same = sequential(11 * W + 2, W)  # the keys' sequence, spread differently
    cases = [
        made(keys, uneven, bias=True, dropout_p=0.2, sinks=True, softcap=1.0),
        made(keys, uneven, bias=True, padded=True, with_lse=True),
        made(keys, uneven, dropout_p=0.5, value_features=3),
        made(keys, uneven, causal=True, left=5),
        made(keys, same, causal=True, bias=True),
        made(keys, same, causal=True),
        made(same, keys, left=3, dropout_p=0.3),
        made(keys, same, padded=True),
        made(sequential(0, W), uneven, sinks=True, with_lse=True),
        made(sequential(0, W), uneven, bias=True, value_features=3),
        made(keys, sequential(0, W), sinks=True, with_lse=True),
    ]
    run_by(group, method, cases)
    if method == "ulysses":  # without a mask queries of another length need no layout
        run_by(group, method, [Case(sequential(5 * W, W), queries=3, dtype=torch.float64)])


# --- dropout ---------------------------------------------------------------------------------


def masks_of_dropout(
    group: dist.ProcessGroup, layout: SequenceLayout, method: str, heads: tuple[int, int], seed: int
) -> None:
    """One-hot values show which weights forward, backward and recomputed passes drop."""
    B, (H, G), S, p, rank = 2, heads, layout.length, 0.4, group.rank()
    rows = positions(layout, rank)
    weights = philox.kept(*map(torch.arange, (B, H, S, S)), p=p, seed=seed).double()  # type: ignore[arg-type]
    weights = weights.tril() / (1 - p) / torch.arange(1, S + 1).unsqueeze(1)
    q, k = (torch.zeros(B, n, len(rows), 4, dtype=torch.float64) for n in (H, G))
    one_hot = torch.eye(S, dtype=torch.float64)[rows]
    v = one_hot.expand(B, G, -1, -1).clone().requires_grad_()
    options = {"chunk_order": layout.chunk_order, "chunk_lengths": layout.chunk_lengths}
    if method == "ulysses":
        options["method"] = method

    def attend(v: torch.Tensor) -> torch.Tensor:
        drawn = torch.tensor(seed, device="cpu")
        out: torch.Tensor = OP(
            q, k, v, group.group_name, is_causal=True, dropout_p=p, dropout_seed=drawn,
            enable_gqa=True, **options,
        )[0]  # fmt: skip
        return out

    set_rotate_method("alltoall" if method == "alltoall" else "allgather")
    try:
        for recomputed in (False, True):
            out = checkpoint(attend, v, use_reentrant=False) if recomputed else attend(v)
            torch.testing.assert_close(out, weights[:, :, rows], rtol=1e-12, atol=0)
            # The gradient of value j is the sum of the weights that it has in each row.
            (grad,) = torch.autograd.grad(out, v, one_hot.expand_as(out))
            of_keys = weights.mT.unflatten(1, (G, -1)).sum(2)
            torch.testing.assert_close(grad, of_keys[:, :, rows], rtol=1e-12, atol=0)
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
        for method in ("allgather", "alltoall", "ulysses"):
            heads = random.choice([(4, 4), (8, 2), (5, 5)])
            ranks.run(world_size, masks_of_dropout, layout, method, heads, seed)


@ON_DEVICES
@pytest.mark.ranks(2)
def test_the_same_weights_are_dropped_in_part_of_the_heads(group: dist.ProcessGroup) -> None:
    """The last heads alone give their part of the attention and gradients of all heads."""
    seed = random.randrange(1 << 62)
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


@pytest.mark.ranks(2)
def test_ranks_with_different_seeds_are_told_to_seed_alike(group: dist.ProcessGroup) -> None:
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


# --- rows without keys, gradients, modes -----------------------------------------------------


@pytest.mark.ranks(2)
def test_rows_that_see_only_a_sink(group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    hidden = torch.zeros(1, 6 * group.size(), dtype=torch.bool)
    out, lse = OP(q, k, v, group.group_name, sinks=sinks, key_mask=hidden)
    assert not out.any()
    assert torch.equal(lse, sinks.detach().view(1, 2, 1).expand_as(lse))
    grads = torch.autograd.grad(out.sum() + lse[:, 0].sum(), (q, k, v, sinks))
    assert not any(grad.any() for grad in grads[:3])
    assert torch.equal(grads[3], torch.tensor([12.0, 0.0]))
