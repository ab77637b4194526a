"""Flags that the waiter resets: in graphs, which have no epochs, and by torch's kernels.

Where a signal just writes 1, it would be lost if the last one was not reset yet. Torch's kernels
wait for that instead, and from torch 2.15 on each of them also waits for the one before it of its
group on another stream (`GroupStreamGuard`). Neither may lose a signal or hold all ranks up.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from symm_cp.schedule import Call, Compute, Region, Schedule, Signal, Step, Wait, check
from symm_cp.schedule.check import CheckReport, Race
from symm_cp.schedule.patterns import PRODUCE_AND_REDUCE_SCATTER, Variant
from tests.exhaustive import some
from tests.schedule.calls import MIX, PLACES, WORKSPACES, Place, Workspace
from tests.schedule.test_issue_order import copy_lane_first, partial_sums_in_turns

ONE_SLOT = [space for space in WORKSPACES if space.form == "staged" and space.slots == 1]


def _raises_flags(variant: Variant) -> bool:
    """Whether a kernel raises flags while it runs: only where streams signal (`kernels_count`)."""
    lanes = variant.schedule(0, 2).lanes.values()
    return any(isinstance(step, Compute) and bool(step.raises) for lane in lanes for step in lane)


#: The variants that run with torch's kernels: then background calls read nothing in place.
BY_TORCH = [
    place
    for place in PLACES
    if place.workspace.form == "staged"
    and not (place.workspace.channel == "async" and "in_place" in place.variant.options)
    and not _raises_flags(place.variant)
]


class _Shared:
    """The buffers that other ranks may access: also the flags, as `visible` makes them."""

    def __contains__(self, buffer: str) -> bool:
        return buffer.startswith("flag") or buffer in ("slot", "symmetric")


def visible(schedule: Schedule) -> Schedule:
    """Adds to each signal and each reset the write to the flag's memory that it is."""

    def write(owner: int, writer: int, flag: str) -> Compute:
        return Compute("write", 0, (), (Region(owner, f"flag {flag} {writer}"),))

    def steps(step: Step) -> tuple[Step, ...]:
        rank = schedule.rank
        if isinstance(step, Signal) and step.to != rank:
            return write(step.to, rank, step.flag), step
        if isinstance(step, Wait) and step.source != rank:
            return step, write(rank, step.source, step.flag)
        return (step,)

    lanes = {
        name: tuple(part for step in lane for part in steps(step))
        for name, lane in schedule.lanes.items()
    }
    return replace(schedule, lanes=lanes)


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.parametrize("workspace", ONE_SLOT, ids=str)
def test_no_signal_of_a_graph_is_lost(
    workspace: Workspace, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every timing, a flag is raised again only after the peer has reset it."""
    monkeypatch.setattr(sys.modules[CheckReport.__module__], "SHARED_BUFFERS", _Shared())
    calls = [[visible(s) for s in v.schedules(world_size, 1)] for v in workspace.variants]
    for one in calls:
        for other in calls:
            report = check([(one, other)[which] for which in MIX])
            assert report.ok, f"{workspace}: {report}"


def test_a_signal_that_could_be_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits until the slot has been read, a rank could be a call ahead."""
    monkeypatch.setattr(sys.modules[CheckReport.__module__], "SHARED_BUFFERS", _Shared())
    call = []
    for schedule in PRODUCE_AND_REDUCE_SCATTER.staged().schedules(2, 1):
        lanes = {
            name: tuple(step for step in lane if not (isinstance(step, Wait) and step.lag))
            for name, lane in schedule.lanes.items()
        }
        call.append(visible(replace(schedule, lanes=lanes)))
    problems = check([call] * 3).problems
    assert any(isinstance(p, Race) and "flag partial" in str(p) for p in problems)


# Torch's kernels.


class _Op(NamedTuple):
    lane: str
    step: Step
    call: int
    turn: int  # index among its rank's signals and waits, in issue order; -1: neither
    pad: tuple[object, ...]


def _ops(calls: Sequence[Call], rank: int, slots: int) -> Iterator[_Op]:
    turn = 0
    for number, call in enumerate(calls):
        for lane, step in call.orders[rank]:
            if isinstance(step, Signal) and step.to != rank:
                # Each slot has a pad of its own for "done" (SymmetricWorkspace._pad).
                pad = (step.flag, rank, step.to, number % slots if step.flag == "done" else 0)
            elif isinstance(step, Wait) and step.source != rank:
                second = (number - step.lag) % slots if step.flag == "done" else 0
                pad = (step.flag, step.source, rank, second)
            else:
                yield _Op(lane, step, number, -1, ())
                continue
            yield _Op(lane, step, number, turn, pad)
            turn += 1


def stuck(calls: Sequence[Call], slots: int, *, guard: bool, one_queue: bool) -> list[str]:
    """The steps at which ranks hang, when torch's kernels signal."""
    world_size = len(calls[0].orders)
    raised: set[tuple[object, ...]] = set()
    if slots == 1 or calls[0].channel == "async":
        pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
        raised = {("done", *pair, slot) for pair in pairs for slot in range(slots)}
    queues: dict[tuple[int, str], deque[_Op]] = {}
    for rank in range(world_size):
        for op in _ops(calls, rank, slots):
            queues.setdefault((rank, "" if one_queue else op.lane), deque()).append(op)
    turns: Counter[int] = Counter()
    own: set[tuple[int, int, str]] = set()

    def runs(rank: int, op: _Op) -> bool:
        step = op.step
        if op.turn < 0:
            if isinstance(step, Wait):
                return (rank, op.call, step.flag) in own
            if isinstance(step, Signal):
                own.add((rank, op.call, step.flag))
            return True
        if (guard and turns[rank] < op.turn) or (op.pad in raised) is isinstance(step, Signal):
            return False
        raised.symmetric_difference_update({op.pad})
        turns[rank] += 1
        return True

    progress = True
    while progress:
        progress = False
        for (rank, _), queue in queues.items():
            while queue and runs(rank, queue[0]):
                queue.popleft()
                progress = True
    return [f"rank {rank}: {queue[0].step}" for (rank, _), queue in queues.items() if queue]


ONE_BY_ONE = [(place,) for place in BY_TORCH]
PLAIN = ONE_BY_ONE[::4]


@pytest.mark.parametrize("place", some(*PLAIN, of=ONE_BY_ONE), ids=str)
@pytest.mark.parametrize("one_queue", [False, True], ids=["guarded", "one-queue"])
def test_torchs_kernels_hold_nobody_up(place: Place, one_queue: bool) -> None:
    slots = place.workspace.slots
    others = [p.variant for p in BY_TORCH if p.workspace == place.workspace]
    for world_size in (2, 3, 5):
        for other in others:
            pair = [Call.of(v, world_size, slots) for v in (place.variant, other)]
            calls = [pair[which] for which in MIX]
            assert stuck(calls, slots, guard=True, one_queue=one_queue) == []


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("place", BY_TORCH, ids=str)
def test_torchs_guard_deadlocks_where_the_copy_lane_is_handed_out_first(
    place: Place, world_size: int
) -> None:
    slots = place.workspace.slots
    orders = place.variant.issue_orders(world_size, slots)
    old = tuple(copy_lane_first(order, rank) for rank, order in enumerate(orders))
    calls = [Call(place.variant.channel, old)] * 3
    assert stuck(calls, slots, guard=False, one_queue=False) == []
    deadlocks = bool(stuck(calls, slots, guard=True, one_queue=False))
    assert deadlocks is partial_sums_in_turns(place.variant)
