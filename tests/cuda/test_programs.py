"""Fixed random programs of all kinds; `python -m tests.cuda.programs` draws other ones."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from symm_cp.runtime import lowering
from symm_cp.schedule import GraphOrder
from symm_cp.schedule.graphs import Ordered
from symm_cp.testing import Ranks
from tests.cuda import graph_programs, programs
from tests.exhaustive import exhaustive


@pytest.mark.parametrize(("kind", "world_size", "count"), [("graphs", 3, 4), ("groups", 4, 5)])
def test_programs_are_right(kind: str, world_size: int, count: int) -> None:
    compared, failures = programs.run(world_size, kind, list(range(count)))
    assert not failures, "\n".join(failures)
    assert len(compared) == count
    assert min(compared) >= 4


@exhaustive
@pytest.mark.parametrize(
    ("kind", "count", "turn"),
    [("graphs", 6, 0), *(("groups", 20, turn) for turn in range(8))],
)
@pytest.mark.parametrize("world_size", programs.SIZES)
def test_many_programs_are_right(world_size: int, kind: str, count: int, turn: int) -> None:
    first = 1000 * world_size + count * turn
    _, failures = programs.run(world_size, kind, list(range(first, first + count)))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("kind", programs.KINDS.values())
def test_a_program_is_drawn_by_its_seed(kind: programs.Program) -> None:
    assert kind.drawn(7, 4) == kind.drawn(7, 4) != kind.drawn(8, 4)


def in_any_order(order: Any, rank: int) -> GraphOrder:
    """An order without added edges: only lanes and a rank's own flags order its steps."""
    return GraphOrder(tuple(Ordered(lane, step) for lane, step in order))


def without_edges(group: dist.ProcessGroup, seed: int) -> None:
    mode = {"one_queue": True, "delays_us": 50, "patience_ms": 10_000}
    graphs = (("scatter", "all-reduce", "ulysses"),)
    program = graph_programs.Program(mode, graphs, rows=3, tokens=8, rounds=60, at_once=False)
    with mock.patch.object(lowering, "graph_order", in_any_order):
        program.run(seed)


@exhaustive
def test_without_the_edges_graphs_hang(ranks: Ranks) -> None:
    """The driver starts the steps of a graph in any order that the edges allow."""
    with ranks.own(2, without_edges, random.randrange(1 << 30)) as running:
        failures = [outcome.failure + outcome.output for outcome in running.outcomes(60)]
    assert any("was not there after 10000 ms" in failure for failure in failures), failures
