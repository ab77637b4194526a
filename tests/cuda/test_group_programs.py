"""Fixed random programs over groups and threads; `tests.cuda.group_programs` draws other ones."""

from __future__ import annotations

import pytest

from tests.cuda import group_programs
from tests.exhaustive import exhaustive


def test_programs_of_groups_in_threads_are_right() -> None:
    failures = group_programs.run(4, list(range(3)))
    assert not failures, "\n".join(failures)


@exhaustive
@pytest.mark.parametrize("turn", range(7))
@pytest.mark.parametrize("world_size", group_programs.SIZES)
def test_many_programs_of_groups_in_threads_are_right(world_size: int, turn: int) -> None:
    """About a thousand in all."""
    first = 1000 * world_size + group_programs.PER_TEAM * turn
    failures = group_programs.run(world_size, list(range(first, first + group_programs.PER_TEAM)))
    assert not failures, "\n".join(failures)


def test_a_program_is_drawn_by_its_seed() -> None:
    assert group_programs.Program.drawn(7, 4) == group_programs.Program.drawn(7, 4)
    drawn = [group_programs.Program.drawn(number, 4) for number in range(100)]
    assert {len(program.groups) for program in drawn} == {2, 3, 4}
