"""The builders for copy engines: right at every size and in every mix, and no step too many."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest

from symm_cp.schedule import (
    Compute,
    Copy,
    Pattern,
    Region,
    Schedule,
    Signal,
    Wait,
    check,
    staged,
    staged_channels,
)
from tests.schedule.test_mixes import MIX
from tests.schedule.test_mutation import synchronisation, without

PLACES = [
    (slots, channel, pattern)
    for slots in (1, 2)
    for channel, patterns in staged_channels(slots).items()
    for pattern in patterns
]


def all_steps(schedule: Schedule) -> list[object]:
    return [step for lane in schedule.lanes.values() for step in lane]


@pytest.mark.parametrize(("slots", "channel", "pattern"), PLACES, ids=str)
def test_right_for_1_to_16_ranks(slots: int, channel: str, pattern: Pattern) -> None:
    for world_size in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16):
        calls = slots + 2 if world_size <= 8 else 3
        report = check([pattern.schedules(world_size, slots)] * calls)
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("channel", ["sync", "async"])
def test_all_pairs_and_long_mixes(slots: int, channel: str) -> None:
    patterns = staged_channels(slots)[channel]
    for world_size in (2, 3, 4):
        for pair in combinations(patterns, 2):
            calls = [pattern.schedules(world_size, slots) for pattern in pair]
            report = check([calls[which] for which in MIX])
            assert report.ok, f"{pair[0]} and {pair[1]}: {report}"
        chosen = random.Random(f"{channel} {slots}").choices(patterns, k=30)
        report = check([pattern.schedules(world_size, slots) for pattern in chosen])
        assert report.ok, str(report)


@pytest.mark.parametrize(("slots", "channel", "pattern"), PLACES, ids=str)
def test_no_signal_or_wait_is_redundant(slots: int, channel: str, pattern: Pattern) -> None:
    for world_size in (2, 3, 4):
        call = pattern.schedules(world_size, slots)
        others = [other.schedules(world_size, slots) for other in staged_channels(slots)[channel]]
        tried = 0
        for rank, lane, index in synchronisation(call):
            mutant = without(call, rank, lane, index)
            noticed = not check([mutant] * (slots + 2)).ok or any(
                not check([(mutant, other)[which] for which in MIX]).ok for other in others
            )
            assert noticed, f"rank {rank}: {call[rank].lanes[lane][index]} is redundant"
            tried += 1
        assert tried >= 2 * world_size * (world_size - 1)


@pytest.mark.parametrize(("slots", "channel", "pattern"), PLACES, ids=str)
def test_flags_can_be_taken_back(slots: int, channel: str, pattern: Pattern) -> None:
    """With one slot every flag between two ranks is signalled as often as it is awaited."""
    for world_size in range(2, 7):
        given: Counter[tuple[object, ...]] = Counter()
        taken: Counter[tuple[object, ...]] = Counter()
        for schedule in pattern.schedules(world_size, slots):
            for step in all_steps(schedule):
                if isinstance(step, Signal):
                    given[step.flag, schedule.rank, step.to] += 1
                elif isinstance(step, Wait):
                    taken[step.flag, step.source, schedule.rank] += 1
        assert given == taken
        assert max(given.values()) == 1


@pytest.mark.parametrize(("slots", "channel", "pattern"), PLACES, ids=str)
def test_kernels_touch_only_memory_of_their_rank(
    slots: int, channel: str, pattern: Pattern
) -> None:
    """Peers' memory is for the copy engines."""
    for schedule in pattern.schedules(4, slots):
        for step in all_steps(schedule):
            if isinstance(step, Compute):
                assert {region.rank for region in (*step.reads, *step.writes)} == {schedule.rank}
        copies = [step for step in schedule.lanes.get("copy", ()) if isinstance(step, Copy)]
        assert {step.dst.rank for step in copies} == {schedule.rank}  # pulled, not pushed
        assert not any(isinstance(step, Copy) for step in schedule.lanes.get("compute", ()))


def test_gather_and_consume() -> None:
    schedule = staged.gather_and_consume(0, 2)
    assert schedule.lanes["copy"] == (
        Copy(Region(0, "input"), Region(0, "slot")),
        Signal(1, "ready"),
        Wait(1, "ready"),
        Copy(Region(1, "slot"), Region(0, "gathered", 1)),
        Signal(0, "pulled0"),
    )
    assert schedule.lanes["compute"] == (
        Compute("consume", 0, (Region(0, "input"),), (Region(0, "output", 0),)),
        Wait(0, "pulled0"),
        Compute("consume", 1, (Region(0, "gathered", 1),), (Region(0, "output", 1),)),
    )


def test_background_gather_waits_for_all_before_it_copies() -> None:
    steps = staged.background_gather(1, 4, in_place=True).lanes["copy"]
    kinds = [type(step).__name__ for step in steps]
    signals, waits, copies = ["Signal"] * 3, ["Wait"] * 3, ["Copy"] * 4
    assert kinds == [*signals, *waits, *copies, *signals, *waits]


@pytest.mark.parametrize("builder", [staged.background_gather, staged.background_scatter])
def test_in_the_background_the_input_is_read_before_the_signals(
    builder: Callable[..., Schedule],
) -> None:
    steps = builder(1, 4).lanes["copy"]
    first = next(index for index, step in enumerate(steps) if isinstance(step, Signal))
    readers = [
        index
        for index, step in enumerate(steps)
        if isinstance(step, Copy) and step.src.buffer == "input"
    ]
    assert readers
    assert max(readers) < first


def test_in_place_needs_two_slots() -> None:
    with pytest.raises(ValueError, match=r"gather_and_consume: in_place=True needs 2 slots"):
        staged.gather_and_consume(0, 2, in_place=True, slots=1)
