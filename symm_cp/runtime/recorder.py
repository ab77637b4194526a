"""Records when the lanes of this rank ran each step: `symm_cp.trace()`.

Steps that run in Python are recorded here, native ones in csrc/exchange/trace.cpp. Both read the
monotonic clock, which all processes of a host share, so the ranks' recordings fit together. When
nothing is recorded, a native batch costs the test of one flag.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import torch.distributed as dist

from symm_cp import native
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.native import wire
from symm_cp.schedule import trace as drawing
from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Step, Wait

_NANO = 1e-9

#: Returns a time in nanoseconds of the monotonic clock; call it after `Clock.synchronize`.
Mark: TypeAlias = Callable[[], int]


class Clock(Protocol):
    """A device whose lanes work on their own; see `symm_cp.cuda.base.Device`."""

    def mark(self, lane: str, user: str) -> Mark:
        """Records the time at which a lane reaches this point."""

    def synchronize(self) -> None:
        """Returns when all work on the device has ended."""


class Recording:
    """The recorded steps of this rank; complete once the `with` block has ended."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # As little as possible happens while ops run: entries become steps on request.
        # Several threads may append to a list.
        self._kernels: list[tuple[str, int, bytes, int, int, int]] = []
        self._marked: list[tuple[Step, str, int, bytes, Mark, Mark]] = []
        self._devices: dict[int, Clock] = {}
        self._native: Iterable[wire.TraceEvent] = ()

    def kernel(
        self, run: Callable[[int], object], name: str, index: int, call_name: bytes, epoch: int
    ) -> None:
        """Runs a Python kernel and records when."""
        start = time.monotonic_ns()
        run(index)
        self._kernels.append((name, index, call_name, epoch, start, time.monotonic_ns()))

    @contextmanager
    def on_lane(
        self,
        step: Step | None,
        device: Clock,
        lane: str,
        user: str,
        epoch: int,
        call_name: bytes,
    ) -> Iterator[None]:
        """Records when a lane of a device begins and ends the work that the block puts on it."""
        if step is None:
            yield
            return
        begin = device.mark(lane, user)
        yield
        end = device.mark(lane, user)
        self._marked.append((step, lane, epoch, call_name, begin, end))
        self._devices[id(device)] = device

    def finish(self) -> None:
        """Takes over the records of the native part; waits for the devices that took part."""
        for device in self._devices.values():
            device.synchronize()
        library = native.load()
        count = ctypes.c_int64()
        events = library.symm_cp_recorded(ctypes.byref(count))
        copied = (wire.TraceEvent * count.value)()
        ctypes.memmove(copied, events, ctypes.sizeof(copied))
        self._native = copied
        library.symm_cp_recorded_free(events)

    @cached_property
    def timeline(self) -> Timeline:
        """The steps in order of their beginning; times are in seconds of the monotonic clock."""
        events = [*self._of_kernels(), *self._of_commands(), *self._of_lanes()]
        return Timeline(tuple(sorted(events, key=lambda event: event.start)))

    def _event(self, step: Step, lane: str, epoch: int, times: tuple[int, int], op: bytes) -> Event:
        start, end = times
        text = op.decode(errors="replace")
        return Event(self.rank, lane, epoch - 1, step, start * _NANO, end * _NANO, text)

    def _of_kernels(self) -> Iterator[Event]:
        for name, index, call_name, epoch, start, end in self._kernels:
            step = Compute(name, index, (), ())
            yield self._event(step, "compute", epoch, (start, end), call_name)

    def _of_lanes(self) -> Iterator[Event]:
        for step, lane, epoch, call_name, begin, end in self._marked:
            yield self._event(step, lane, epoch, (begin(), end()), call_name)

    def _of_commands(self) -> Iterator[Event]:
        for event in self._native:
            step = step_of(event.command, self.rank)
            if step is not None:
                lane = "copy" if event.engine else "compute"
                times = event.start, event.end
                yield self._event(step, lane, event.epoch, times, event.call_name)

    def all_ranks(self, group: GroupLike | None = None) -> Timeline:
        """Returns the steps of all ranks of a group (default: the world). Collective."""
        if not dist.is_initialized():
            return self.timeline
        chosen = None
        if group is not None:
            chosen = dist.distributed_c10d._resolve_process_group(group_name(group))
        gathered: list[tuple[Event, ...]] = [()] * dist.get_world_size(chosen)
        dist.all_gather_object(gathered, self.timeline.events, chosen)
        return Timeline(tuple(event for events in gathered for event in events))

    def save(self, path: str | Path, group: GroupLike | None = None) -> None:
        """Writes the steps of all ranks of a group to a file for Perfetto. Collective.

        The first rank writes it. Ranks share a clock only on one host.
        """
        timeline = self.all_ranks(group)
        if self._writes(timeline):
            drawing.save(path, {"measured": timeline})

    def draw(self, path: str | Path, group: GroupLike | None = None) -> None:
        """Draws the steps of all ranks of a group as a Gantt chart (PNG). Collective.

        The first rank writes it; needs matplotlib, without which all ranks raise `RuntimeError`.
        """
        drawing.load_pyplot()
        timeline = self.all_ranks(group)
        if self._writes(timeline):
            drawing.draw(path, {"measured": timeline})

    def _writes(self, timeline: Timeline) -> bool:
        return self.rank == min((event.rank for event in timeline.events), default=self.rank)


#: The recording in progress, if any.
active: Recording | None = None


@contextmanager
def trace() -> Iterator[Recording]:
    """Records each copy, signal, wait and kernel of symm_cp's ops on this rank.

    Yields a `Recording`, whose `timeline`, `save` and `draw` are valid after the block. Ranks
    in steps are ranks of the op's group. Recording costs under 2% of an op of a millisecond. Raises
    `RuntimeError` inside another `trace`.
    """
    global active
    if active is not None:
        raise RuntimeError("trace: this process is recording already")
    library = native.load()
    recording = active = Recording()
    library.symm_cp_record(1)
    library.symm_cp_plans_pause()  # for calls on CPU
    native.drop_plans()
    try:
        yield recording
    finally:
        active = None
        library.symm_cp_record(0)
        library.symm_cp_plans_resume()
        native.drop_plans()
        recording.finish()


def _region(place: wire.Place, rank: int) -> Region:
    if place.buffer == wire.Buffer.OPERAND:
        return Region(rank, f"tensor {place.index}")
    chunk = None if place.chunk < 0 else place.chunk
    return Region(place.index, wire.Buffer(place.buffer).name.lower(), chunk)


def step_of(command: wire.Command, rank: int) -> Step | None:
    """Returns the step that a command carries out, if any, with the details that it has."""
    kind = wire.Kind(command.kind)
    if kind == wire.Kind.COPY:
        return Copy(_region(command.source, rank), _region(command.to, rank))
    if kind in (wire.Kind.REDUCE, wire.Kind.PRODUCE, wire.Kind.CONSUME):
        return Compute(kind.name.lower(), rank, (), ())
    if kind == wire.Kind.WAIT_EVENT:
        return Wait(rank, f"event {command.event}")
    if kind not in (wire.Kind.SIGNAL, wire.Kind.WAIT, wire.Kind.ARRIVED):
        return None
    flag = wire.DEVICE_FLAGS[command.flag]
    peer = rank if flag == "arrived" else command.peer  # a flag to oneself
    if kind == wire.Kind.WAIT:
        return Wait(peer, flag, command.lag)
    return Signal(peer, flag)
