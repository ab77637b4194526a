"""The builders carry the least synchronisation: without any one signal or wait, ``check`` objects.

A step is needed if a run without it (in every call of its pattern, on one rank) fails, alone or
mixed with some other pattern of its channel.
"""

from collections.abc import Iterator, Sequence

import pytest

from symm_cp.schedule import CHANNELS, Pattern, Schedule, Signal, Wait, check

# All eight orders of three consecutive calls of two patterns; a slot comes back within three.
MIX = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)

PATTERNS = [(channel, pattern) for channel in CHANNELS for pattern in CHANNELS[channel]]


def without(call: Sequence[Schedule], rank: int, lane: str, index: int) -> list[Schedule]:
    """The schedules of a call, less one step of one rank."""
    old = call[rank]
    lanes = dict(old.lanes)
    lanes[lane] = lanes[lane][:index] + lanes[lane][index + 1 :]
    new = Schedule(old.name, rank, old.world_size, lanes, old.slots)
    return [*call[:rank], new, *call[rank + 1 :]]


def synchronisation(call: Sequence[Schedule]) -> Iterator[tuple[int, str, int]]:
    """(rank, lane, index) of every Signal and Wait."""
    for schedule in call:
        for lane, steps in schedule.lanes.items():
            for index, step in enumerate(steps):
                if isinstance(step, Signal | Wait):
                    yield schedule.rank, lane, index


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("channel", "pattern"), PATTERNS, ids=str)
def test_no_signal_or_wait_is_redundant(
    channel: str, pattern: Pattern, world_size: int, slots: int
) -> None:
    call = pattern.schedules(world_size, slots)
    others = [other.schedules(world_size, slots) for other in CHANNELS[channel]]
    tried = 0
    for rank, lane, index in synchronisation(call):
        mutant = without(call, rank, lane, index)
        noticed = not check([mutant] * (slots + 2)).ok or any(
            not check([(mutant, other)[which] for which in MIX]).ok for other in others
        )
        assert noticed, f"rank {rank}: {call[rank].lanes[lane][index]} is redundant"
        tried += 1
    # Or nothing was tried: each rank signals each peer and waits for it.
    assert tried >= 2 * world_size * (world_size - 1)
