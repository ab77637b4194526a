"""``check`` agrees with the exploration of every interleaving, on schedules broken at random.

A race is a reachable state in which two lanes are about to make conflicting accesses; a deadlock
is a state that nothing leaves although a lane has steps left. No clocks here, so an error in
``check``'s clocks, or in the argument that one run decides, shows.
"""

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from symm_cp.schedule import CHANNELS, Region, Schedule, Signal, Step, Wait, accesses, check
from symm_cp.schedule.check import CALLER, Deadlock, Race, Site

Place = tuple[int, str, int, int]  # rank, lane, call, index
Lane = list[tuple[Place, Step | None]]
Calls = Sequence[Sequence[Schedule]]


def programs(calls: Calls) -> list[Lane]:
    lanes: list[Lane] = []
    for rank, first in enumerate(calls[0]):
        (name,) = first.lanes
        lane: Lane = []
        for call, schedules in enumerate(calls):
            lane.append(((rank, name, call, CALLER), None))
            for index, step in enumerate(schedules[rank].lanes[name]):
                lane.append(((rank, name, call, index), step))
        lanes.append([*lane, ((rank, name, len(calls), CALLER), None)])
    return lanes


def touched(place: Place, step: Step | None, slots: int) -> list[tuple[object, ...]]:
    """(memory, call, chunk, writes) of each access to memory that others can reach."""
    rank, _, call, _ = place
    reads, writes = accesses(step) if step else ((), (Region(rank, "symmetric"),))
    found: list[tuple[object, ...]] = []
    for regions, is_write in ((reads, False), (writes, True)):
        for region in regions:
            if region.buffer in ("slot", "symmetric"):
                slot = call % slots if region.buffer == "slot" else 0
                memory = (region.rank, region.buffer, slot)
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
        passed = lanes[step.source][: state[step.source]]
        return any(
            isinstance(signal, Signal)
            and (signal.to, signal.flag) == (rank, step.flag)
            and place[2] + 1 >= call + 1 - step.lag
            for place, signal in passed
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
    ((lane, steps),) = full.lanes.items()
    changed, at = list(steps), choose.randrange(len(steps))
    match choose.randrange(4):
        case 0:
            del changed[at]
        case 1 if at:
            changed[at - 1 : at + 1] = changed[at], changed[at - 1]
        case 2 if isinstance(step := changed[at], Wait):
            changed[at] = Wait(step.source, step.flag, lag=1)
    return Schedule(full.name, full.rank, full.world_size, {lane: tuple(changed)}, full.slots)


def place(site: Site) -> Place:
    return site.rank, site.lane, site.call, site.index


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("world_size", "calls", "cases"), [(2, 4, 150), (3, 3, 6)])
@pytest.mark.parametrize("channel", CHANNELS)
def test_check_agrees_with_all_interleavings(
    channel: str, world_size: int, calls: int, cases: int, slots: int
) -> None:
    choose = random.Random(f"{channel} {world_size} {slots}")
    outcomes = []
    for _ in range(cases):
        pair = [
            [break_at_random(full, choose) for full in pattern.schedules(world_size, slots)]
            for pattern in choose.choices(CHANNELS[channel], k=2)
        ]
        run = [choose.choice(pair) for _ in range(calls)]
        races, stuck = explore(run)
        problems = check(run).problems
        found = {
            frozenset((place(p.first), place(p.second))) for p in problems if isinstance(p, Race)
        }
        # Not all of them: check keeps the latest access of a kind, and one call of a pair.
        assert found <= races
        assert bool(found) == bool(races)
        assert {place(p.site) for p in problems if isinstance(p, Deadlock)} == stuck
        outcomes.append((bool(races), bool(stuck)))
    if cases > 100:
        seen = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
        assert len(seen) == 4, f"one-sided cases: {seen}"
        assert min(seen.values()) >= 3, f"one-sided cases: {seen}"
