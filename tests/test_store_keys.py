"""Exchanges through a group's store, which may still hold keys of an earlier group.

An earlier group of the same name and store is a `memory.Group` of the same process group: that is
all that its keys depend on.
"""

from __future__ import annotations

import os
import time
import unittest.mock
from collections.abc import Callable

import pytest
import torch.distributed as dist

from symm_cp.cuda.debug_calls import agree
from symm_cp.group.liveness import PeerLostError, generation, share, share_made
from symm_cp.group.memory import Group
from tests.exhaustive import some
from tests.patience import patient


def late(group: dist.ProcessGroup, rank: int) -> None:
    """Delays one rank, so that the others have read the store before."""
    dist.barrier(group)
    if group.rank() == rank:
        time.sleep(0.1)


@pytest.mark.parametrize("world_size", some((2,), of=[(2,), (3,)]))
@pytest.mark.ranks
def test_keys_of_an_earlier_group_are_not_read(group: dist.ProcessGroup, world_size: int) -> None:
    generations = set()
    for turn in range(4):
        again = Group(group)
        late(group, turn % group.size())
        for text in ("first", "second"):
            own = f"{text} {turn} {group.rank()}"
            expected = [f"{text} {turn} {rank}" for rank in range(group.size())]
            assert share(again, "key", own) == expected
        generations.add(generation(again))
    assert len(generations) == 4
    every: list[set[str]] = [set()] * group.size()
    dist.all_gather_object(every, generations, group=group)
    assert every == [generations] * group.size()


@pytest.mark.ranks(3)
def test_an_earlier_group_of_which_ranks_were_missing(group: dist.ProcessGroup) -> None:
    """In the earlier groups some ranks never came, or made more groups than the others."""
    milliseconds = str(round(1000 * patient(0.2)))
    short = unittest.mock.patch.dict(os.environ, {"SYMM_CP_TIMEOUT_MS": milliseconds})
    for present in ((0,), (1, 2), (0, 2)):
        if group.rank() in present:
            absent = min(set(range(3)) - set(present))
            with short, pytest.raises(PeerLostError, match=f"rank {absent} .* within "):
                share(Group(group), "key", "old")
        again = Group(group)
        late(group, 1)
        assert share(again, "key", str(group.rank())) == ["0", "1", "2"]


@pytest.mark.ranks(2)
def test_a_rank_that_gave_up_is_met_at_its_next_call(group: dist.ProcessGroup) -> None:
    """A rank that gave up finds the others when it calls again."""
    again = Group(group)
    dist.barrier(group)
    if group.rank() == 0:
        with (
            unittest.mock.patch.dict(
                os.environ, {"SYMM_CP_TIMEOUT_MS": str(round(1000 * patient(0.1)))}
            ),
            pytest.raises(PeerLostError, match="rank 1 of group"),
        ):
            generation(again)
    dist.barrier(group)  # until then the other rank stays away
    assert share(again, "key", str(group.rank())) == ["0", "1"]


@pytest.mark.ranks(2)
def test_calls_are_not_compared_with_those_of_an_earlier_group(group: dist.ProcessGroup) -> None:
    with unittest.mock.patch.dict(os.environ, {"SYMM_CP_DEBUG": "1"}):
        for name in (b"one", b"other"):  # the calls of each group are numbered from 1
            again = Group(group)
            late(group, 0)
            for _ in range(3):
                agree(again, name)


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_told_to_all(group: dist.ProcessGroup) -> None:
    again = Group(group)
    makers: list[Callable[[], str]] = [lambda: "text", lambda: str(1 / 0)]
    with pytest.raises((RuntimeError, ZeroDivisionError), match="division by zero") as raised:
        share_made(again, "key", makers[group.rank()])
    if group.rank() == 0:
        assert "rank 1 of group" in str(raised.value)
    assert share_made(again, "key", makers[0]) == ["text", "text"]
