"""Matmul-all-reduce on CPU: right, the same on all ranks, and left by all ranks together."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.testing import Ranks
from tests import reference
from tests.exhaustive import some
from tests.patience import patient

OP = torch.ops.symm_mem.fused_matmul_all_reduce
#: Leading dimensions and columns: one row, none, several, two exchanges with 3 ranks and more, and
#: parts that end within a row.
SHAPES = (((1,), 1024), ((0,), 5), ((2, 3), 0), ((2, 5), 33), ((7,), 9_001), ((3, 1, 2), 10_000))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def strided(matrix: torch.Tensor) -> torch.Tensor:
    return torch.stack([matrix, matrix], -1)[..., 0]


def results(
    group: dist.ProcessGroup, lead: tuple[int, ...], columns: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """All results of a rank, compared with the products of all ranks, which each rank knows."""
    name, rank, W = group.group_name, group.rank(), group.size()
    inner = [5 * r for r in range(W)] if columns == 33 else [64] * W
    lefts = [torch.randn(*lead, k).to(dtype) for k in inner]
    rights = [torch.randn(columns, k).to(dtype).t() for k in inner]
    bias = torch.randn(columns).to(dtype)
    found = []
    for reduce_op, has_bias in (("sum", False), ("sum", True), ("avg", False), ("avg", True)):
        added = bias if has_bias else None
        got = OP(lefts[rank], rights[rank], added, reduce_op, name)
        again = OP(strided(lefts[rank]), rights[rank], added, reduce_op, name)
        assert got.is_contiguous()
        assert got.dtype == dtype
        torch.testing.assert_close(again, got)
        exact = expected(lefts, rights, added, reduce_op)
        exact.check(got)
        found.append(got)
    return found


def expected(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    bias: torch.Tensor | None,
    reduce_op: str,
) -> reference.Expected:
    """Partial sums are rounded, one of them with the bias; an average before the bias is added."""
    parts = [reference.matmul(a, b) for a, b in zip(lefts, rights, strict=True)]
    share = len(parts) if reduce_op == "avg" else 1
    value = sum(part.value for part in parts) / share
    magnitude = sum(part.magnitude for part in parts) / share
    partials = sum(part.value.abs() for part in parts) / share
    if bias is not None:
        partials = partials + (value if reduce_op == "avg" else bias.double()).abs()
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    terms = sum(part.terms for part in parts) + 2
    return reference.Expected(value, magnitude, terms, partials)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        (1, torch.float32),
        (2, torch.float32),
        (3, torch.bfloat16),
        of=itertools.product([1, 2, 3, 4], DTYPES),
    ),
)
def test_results(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    for lead, columns in SHAPES:
        by_rank = ranks.run(world_size, results, lead, columns, dtype)
        for found in zip(*by_rank, strict=True):
            assert all(torch.equal(found[0], other) for other in found[1:])


def algorithms_of(group: dist.ProcessGroup) -> None:
    name = group.group_name
    for rows in (1, 3000):
        a, w = torch.ones(rows, 2), torch.ones(2, 200)
        found = OP(a, w, None, "sum", name)
        for algorithm in ("shards", "whole"):
            with tuning.forced(algorithm):
                assert torch.equal(OP(a, w, None, "sum", name), found)
    with tuning.forced("pipeline"):  # an algorithm of attention
        OP(torch.ones(1, 1), torch.ones(1, 1), None, "sum", name)


def test_algorithms_of_any_size(ranks: Ranks) -> None:
    ranks.run(2, algorithms_of)


def works(group: dist.ProcessGroup) -> None:
    found = OP(torch.ones(3, 4), torch.ones(4, 2), None, "sum", group.group_name)
    assert torch.equal(found, torch.full((3, 2), 4.0 * group.size()))


def fails_on_one_rank(group: dist.ProcessGroup, failing: int) -> None:
    name, fails = group.group_name, group.rank() == failing
    works(group)
    # MKL would copy this matrix, which is larger than the address space.
    inner = 1 << 46 if fails else 4
    a, w = torch.ones(1).expand(2, inner), torch.ones(1).expand(inner, 3)
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            OP(a, w, None, "sum", name)
        assert time.monotonic() - start < patient(5)
        assert fails or f"RuntimeError on rank {failing}: " in str(caught.value)
        works(group)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_a_matmul_that_fails_on_one_rank_fails_on_all(ranks: Ranks, world_size: int) -> None:
    for failing in range(world_size):
        ranks.run(world_size, fails_on_one_rank, failing)


def disagree(group: dist.ProcessGroup) -> None:
    name, first = group.group_name, group.rank() == 0
    ones = torch.ones
    good = ones(3, 4), ones(4, 2), None, "sum"
    for other in (
        (ones(2, 4), ones(4, 2), None, "sum"),
        (ones(3, 4), ones(4, 5), None, "sum"),
        (ones(3, 4), ones(4, 2), ones(2), "sum"),
        (ones(3, 4), ones(4, 2), None, "avg"),
        (ones(3, 4).bfloat16(), ones(4, 2).bfloat16(), None, "sum"),
    ):
        with pytest.raises(RuntimeError, match=r"ranks disagree: rank \d calls fused_matmul_all_"):
            OP(*(other if first else good), name)
        works(group)


def test_ranks_that_disagree_hear_of_it(ranks: Ranks) -> None:
    ranks.run(3, disagree)
