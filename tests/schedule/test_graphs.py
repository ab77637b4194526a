"""Captured graphs: the edges let all ranks finish in any order, and each edge is needed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from symm_cp.schedule import GraphCall, GraphOrder, Signal, Variant, Wait, check_graph, patterns
from tests.exhaustive import some
from tests.schedule.calls import MIX, WORKSPACES
from tests.schedule.test_issue_order import EXCHANGING

VARIANTS = [
    variant
    for workspace in WORKSPACES
    if workspace.form == "staged" and workspace.slots == 1
    for variant in workspace.variants
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_graphs_of_one_op_finish_in_any_order(variant: Variant) -> None:
    for world_size in range(1, 9):
        report = check_graph([GraphCall.of(variant, world_size)] * 3)
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
def test_graphs_of_two_ops_finish_in_any_order(world_size: int) -> None:
    for pair in combinations(VARIANTS, 2):
        calls = [GraphCall.of(variant, world_size) for variant in pair]
        report = check_graph([calls[which] for which in MIX])
        assert report.ok, f"{pair[0]} and {pair[1]}: {report}"


def test_graphs_of_many_ops_finish_in_any_order() -> None:
    chosen = random.choices(VARIANTS, k=30)
    assert check_graph([GraphCall.of(variant, 3) for variant in chosen]).ok, chosen


def bare(call: GraphCall) -> GraphCall:
    """The call with only the edges of lanes and of a rank's own flags."""
    orders = (GraphOrder(tuple(replace(h, behind=()) for h in o.steps)) for o in call.orders)
    return replace(call, orders=tuple(orders))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_without_the_edges_ranks_may_hang(variant: Variant, world_size: int) -> None:
    """So may calls that exchange partial sums, and calls captured behind background ones."""
    call, exchanging = GraphCall.of(variant, world_size), variant.name in EXCHANGING
    assert any(h.behind for h in call.orders[0].steps) is exchanging
    assert check_graph([bare(call)] * 3).ok is not exchanging
    if variant.channel == "async":
        gather = GraphCall.of(VARIANTS[0], world_size)
        assert check_graph([call, gather, call]).ok
        assert not check_graph([bare(call), gather, bare(call)]).ok


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("lanes", [False, True])
def test_each_edge_of_a_reduce_scatter_is_needed(lanes: bool, world_size: int) -> None:
    variant = patterns.PRODUCE_AND_REDUCE_SCATTER.staged(lanes=lanes)
    call = GraphCall.of(variant, world_size)
    places = [place for place, held in enumerate(call.orders[0].steps) if held.behind]
    assert len(places) == world_size - 1
    for place in places:
        orders = []
        for order in call.orders:
            held = replace(order.steps[place], behind=())
            steps = (*order.steps[:place], held, *order.steps[place + 1 :])
            orders.append(replace(order, steps=steps))
        assert not check_graph([replace(call, orders=tuple(orders))] * 2).ok


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="all on the same number of ranks"):
        check_graph([])
    with pytest.raises(ValueError, match=r"on the same number of ranks; got \[2, 3\]"):
        check_graph([GraphCall.of(VARIANTS[0], 2), GraphCall.of(VARIANTS[0], 3)])


def test_a_report_names_the_wait_that_does_not_end() -> None:
    variant = next(v for v in VARIANTS if v.name in EXCHANGING)
    report = check_graph([bare(GraphCall.of(variant, 2))])
    assert any("'partial'" in str(problem) for problem in report.problems), str(report)


def test_waits_of_graphs_come_behind_all_earlier_signals() -> None:
    """Shown by a search in the edges; the proof relies on clocks instead."""
    for variant in VARIANTS:
        for rank, order in enumerate(GraphCall.of(variant, 3).orders):
            before: list[set[int]] = []
            lanes: dict[str, set[int]] = {}
            own: dict[str, int] = {}
            signals: set[int] = set()
            for place, held in enumerate(order.steps):
                reached = set(lanes.get(held.lane, set()))
                for signal in held.behind:
                    reached |= before[signal]
                if isinstance(held.step, Wait) and held.step.source == rank:
                    reached |= before[own[held.step.flag]]
                if isinstance(held.step, Wait) and held.step.source != rank:
                    assert signals <= reached
                reached.add(place)
                if isinstance(held.step, Signal) and held.step.to == rank:
                    own[held.step.flag] = place
                elif isinstance(held.step, Signal):
                    signals.add(place)
                lanes[held.lane] = reached
                before.append(reached)
