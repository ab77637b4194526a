"""`fused_all_gather_attention`: every mask and layout, forward and backward, against dense."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import set_rotate_method
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.attention_reference import Problem
from tests.exhaustive import some
from tests.ops.attention_cases import OP, Case, run_all, strided

pytestmark = device.devices(*device.NAMES)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def masks(layout: SequenceLayout) -> list[dict[str, Any]]:
    length = layout.length
    documents = tuple(sorted({0, length // 3, length // 2, length}))
    return [
        {},
        {"causal": True},
        {"causal": True, "documents": documents},
        {"documents": documents},
        {"left": 5, "right": 2},
        {"left": 0, "causal": True},
        {"right": 3},
        {"left": 7, "documents": documents},
    ]


def layouts(world_size: int) -> list[SequenceLayout]:
    """Even, uneven and unusual layouts."""
    order = list(range(3 * world_size))
    random.Random(world_size).shuffle(order)
    lengths = [(5, 0, 9)[i % 3] for i in range(3 * world_size)]
    lonely = SequenceLayout(world_size, tuple(range(world_size)), (0,) * (world_size - 1) + (17,))
    return [
        sequential(8 * world_size, world_size),
        head_tail(12 * world_size, world_size),
        head_tail(12 * world_size + 5, world_size),
        SequenceLayout(world_size, tuple(order), tuple(lengths)),
        lonely,  # ranks without queries and keys
    ]


@WORLD_SIZES
def test_masks_and_layouts(ranks: Ranks, world_size: int) -> None:
    cases = [
        Case(
            layout,
            dtype=torch.float64,
            rotate=("allgather", "alltoall")[(number + turn) % 2],
            with_lse=number % 2 == 1,
            **mask,
        )
        for number, layout in enumerate(layouts(world_size))
        for turn, mask in enumerate(masks(layout))
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(*list(enumerate(DTYPES, 1))[1:3], of=itertools.product([1, 2, 3, 4], DTYPES)),
    ids=str,
)
def test_dtypes_heads_and_features(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    layout = head_tail(64 * world_size, world_size)
    cases = [
        Case(
            layout,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            features=features,
            dtype=dtype,
            causal=causal,
            scale=scale,
            with_lse=lse,
        )
        for batch, heads, kv_heads, features, causal, scale, lse in (
            (1, 2, 2, 64, False, None, False),
            (3, 4, 2, 32, True, None, False),
            (2, 6, 1, 128, True, 0.2, False),
            (1, 3, 3, 17, False, None, True),
            (2, 2, 2, 1, True, None, False),
        )
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@WORLD_SIZES
def test_other_lengths_strides_and_empty_inputs(ranks: Ranks, world_size: int) -> None:
    layout = sequential(12 * world_size, world_size)
    uneven = SequenceLayout(world_size, tuple(range(world_size)), tuple(range(1, world_size + 1)))
    cases = [
        Case(layout, queries=5, dtype=torch.float64),
        Case(uneven, queries=7, heads=4, dtype=torch.float64),
        Case(sequential(0, world_size), queries=3, dtype=torch.float64),  # nothing is seen
        Case(sequential(0, world_size)),
        Case(layout, batch=0),
        Case(layout, causal=True, strided="rows first"),
        Case(layout, causal=True, strided="features apart", with_lse=True),
        Case(layout, dtype=torch.bfloat16, strided="rows first"),
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_long_enough_for_many_blocks(ranks: Ranks, world_size: int) -> None:
    layout = head_tail(280 * world_size + 1, world_size)
    edges = (0, 100, 270, layout.length)
    cases = [
        Case(layout, causal=True, features=16),
        Case(layout, left=270, right=0, features=16),
        Case(layout, left=40, right=300, features=16, rotate="alltoall"),
        Case(layout, causal=True, documents=edges, features=16, dtype=torch.bfloat16),
    ]
    ranks.run(world_size, run_all, cases, int(torch.randint(1 << 30, ())))


def repeat_bits(group: dist.ProcessGroup, seed: int) -> None:
    W = group.size()
    generator = torch.Generator(device.name()).manual_seed(seed + group.rank())
    order = list(head_tail(96 * W, W).chunk_order)
    for dtype, kv_heads in itertools.product((torch.float32, torch.bfloat16), (1, 4)):
        shapes = [(2, heads, 96, 32) for heads in (4, kv_heads, kv_heads, 4)]
        q, k, v, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
        for method in ("allgather", "alltoall", "ulysses"):
            set_rotate_method("alltoall" if method == "alltoall" else "allgather")
            runs = []
            # Tensors of projections have the heads of a position next to each other.
            for how in ("", "", "rows first"):
                leaves = [strided(t, how).requires_grad_() for t in (q, k, v)]
                out, lse = OP(
                    *leaves, group.group_name, is_causal=True, chunk_order=order,
                    enable_gqa=True, method="ulysses" if method == "ulysses" else "allgather",
                )  # fmt: skip
                runs.append([out, lse, *torch.autograd.grad(out, leaves, grad)])
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True)), method
    set_rotate_method("allgather")


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_results_are_bitwise_the_same_from_run_to_run(
    group: dist.ProcessGroup, world_size: int
) -> None:
    seed = int(torch.randint(1 << 30, ()))
    # On CUDA torch's kernels add up gradients in the order in which blocks end, unless told not to.
    torch.use_deterministic_algorithms(device.name() == "cuda")
    try:
        repeat_bits(group, seed)
    finally:
        torch.use_deterministic_algorithms(False)


def error_in_bfloat16(group: dist.ProcessGroup, length: int, seed: int) -> list[float]:
    generator = torch.Generator(device.name()).manual_seed(seed)
    whole = [torch.randn(1, 2, length, 32, generator=generator).bfloat16() for _ in range(4)]
    exact = Problem(*(t.double() for t in whole[:3]), torch.ones(length, length, dtype=torch.bool),
                    whole[3].double()).solve(torch.float64)  # fmt: skip
    q, k, v, grad = (t.chunk(group.size(), 2)[group.rank()] for t in whole)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = OP(*leaves, group.group_name)
    found = torch.autograd.grad(out, leaves, grad)
    return [
        float((got.double() - exact[name].chunk(group.size(), 2)[group.rank()]).square().sum())
        for name, got in zip("qkv", found, strict=True)
    ]


def test_errors_in_16_bits_do_not_grow_with_the_number_of_ranks(ranks: Ranks) -> None:
    seed = int(torch.randint(1 << 30, ()))
    errors = {}
    for world_size in (1, 2, 4):
        found = ranks.run(world_size, error_in_bfloat16, 512, seed)
        errors[world_size] = [sum(parts) ** 0.5 for parts in zip(*found, strict=True)]
    # More parts are rounded, but each part is smaller: the mean error stays the same.
    for world_size in (2, 4):
        for alone, spread in zip(errors[1], errors[world_size], strict=True):
            assert spread <= 1.3 * alone, errors


@WORLD_SIZES
@pytest.mark.ranks
def test_keys_and_values_lie_anywhere(group: dist.ProcessGroup, world_size: int) -> None:
    """Keys and values travel from where they lie, in one exchange."""
    query, behind, before = (torch.randn(1, 2, 5, 8) for _ in range(3))
    both = torch.stack((before, behind))
    call = partial(OP, query, group_name=group.group_name, is_causal=True)
    for of_key, of_value in ((0, 1), (1, 0), (0, 0)):
        apart = call(both[of_key].clone(), both[of_value].clone())
        assert all(map(torch.equal, call(both[of_key], both[of_value]), apart))
        rows = both.transpose(2, 3).contiguous().transpose(2, 3)  # keys are not contiguous
        assert all(map(torch.equal, call(rows[of_key], both[of_value]), apart))
