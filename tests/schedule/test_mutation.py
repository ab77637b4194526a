"""Patterns carry the least synchronisation: without any one signal or wait, ``check`` objects.

A step is needed if a run without it (in every call of its variant, on one rank) fails, alone or
mixed with some other variant on its workspace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from symm_cp.schedule import (
    Compute,
    Copy,
    Deadlock,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
    check,
    patterns,
)
from symm_cp.schedule.check import _Lane, _Run
from tests.exhaustive import some
from tests.schedule.calls import LOOPS, MIX, PLACES, Place


def with_lane(
    call: Sequence[Schedule], rank: int, lane: str, steps: Sequence[Step]
) -> list[Schedule]:
    """The schedules of a call, with other steps in one lane of one rank."""
    lanes = {**call[rank].lanes, lane: tuple(steps)}
    return [*call[:rank], replace(call[rank], lanes=lanes), *call[rank + 1 :]]


def synchronisation(call: Sequence[Schedule]) -> Iterator[tuple[int, str, int]]:
    """(rank, lane, index) of every Signal and Wait."""
    for schedule in call:
        for lane, steps in schedule.lanes.items():
            for index, step in enumerate(steps):
                if isinstance(step, Signal | Wait):
                    yield schedule.rank, lane, index


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_no_signal_or_wait_is_redundant(place: Place, world_size: int) -> None:
    slots = place.workspace.slots
    call = place.variant.schedules(world_size, slots)
    others = [other.schedules(world_size, slots) for other in place.workspace.variants]
    tried = 0
    for rank, lane, index in synchronisation(call):
        steps = call[rank].lanes[lane]
        tried += 1
        mutant = with_lane(call, rank, lane, (*steps[:index], *steps[index + 1 :]))
        noticed = not check([mutant] * (slots + 2)).ok or any(
            not check([(mutant, other)[which] for which in MIX]).ok for other in others
        )
        assert noticed, f"rank {rank}: {steps[index]} is redundant"
    # Or nothing was tried: each rank signals each peer and waits for it.
    assert tried >= 2 * world_size * (world_size - 1)


class _Relaxed(_Run):
    """A run in which one wait of some calls ends when it should, but does not acquire.

    A machine may then run later steps before the wait, as far as nothing else orders them.
    """

    def __init__(
        self, mix: Sequence[Sequence[Schedule]], calls: set[int], wait: tuple[int, str, int, Wait]
    ) -> None:
        super().__init__(mix, mix[0][0].world_size, mix[0][0].slots)
        self._relaxed, self._wanted = calls, wait
        self.ended = 0

    def _wait(self, lane: _Lane, key: tuple[str, int, int], needed: tuple[int, int]) -> bool:
        before, event = lane.clock, lane.events[lane.position]
        ended = super()._wait(lane, key, needed)
        here = lane.rank, lane.name, event.at, event.step
        if event.call in self._relaxed and here == self._wanted:
            lane.clock = before
            self.ended += ended
        return ended


def waits(call: Sequence[Schedule]) -> Iterator[tuple[int, str, int, Wait]]:
    """(rank, lane, index, wait) of every Wait, and of every flag that a kernel polls."""
    for schedule in call:
        for lane, steps in schedule.lanes.items():
            for index, step in enumerate(steps):
                if isinstance(step, Wait):
                    yield schedule.rank, lane, index, step
                elif isinstance(step, Compute):
                    for flag, _ in step.awaits:
                        yield schedule.rank, lane, index, Wait(schedule.rank, flag)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_wait_acquires(place: Place, world_size: int) -> None:
    """The proof relies on it: a wait without the acquire is a race, though no lane is stuck."""
    slots = place.workspace.slots
    call = place.variant.schedules(world_size, slots)
    others = [other.schedules(world_size, slots) for other in place.workspace.variants]
    relaxed = list(waits(call))
    assert len(relaxed) >= world_size * (world_size - 1)
    for wait in relaxed:
        rank, lane, index, step = wait
        mixes: list[list[Sequence[Schedule]]] = [[call] * (slots + 2)]
        mixes += [[(call, other)[which] for which in MIX] for other in others]
        mine = [set(range(slots + 2)), *[{i for i, it in enumerate(MIX) if it == 0}] * len(others)]
        noticed = False
        for mix, calls in zip(mixes, mine, strict=True):
            run = _Relaxed(mix, calls, wait)
            report = run.report()
            assert run.ended > 0
            assert not any(isinstance(problem, Deadlock) for problem in report.problems)
            noticed = not report.ok
            if noticed:
                break
        assert noticed, f"rank {rank}, {lane}: step {index}, {step}, need not acquire"


@pytest.mark.parametrize("place", [place for place in LOOPS if place.pieces == 3], ids=str)
def test_no_signal_or_wait_of_a_loop_is_redundant(place: Place) -> None:
    """Each is left out in all pieces, as the library runs the steps of one piece."""
    call, body = place.schedules(2), place.variant.schedules(2)
    for rank, lane, index in synchronisation(body):
        size = len(body[rank].lanes[lane])
        steps = [step for at, step in enumerate(call[rank].lanes[lane]) if at % size != index]
        assert not check([with_lane(call, rank, lane, steps)] * 4).ok, f"rank {rank}: {index}"


@pytest.mark.parametrize("place", [place for place in LOOPS if place.pieces == 5], ids=str)
def test_a_loop_needs_both_halves(place: Place) -> None:
    def one_half(step: Step) -> Step:
        def moved(region: Region) -> Region:
            return replace(region, piece=0) if region.buffer == "slot" else region

        if isinstance(step, Copy):
            return Copy(moved(step.src), moved(step.dst))
        if isinstance(step, Compute):
            reads, writes = map(moved, step.reads), map(moved, step.writes)
            return replace(step, reads=tuple(reads), writes=tuple(writes))
        return step

    call = list(place.schedules(3))
    for rank, schedule in enumerate(call):
        ((lane, steps),) = schedule.lanes.items()
        call[rank] = replace(schedule, lanes={lane: tuple(map(one_half, steps))})
    uses_slots = any("slot" in str(step) for step in steps)
    # In the two-shot all-reduce, the second exchange of a piece takes the place of the other half.
    two_exchanges = "TWO_SHOT" in place.variant.name
    assert check([call] * 2).ok is (not uses_slots or two_exchanges)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_kernel_must_poll_the_flag_of_each_shard(world_size: int, keep: bool) -> None:
    call = patterns.ALL_GATHER_AND_POLL.staged(keep=keep).schedules(world_size)
    offered, kernel = call[0].lanes["compute"]
    assert isinstance(kernel, Compute)
    for index, (_, shard) in enumerate(kernel.awaits):
        unasked = replace(
            kernel,
            reads=(*kernel.reads, shard),
            awaits=kernel.awaits[:index] + kernel.awaits[index + 1 :],
        )
        assert not check([with_lane(call, 0, "compute", [offered, unasked])] * 3).ok
    if world_size > 2:
        flags, shards = zip(*kernel.awaits, strict=True)
        crossed = replace(kernel, awaits=tuple(zip(flags, shards[::-1], strict=True)))
        assert not check([with_lane(call, 0, "compute", [offered, crossed])] * 3).ok


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_flag_of_a_kernel_says_that_its_own_region_was_written(world_size: int) -> None:
    call = patterns.PRODUCE_AND_REDUCE_SCATTER.staged(together=True).schedules(world_size)
    kernel, *rest = call[0].lanes["compute"]
    assert isinstance(kernel, Compute)
    flags, regions = zip(*kernel.raises, strict=True)
    # A kernel's other writes are known to be complete only when it has ended.
    unsaid = replace(kernel, writes=(*kernel.writes, regions[0]), raises=kernel.raises[1:])
    early = (Signal(0, flags[0]), unsaid, *rest)
    assert not check([with_lane(call, 0, "compute", early)] * 3).ok
    if world_size > 2:
        # The flag of another region does not suffice, though one kernel raises both.
        crossed = replace(kernel, raises=tuple(zip(flags, regions[::-1], strict=True)))
        assert not check([with_lane(call, 0, "compute", (crossed, *rest))] * 3).ok


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_may_differ_in_how_they_produce(world_size: int) -> None:
    """The algorithm depends on the inner dimension, which may differ from rank to rank."""
    algorithms = [patterns.PRODUCE_AND_REDUCE_SCATTER.staged(together=on) for on in (False, True)]
    mixes = [
        [algorithms[bits >> rank & 1].schedule(rank, world_size) for rank in range(world_size)]
        for bits in range(1 << world_size)
    ]
    for first in mixes:
        for second in mixes:
            assert check([first, second, second, first, second]).ok
