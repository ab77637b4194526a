"""How long schedules take: when each step of each lane begins and ends, given the cost of a step.

Event-driven, and exact for the semantics of steps: a lane runs one step after the other, a ``Wait``
ends when the flag has been raised, and other steps take the time that ``cost`` gives. As in
``check``, one run is enough, since no step branches on data. Steps that slow each other down
(copies that share a link, kernels that share multiprocessors) need an ``End`` instead of a cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from symm_cp.schedule.steps import Compute, Copy, Epoch, Schedule, Signal, Step, Wait, awaited

#: The cost of a step of a rank, in seconds; not called for waits.
Cost: TypeAlias = Callable[[int, Step], float]
#: When a step of a rank ends that begins at a time; called in the order of these times.
End: TypeAlias = Callable[[int, Step, float], float]


@dataclass(frozen=True, slots=True)
class Event:
    """A step that ran from ``start`` to ``end``, in seconds."""

    rank: int
    lane: str
    call: int
    step: Step
    start: float
    end: float
    #: The op it belongs to, if known.
    op: str = ""


#: The most lines of a printed timeline: a few calls of an op on 8 ranks.
_MAX_LINES = 200


class DeadlockError(ValueError):
    """Lanes that wait for each other."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All events, in no particular order."""

    events: tuple[Event, ...]

    def __str__(self) -> str:
        """A line for each step, in the order in which they begin."""
        ranks = len({event.rank for event in self.events})
        events = sorted(self.events, key=lambda event: (event.start, event.rank))
        lines = [f"{len(events)} steps on {ranks} ranks in {self.total * 1e3:.3f} ms"]
        lines += [
            f"{(event.start - self.begin) * 1e3:10.3f} ms {(event.end - event.start) * 1e3:+9.3f}"
            f"  rank {event.rank}, {event.lane}, call {event.call}: {event.step}"
            for event in events[:_MAX_LINES]
        ]
        more = len(events) - _MAX_LINES
        return "\n".join([*lines, f"... and {more} more"] if more > 0 else lines)

    @property
    def begin(self) -> float:
        """When the first step began: 0 in a simulation, a time of the clock in a recording."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def total(self) -> float:
        """The time from the beginning of the first step to the end of the last one."""
        return max((event.end for event in self.events), default=0.0) - self.begin

    def busy(self, rank: int, kind: type[Compute] | type[Copy]) -> float:
        """How long a rank computes, or copies, in total."""
        return sum(
            event.end - event.start
            for event in self.events
            if event.rank == rank and isinstance(event.step, kind)
        )

    def hidden(self) -> float:
        """The share of all copying during which the same rank computes.

        1 if nothing is copied.
        """
        copying = overlapped = 0.0
        for rank in {event.rank for event in self.events}:
            copies = self._spans(rank, Copy)
            kernels = self._spans(rank, Compute)
            copying += sum(end - start for start, end in copies)
            overlapped += sum(
                max(0.0, min(end, other_end) - max(start, other_start))
                for start, end in copies
                for other_start, other_end in kernels
            )
        return overlapped / copying if copying else 1.0

    def _spans(self, rank: int, kind: type[Compute] | type[Copy]) -> list[tuple[float, float]]:
        return [
            (event.start, event.end)
            for event in self.events
            if event.rank == rank and isinstance(event.step, kind)
        ]


@dataclass(slots=True)
class _SimulatedLane:
    rank: int
    name: str
    steps: list[tuple[int, Step]]
    position: int = 0
    time: float = 0.0


class _Simulation:
    def __init__(self, calls: Sequence[Sequence[Schedule]], end: End, signal: float) -> None:
        self.end, self.signal = end, signal
        self.events: list[Event] = []
        # For each flag (name, writer, receiver) the epochs that it was raised to, and when.
        self.flags: dict[tuple[str, int, int], list[tuple[Epoch, float]]] = {}
        self.waiting: dict[tuple[str, int, int], list[int]] = {}  # numbers of lanes
        lanes: dict[tuple[int, str], _SimulatedLane] = {}
        for call, schedules in enumerate(calls):
            for schedule in schedules:
                for name, steps in schedule.lanes.items():
                    lane = lanes.setdefault(
                        (schedule.rank, name), _SimulatedLane(schedule.rank, name, [])
                    )
                    lane.steps += [(call, step) for step in steps]
        self.lanes = list(lanes.values())
        # The lanes that can go on, the one that is behind first.
        self.ready: list[tuple[float, int]] = []

    def run(self) -> Timeline:
        self.ready = [(0.0, number) for number in range(len(self.lanes))]
        while self.ready:
            _, number = heapq.heappop(self.ready)
            if self._advance(self.lanes[number], number):
                heapq.heappush(self.ready, (self.lanes[number].time, number))
        stuck = [lane for lane in self.lanes if lane.position < len(lane.steps)]
        if stuck:
            places = "; ".join(
                f"rank {lane.rank}, lane {lane.name!r}: {lane.steps[lane.position][1]}"
                for lane in stuck
            )
            raise DeadlockError(f"these lanes wait for each other: {places}")
        return Timeline(tuple(self.events))

    def _advance(self, lane: _SimulatedLane, number: int) -> bool:
        """Runs a lane's next step; returns whether there was one that could run."""
        if lane.position == len(lane.steps):
            return False
        call, step = lane.steps[lane.position]
        start = lane.time
        waits = _waits(step, lane.rank)
        came = [self._came(lane, call, wait) for wait in waits]
        if None in came:
            missing = waits[came.index(None)]
            key = (missing.flag, missing.source, lane.rank)
            self.waiting.setdefault(key, []).append(number)
            return False
        lane.time = self._end(lane, step, [time for time in came if time is not None])
        lane.position += 1
        self.events.append(Event(lane.rank, lane.name, call, step, start, lane.time))
        if isinstance(step, Signal):
            # A flag to oneself is an event on the device, not a message.
            delay = 0.0 if step.to == lane.rank else self.signal
            self._raise(lane, call, step, lane.time + delay)
        elif isinstance(step, Compute):
            # A kernel that raises flags writes its parts in turn, the part without a flag last.
            share = (lane.time - start) / (1 + len(step.raises))
            for part, (flag, _) in enumerate(step.raises, 1):
                self._raise(lane, call, Signal(lane.rank, flag), start + part * share)
        return True

    def _raise(self, lane: _SimulatedLane, call: int, step: Signal, time: float) -> None:
        key = (step.flag, lane.rank, step.to)
        self.flags.setdefault(key, []).append(((call + 1, step.piece), time))
        for number in self.waiting.pop(key, ()):
            heapq.heappush(self.ready, (self.lanes[number].time, number))

    def _end(self, lane: _SimulatedLane, step: Step, came: Sequence[float]) -> float:
        """Returns when a step ends, given the times at which its flags were raised."""
        if isinstance(step, Wait):
            return max(lane.time, *came)
        # A kernel that polls spends equal shares on its initial reads and behind each flag.
        end = self.end(lane.rank, step, lane.time)
        if not came:
            return end
        share = (end - lane.time) / (1 + len(came))
        time = lane.time + share
        for flag in came:
            time = max(time, flag) + share
        return time

    def _came(self, lane: _SimulatedLane, call: int, step: Wait) -> float | None:
        needed = awaited(call + 1, step)
        if needed[0] <= 0:
            return 0.0
        raised = self.flags.get((step.flag, step.source, lane.rank), ())
        return next((time for epoch, time in raised if epoch >= needed), None)


def _waits(step: Step, rank: int) -> list[Wait]:
    if isinstance(step, Compute):
        return [Wait(rank, flag) for flag, _ in step.awaits]
    return [step] if isinstance(step, Wait) else []


def simulate(calls: Sequence[Sequence[Schedule]], cost: Cost, *, signal: float = 0.0) -> Timeline:
    """Returns when each step of ``calls`` runs, one call after the other on the same lanes.

    ``calls[c][r]`` is the schedule of rank r in call c; ``signal`` is the latency of a signal to a
    peer, in seconds. Raises ``DeadlockError`` when lanes wait for each other.
    """
    return simulate_shared(calls, lambda rank, step, start: start + cost(rank, step), signal=signal)


def simulate_shared(
    calls: Sequence[Sequence[Schedule]], end: End, *, signal: float = 0.0
) -> Timeline:
    """Like ``simulate``, for steps that slow each other down."""
    return _Simulation(calls, end, signal).run()
