"""Random programs of graphs; `python -m tests.cuda.programs` runs as many as one likes."""

from __future__ import annotations

import random

import pytest

from symm_cp.testing import Ranks
from tests.cuda import programs
from tests.exhaustive import exhaustive


def seeds(count: int) -> list[int]:
    return [random.randrange(1 << 30) for _ in range(count)]


def test_programs_of_graphs_are_right(ranks: Ranks) -> None:
    """`ranks` seeds the session's draw; programs have processes of their own."""
    replays, failures = programs.run(random.randint(2, 4), seeds(3))
    assert not failures, "\n".join(failures)
    assert len(replays) == 3
    assert min(replays) >= 4  # rounds


@exhaustive
@pytest.mark.parametrize("world_size", programs.SIZES)
def test_many_programs_of_graphs_are_right(ranks: Ranks, world_size: int) -> None:
    replays, failures = programs.run(world_size, seeds(10))
    assert not failures, "\n".join(failures)
    assert len(replays) == 10


def test_a_program_is_drawn_by_its_seed() -> None:
    (seed,) = seeds(1)
    assert programs.Program.drawn(seed) == programs.Program.drawn(seed)
    drawn = [programs.Program.drawn(number) for number in range(100)]
    assert {program.at_once for program in drawn} == {False, True}
    assert {program.mode["signals"] for program in drawn} == {"stream", "kernel", "torch"}
