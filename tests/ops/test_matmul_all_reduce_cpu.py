"""Matmul-all-reduce on CPU: right, the same on all ranks, and left by all ranks together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.ops.refusals import check_disagreements
from tests.patience import patient

OP = torch.ops.symm_mem.fused_matmul_all_reduce


@pytest.mark.ranks(2)
def test_algorithms_of_any_size(group: dist.ProcessGroup) -> None:
    name = group.group_name
    for rows in (1, 3000):
        a, w = torch.ones(rows, 2), torch.ones(2, 200)
        found = OP(a, w, None, "sum", name)
        for algorithm in ("shards", "whole"):
            with tuning.forced(algorithm):
                assert torch.equal(OP(a, w, None, "sum", name), found)
    with tuning.forced("pipeline"):  # an algorithm of attention
        OP(torch.ones(1, 1), torch.ones(1, 1), None, "sum", name)


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


@pytest.mark.ranks(3)
def test_ranks_that_disagree_hear_of_it(group: dist.ProcessGroup) -> None:
    name, first = group.group_name, group.rank() == 0
    ones = torch.ones
    good = ones(3, 4), ones(4, 2), None, "sum"
    others = [
        (ones(2, 4), ones(4, 2), None, "sum"),
        (ones(3, 4), ones(4, 5), None, "sum"),
        (ones(3, 4), ones(4, 2), ones(2), "sum"),
        (ones(3, 4), ones(4, 2), None, "avg"),
        (ones(3, 4).bfloat16(), ones(4, 2).bfloat16(), None, "sum"),
    ]

    def call(arguments: Any = good) -> torch.Tensor:
        return OP(*arguments, name)

    differing = [{"arguments": other if first else good} for other in others]
    check_disagreements(call, differing, r"ranks disagree: rank \d calls fused_matmul_all_")
