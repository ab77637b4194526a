"""A rank that misses calls of its peers fails as many of its own calls, and one more at most."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import symm_cp
from symm_cp import tuning
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.patience import patient

OPS = torch.ops.symm_mem
CALLS = 14


def by_steps(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    with tuning.forced("shards"):
        gathered = symm_cp.all_gather_matmul(x.unsqueeze(0), torch.eye(len(x)), group=group)
    return gathered.sum(0)


def at_once(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = OPS.one_shot_all_reduce(x, "sum", group.group_name)
    return total


def in_background(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = funcol.wait_tensor(OPS._low_contention_all_gather(x, group.group_name))
    return gathered.view(group.size(), -1).sum(0)


def by_torch(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def misses(
    group: dist.ProcessGroup,
    call: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor],
    missed_by: dict[int, list[int]],
) -> list[int]:
    """Makes all calls but the missed ones; checks results, and returns the calls that failed."""
    backend = "symm_cp" if call is by_torch else None
    own = dist.new_group(list(range(group.size())), backend=backend)
    failed, W = [], own.size()
    call(torch.ones(5), own)
    begin = time.monotonic()
    for number in range(CALLS):
        if number in missed_by.get(own.rank(), []):
            continue
        x = torch.full((10 + number,), 1.0 + own.rank() + number)
        try:
            total = call(x, own)
        except RuntimeError:
            failed.append(number)
        else:
            assert total.tolist() == [W * number + W * (W + 1) / 2] * (10 + number)
    assert time.monotonic() - begin < patient(10)
    return failed


@pytest.mark.parametrize("call", [by_steps, at_once, in_background, by_torch])
@pytest.mark.parametrize(
    ("world_size", "missed_by"),
    some(
        (2, {0: [1]}),
        (3, {1: [1, 2]}),
        of=[
            (2, {0: [1]}),
            (3, {1: [1, 2]}),
            (2, {1: [1, 2, 3]}),
            (2, {0: [1], 1: [3]}),
            (3, {0: [2], 2: [2]}),
            (4, {2: [1], 0: [7]}),
        ],
    ),
)
def test_a_missed_call_does_not_shift_all_that_follow(
    ranks: Ranks,
    world_size: int,
    missed_by: dict[int, list[int]],
    call: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor],
) -> None:
    missed = {number for numbers in missed_by.values() for number in numbers}
    may_fail = {number + more for number in missed for more in range(len(missed) + 2)}
    of_ranks = ranks.run(world_size, misses, call, missed_by)
    for rank, failed in enumerate(of_ranks):
        made = set(range(CALLS)) - set(missed_by.get(rank, []))
        assert missed & made <= set(failed) <= may_fail, of_ranks
    # A call works on all ranks that make it, or on none.
    for number in set(range(CALLS)) - missed:
        assert len({number in failed for failed in of_ranks}) == 1, of_ranks


def misses_one_of_several(group: dist.ProcessGroup, missed_by: dict[int, list[int]]) -> list[int]:
    """Starts calls in the background, three at a time, and returns which of them failed."""
    own = dist.new_group(list(range(group.size())))
    failed, W = [], own.size()
    in_background(torch.ones(5), own)
    begin = time.monotonic()
    for first in range(0, CALLS, 3):
        made = set(range(first, first + 3)) - set(missed_by.get(own.rank(), []))
        started = {
            number: OPS._low_contention_all_gather(
                torch.full((10 + number,), float(number)), own.group_name
            )
            for number in sorted(made)
        }
        for number, gathered in started.items():
            try:
                found = funcol.wait_tensor(gathered)
            except RuntimeError:
                failed.append(number)
            else:
                assert found.tolist() == [number] * W * (10 + number)
    assert time.monotonic() - begin < patient(10)
    return failed


@pytest.mark.parametrize(
    ("world_size", "missed_by"),
    some((2, {0: [3]}), of=[(2, {0: [3]}), (2, {1: [4], 0: [8]}), (3, {2: [5]}), (3, {0: [2, 3]})]),
)
def test_a_missed_call_before_others_that_have_started(
    ranks: Ranks, world_size: int, missed_by: dict[int, list[int]]
) -> None:
    missed = {number for numbers in missed_by.values() for number in numbers}
    of_ranks = ranks.run(world_size, misses_one_of_several, missed_by)
    for rank, failed in enumerate(of_ranks):
        may_fail = {number + more for number in missed for more in range(len(missed) + 2)}
        assert missed - set(missed_by.get(rank, [])) <= set(failed) <= may_fail, of_ranks
    for number in set(range(CALLS)) - missed:
        assert len({number in failed for failed in of_ranks}) == 1, of_ranks


def differs_after_a_call_that_works(group: dist.ProcessGroup) -> list[str]:
    """The second call of rank 0 is the first one of rank 1, and yet nobody has missed a call."""
    own = dist.new_group(list(range(group.size())))
    in_background(torch.ones(5), own)
    texts = []
    for size in ((3, 5), (5, 7), (7, 3), (9, 9)):
        begin = time.monotonic()
        try:
            found = in_background(torch.ones(size[own.rank()]), own)
        except RuntimeError as error:
            texts.append(str(error))
        else:
            assert found.tolist() == [2.0] * 9
        assert time.monotonic() - begin < patient(5)
        assert at_once(torch.ones(2), own).tolist() == [2.0, 2.0]
    return texts


def test_a_call_that_works_says_that_none_was_missed(ranks: Ranks) -> None:
    for texts in ranks.run(2, differs_after_a_call_that_works):
        assert len(texts) == 3
        assert all("ranks disagree" in text for text in texts)


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.ranks
def test_mistakes_of_ranks_in_turn_shift_nothing(group: dist.ProcessGroup, world_size: int) -> None:
    """Each rank in turn makes a mistake of its own; no rank has missed a call."""
    own = dist.new_group(list(range(group.size())))
    rank, W = own.rank(), own.size()
    for wrong in (*range(W), 0, *reversed(range(W))):
        rows = 5 + rank if rank == wrong else 4
        with pytest.raises(RuntimeError, match="ranks disagree"):
            at_once(torch.ones(rows), own)
    for number in range(3):
        assert at_once(torch.full((4,), float(number)), own).tolist() == [W * number] * 4
