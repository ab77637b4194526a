"""Fixed random programs of graphs; `python -m tests.cuda.programs` draws other ones."""

from __future__ import annotations

import pytest

from tests.cuda import programs
from tests.exhaustive import exhaustive


def test_programs_of_graphs_are_right() -> None:
    replays, failures = programs.run(3, list(range(3)))
    assert not failures, "\n".join(failures)
    assert len(replays) == 3
    assert min(replays) >= 4  # rounds


@exhaustive
@pytest.mark.parametrize("world_size", programs.SIZES)
def test_many_programs_of_graphs_are_right(world_size: int) -> None:
    seeds = [100 * world_size + number for number in range(4)]
    replays, failures = programs.run(world_size, seeds)
    assert not failures, "\n".join(failures)
    assert len(replays) == 4


def test_a_program_is_drawn_by_its_seed() -> None:
    assert programs.Program.drawn(7) == programs.Program.drawn(7)
    drawn = [programs.Program.drawn(number) for number in range(100)]
    assert {program.at_once for program in drawn} == {False, True}
