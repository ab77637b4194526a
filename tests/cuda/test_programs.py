"""Fixed random programs of all kinds; `python -m tests.cuda.programs` draws other ones."""

from __future__ import annotations

import pytest

from tests.cuda import programs
from tests.exhaustive import exhaustive


@pytest.mark.parametrize(
    ("kind", "world_size", "count"), [("graphs", 3, 3), ("groups", 4, 8), ("growing", 3, 3)]
)
def test_programs_are_right(kind: str, world_size: int, count: int) -> None:
    compared, failures = programs.run(world_size, kind, list(range(count)))
    assert not failures, "\n".join(failures)
    assert len(compared) == count
    assert min(compared) >= 4


@exhaustive
@pytest.mark.parametrize(
    ("kind", "count", "turn"),
    [("graphs", 4, 0), ("growing", 20, 0), *(("groups", 20, turn) for turn in range(7))],
)
@pytest.mark.parametrize("world_size", programs.SIZES)
def test_many_programs_are_right(world_size: int, kind: str, count: int, turn: int) -> None:
    first = 1000 * world_size + count * turn
    _, failures = programs.run(world_size, kind, list(range(first, first + count)))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("kind", programs.KINDS.values())
def test_a_program_is_drawn_by_its_seed(kind: programs.Program) -> None:
    assert kind.drawn(7, 4) == kind.drawn(7, 4) != kind.drawn(8, 4)
