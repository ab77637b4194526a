"""Every pattern is right at every world size, and after every other pattern of its channel."""

import random
from itertools import combinations

import pytest

from symm_cp.schedule import CHANNELS, Pattern, Schedule, Signal, Wait, check

# All eight orders of three consecutive calls of two patterns; a slot comes back within three.
MIX = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)
PATTERNS = [pattern for channel in CHANNELS.values() for pattern in channel]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_pattern_alone_is_right_for_1_to_16_ranks(pattern: Pattern, slots: int) -> None:
    for world_size in range(1, 17):
        # From 9 ranks on, three calls: the larger sizes have no new kind of neighbour.
        calls = slots + 2 if world_size <= 8 else 3
        report = check([pattern.schedules(world_size, slots)] * calls)
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("channel", CHANNELS)
def test_all_pairs_of_a_channel_mix(channel: str, world_size: int, slots: int) -> None:
    for pair in combinations(CHANNELS[channel], 2):
        calls = [pattern.schedules(world_size, slots) for pattern in pair]
        report = check([calls[which] for which in MIX])
        assert report.ok, f"{pair[0]} and {pair[1]}: {report}"


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("channel", CHANNELS)
def test_long_random_mix_of_a_whole_channel(channel: str, slots: int) -> None:
    choose = random.Random(f"{channel} {slots}")
    calls = [pattern.schedules(4, slots) for pattern in choose.choices(CHANNELS[channel], k=40)]
    report = check(calls)
    assert report.ok, str(report)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_each_call_exchanges_signals_between_all_pairs(pattern: Pattern) -> None:
    """The promise that makes two slots enough."""
    for world_size in range(1, 9):
        for schedule in pattern.schedules(world_size):
            steps = [step for lane in schedule.lanes.values() for step in lane]
            peers = set(range(world_size)) - {schedule.rank}
            assert {step.to for step in steps if isinstance(step, Signal)} == peers
            waits = [step for step in steps if isinstance(step, Wait) and not step.lag]
            assert {step.source for step in waits} == peers


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_call_without_the_exchange_makes_two_slots_unsafe(channel: str) -> None:
    for pattern in CHANNELS[channel]:
        call = pattern.schedules(3)
        (lane,) = call[0].lanes
        silent = [Schedule("silent", rank, 3, {lane: ()}, 2) for rank in range(3)]
        writes_slot_unasked = dict(pattern.options).get("in_place") is not True and (
            # Its first exchange comes before its first write to the slot.
            pattern.builder.__name__ != "two_shot_all_reduce"
        )
        assert check([call, silent, call]).ok is not writes_slot_unasked, str(pattern)
