"""``check`` agrees with the exploration of every interleaving, on schedules broken at random.

A race is a reachable state in which two lanes are about to make conflicting accesses; a deadlock
is a state that nothing leaves although a lane has steps left. No clocks here, so an error in
``check``'s clocks, or in the argument that one run decides, shows.
"""

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from symm_cp.schedule import (
    Compute,
    Deadlock,
    Race,
    Region,
    Schedule,
    Signal,
    Step,
    Variant,
    Wait,
    accesses,
    check,
)
from symm_cp.schedule.check import CALLER, Site
from tests.exhaustive import some
from tests.schedule.calls import Workspace

Place = tuple[int, str, int, int]  # rank, lane, call, index
Lane = list[tuple[Place, Step | None]]
Calls = Sequence[Sequence[Schedule]]


def programs(calls: Calls) -> list[Lane]:
    """All lanes of all ranks; the caller writes its tensor in lane compute where there is one."""
    lanes: list[Lane] = []
    for rank, schedules in enumerate(zip(*calls, strict=True)):
        names = {name: None for schedule in schedules for name in schedule.lanes}
        caller = "compute" if "compute" in names else next(iter(names))
        for name in names:
            lane: Lane = []
            for call, schedule in enumerate(schedules):
                lane += [((rank, name, call, CALLER), None)] * (name == caller)
                steps = schedule.lanes.get(name, ())
                lane += [((rank, name, call, index), step) for index, step in enumerate(steps)]
            lanes.append([*lane, *[((rank, name, len(calls), CALLER), None)] * (name == caller)])
    return lanes


def touched(place: Place, step: Step | None, slots: int) -> list[tuple[object, ...]]:
    """(memory, call, chunk, writes) of each access."""
    rank, _, call, _ = place
    reads, writes = accesses(step) if step else ((), (Region(rank, "symmetric"),))
    found: list[tuple[object, ...]] = []
    for regions, is_write in ((reads, False), (writes, True)):
        for region in regions:
            instance = {"slot": call % slots, "symmetric": 0}.get(region.buffer, call)
            memory = (region.rank, region.buffer, instance)
            found.append((memory, call, region.chunk, is_write))
    return found


def conflict(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> bool:
    for memory, call, chunk, writes in first:
        for other_memory, other_call, other_chunk, other_writes in second:
            apart = call == other_call and None not in (chunk, other_chunk) and chunk != other_chunk
            if memory == other_memory and (writes or other_writes) and not apart:
                return True
    return False


def explore(calls: Calls) -> tuple[set[frozenset[Place]], set[Place]]:
    """All racing pairs of steps, and the steps at which lanes are stuck for ever."""
    lanes = programs(calls)
    accessed = [[touched(*event, calls[0][0].slots) for event in lane] for lane in lanes]
    races: set[frozenset[Place]] = set()
    stuck: set[Place] = set()

    def enabled(state: tuple[int, ...], which: int) -> bool:
        lane = lanes[which]
        if state[which] == len(lane):
            return False
        (rank, _, call, _), step = lane[state[which]]
        if not isinstance(step, Wait) or call + 1 - step.lag <= 0:
            return True
        return any(
            isinstance(signal, Signal)
            and (place[0], signal.to, signal.flag) == (step.source, rank, step.flag)
            and place[2] >= call - step.lag
            for other, passed in zip(lanes, state, strict=True)
            for place, signal in other[:passed]
        )

    start = (0,) * len(lanes)
    known, todo = {start}, [start]
    while todo:
        state = todo.pop()
        movable = [which for which in range(len(lanes)) if enabled(state, which)]
        for a, b in combinations(movable, 2):
            if conflict(accessed[a][state[a]], accessed[b][state[b]]):
                races.add(frozenset((lanes[a][state[a]][0], lanes[b][state[b]][0])))
        if not movable:
            stuck |= {lane[at][0] for lane, at in zip(lanes, state, strict=True) if at < len(lane)}
        for which in movable:
            after = (*state[:which], state[which] + 1, *state[which + 1 :])
            if after not in known:
                known.add(after)
                todo.append(after)
    return races, stuck


def break_at_random(full: Schedule, choose: random.Random) -> Schedule:
    """Drop a step, or swap two neighbours, or neither."""
    lane = choose.choice(list(full.lanes))
    changed = list(full.lanes[lane])
    at = choose.randrange(len(changed))
    match choose.randrange(4):
        case 0:
            del changed[at]
        case 1 if at:
            changed[at - 1 : at + 1] = changed[at], changed[at - 1]
        case 2 if isinstance(step := changed[at], Wait):
            changed[at] = Wait(step.source, step.flag, lag=1)
    lanes = {**full.lanes, lane: tuple(changed)}
    return Schedule(full.name, full.rank, full.world_size, lanes, full.slots)


def of_several_events(variant: Variant) -> bool:
    """Whether a kernel polls or raises flags; `check` takes such a kernel as several events."""
    return any(
        isinstance(step, Compute) and bool(step.awaits or step.raises)
        for lane in variant.schedule(0, 2).lanes.values()
        for step in lane
    )


def place(site: Site) -> Place:
    return site.rank, site.lane, site.call, site.index


#: Workspaces, ranks, calls, cases.
FEW = (
    (Workspace("sync", "direct", 2), 2, 4, 110),
    # Two lanes a rank: many more interleavings.
    (Workspace("sync", "staged", 1), 2, 2, 40),
)


@pytest.mark.parametrize(
    ("workspace", "world_size", "calls", "cases"),
    some(
        *FEW,
        of=[
            *FEW,
            (Workspace("async", "staged", 1), 2, 4, 150),
            (Workspace("async", "direct", 2), 2, 4, 110),
            (Workspace("sync", "direct", 2), 3, 3, 4),
            (Workspace("async", "direct", 2), 3, 3, 4),
            (Workspace("async", "staged", 1), 3, 3, 4),
            (Workspace("sync", "staged", 2), 2, 2, 40),
        ],
    ),
    ids=str,
)
def test_check_agrees_with_all_interleavings(
    workspace: Workspace, world_size: int, calls: int, cases: int
) -> None:
    choose = random.Random(f"{workspace} {world_size}")
    variants = [v for v in workspace.variants if not of_several_events(v)]
    outcomes = []
    for _ in range(cases):
        pair = [
            [break_at_random(full, choose) for full in v.schedules(world_size, workspace.slots)]
            for v in choose.choices(variants, k=2)
        ]
        run = [choose.choice(pair) for _ in range(calls)]
        races, stuck = explore(run)
        problems = check(run).problems
        found = {
            frozenset((place(p.first), place(p.second))) for p in problems if isinstance(p, Race)
        }
        # A part of them: check keeps the latest access of a kind, and one call of a pair.
        assert found <= races
        assert bool(found) == bool(races)
        assert {place(p.site) for p in problems if isinstance(p, Deadlock)} == stuck
        outcomes.append((bool(races), bool(stuck)))
    if cases > 100:
        seen = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
        assert len(seen) == 4, f"one-sided cases: {seen}"
        assert min(seen.values()) >= 3, f"one-sided cases: {seen}"
