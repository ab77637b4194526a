"""Random programs over several groups and threads; `tests.cuda.group_programs` runs more."""

from __future__ import annotations

import random

import pytest

from tests.cuda import group_programs
from tests.exhaustive import exhaustive


def test_programs_of_groups_in_threads_are_right() -> None:
    seeds = [random.randrange(1 << 30) for _ in range(3)]
    failures = group_programs.run(4, seeds)
    assert not failures, "\n".join(failures)


@exhaustive
@pytest.mark.parametrize("turn", range(7))
@pytest.mark.parametrize("world_size", group_programs.SIZES)
def test_many_programs_of_groups_in_threads_are_right(world_size: int, turn: int) -> None:
    """About a thousand in all."""
    seeds = [random.randrange(1 << 30) for _ in range(group_programs.PER_TEAM)]
    failures = group_programs.run(world_size, seeds)
    assert not failures, "\n".join(failures)


def test_a_program_is_drawn_by_its_seed() -> None:
    assert group_programs.Program.drawn(7, 4) == group_programs.Program.drawn(7, 4)
    drawn = [group_programs.Program.drawn(number, 4) for number in range(100)]
    assert {program.reserved for program in drawn} == {False, True}
    assert {len(program.groups) for program in drawn} == {2, 3, 4}
