"""Lowers the lanes of a schedule to streams: native commands, with Python kernels between them.

The steps of all lanes are put in one order in which the host hands them out. Flags to oneself
become events; an event must be recorded before a stream can wait for it, so a lane that waits for
one is handed out no further until the other lane has come to it. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import TypeAlias

from symm_cp import native
from symm_cp.devices import FLAGS, LANES, DeviceWorkspace, events_needed
from symm_cp.runtime import recorder
from symm_cp.runtime.program import Binding, Extent, buffers_of
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait


class _Kind(IntEnum):
    """Mirrors `StreamKind` of csrc/streams.h."""

    COPY = 0
    SIGNAL = 1
    WAIT = 2
    RECORD = 3
    WAIT_EVENT = 4
    ARRIVED = 5


# Events of every call: where the caller's stream begins it, where a lane has ended it, and where
# the caller's stream has ended it.
_BEGIN, _JOIN, _END = 0, 1, 2
_FIRST_FREE = 3
_OPERAND, _SLOT = 0, 1  # `Space` of csrc/channel.h

#: A Python kernel takes the index of its step.
Kernel: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class _Call:
    """A Python kernel, or a signal or wait by one of torch's kernels (with the peer as index)."""

    name: str
    index: int
    lane: str
    signals: str | None = None

    def launch(
        self,
        workspace: DeviceWorkspace,
        kernels: Mapping[str, Kernel],
        recording: recorder.Recording | None,
        epoch: int,
        what: bytes,
    ) -> None:
        if self.signals is None:
            kernel = partial(kernels[self.name], self.index)
        else:
            exchange = workspace.signal if self.signals == "signal" else workspace.wait
            kernel = partial(exchange, self.name, self.index)
        device, channel = workspace.device, workspace.channel
        if recording is None:
            device.launch(self.lane, channel, kernel)
            return
        with recording.on_lane(self._step(), device, self.lane, channel, epoch, what):
            device.launch(self.lane, channel, kernel)

    def _step(self) -> Step:
        if self.signals is None:
            return Compute(self.name, self.index, (), ())
        return (Signal if self.signals == "signal" else Wait)(self.index, self.name)


#: Native commands, one after the other.
_Batch: TypeAlias = "ctypes.Array[native.StreamCommand]"


@dataclass(frozen=True)
class Launch:
    """A lowered schedule, made once for the sizes of its buffers."""

    items: tuple[_Call | _Batch, ...]
    #: Whether the caller's stream waits for the end of all lanes.
    joined: bool

    def run(
        self,
        workspace: DeviceWorkspace,
        epoch: int,
        operands: Sequence[int],
        kernels: Mapping[str, Kernel],
        *,
        capturing: bool,
        what: bytes,
    ) -> None:
        """Hands the schedule out. Raises `RuntimeError` when the driver refuses something."""
        device = workspace.device
        streams = device.streams(workspace.channel)
        lanes = (ctypes.c_void_p * len(streams))(*streams)
        addresses = (ctypes.c_void_p * max(1, len(operands)))(*operands)
        moved = workspace.last_stream not in (None, streams[0])
        issue = partial(
            workspace.issue,
            operands=addresses,
            lanes=lanes,
            epoch=epoch,
            capturing=capturing,
            what=what,
        )
        recording = None if capturing else recorder.active
        try:
            if moved and self.joined and not capturing:
                # Calls follow one another, also when the caller has changed streams.
                issue(_BETWEEN_STREAMS)
            workspace.last_stream = streams[0]
            for item in self.items:
                if isinstance(item, _Call):
                    item.launch(workspace, kernels, recording, epoch, what)
                elif recording is None:
                    issue(item)
                else:
                    for step, lane, commands in _apart(item, workspace.rank):
                        with recording.on_lane(step, device, lane, workspace.channel, epoch, what):
                            issue(commands)
        except BaseException:
            workspace.give_up()
            raise


def _batch(commands: Sequence[native.StreamCommand]) -> _Batch:
    return (native.StreamCommand * len(commands))(*commands)


def _apart(batch: _Batch, rank: int) -> Iterator[tuple[Step | None, str, _Batch]]:
    """A batch in parts that are steps of their own, or none: each with its lane.

    Copies of a lane that follow each other stay together, as the driver gets them.
    """
    for (copies, lane), run in groupby(batch, lambda c: (c.kind == _Kind.COPY, c.lane)):
        commands = list(run)
        for part in [commands] if copies else [[command] for command in commands]:
            yield _step_of(part[0], rank), LANES[lane], _batch(part)


def _step_of(command: native.StreamCommand, rank: int) -> Step | None:
    if command.kind == _Kind.COPY:
        return Copy(_region_of(command.source, rank), _region_of(command.to, rank))
    if command.kind == _Kind.SIGNAL:
        return Signal(command.peer, FLAGS[command.flag])
    if command.kind == _Kind.WAIT:
        return Wait(command.peer, FLAGS[command.flag], command.lag)
    if command.kind == _Kind.WAIT_EVENT:
        return Wait(rank, f"event {command.event}")
    return Signal(rank, "arrived") if command.kind == _Kind.ARRIVED else None


def _region_of(reference: native.Reference, rank: int) -> Region:
    if reference.space == _SLOT:
        return Region(reference.index, "slot")
    return Region(rank, f"tensor {reference.index}")


_BETWEEN_STREAMS = _batch([native.StreamCommand(kind=_Kind.WAIT_EVENT, lane=0, event=_END)])


def _steps(schedule: Schedule) -> list[Step]:
    return [step for lane in schedule.lanes.values() for step in lane]


def _overlap(one: Region, other: Region) -> bool:
    if (one.rank, one.buffer) != (other.rank, other.buffer):
        return False
    return None in (one.chunk, other.chunk) or one.chunk == other.chunk


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        slots: Mapping[int, tuple[Extent, ...]],
        *,
        by_kernels: bool,
        joined: bool,
        polled: bool,
    ) -> None:
        self.schedule, self.binding, self.slots = schedule, binding, slots
        self.rank = schedule.rank
        self.by_kernels = by_kernels
        self.polled = polled
        self.joined = joined
        # Without a join the caller's stream waits until its input has been read; in place it does
        # not: the caller leaves that tensor alone.
        in_place = any("symmetric" in buffers_of(step) for step in _steps(schedule))
        self.released = joined or in_place
        self.items: list[_Call | _Batch] = []
        self.commands: list[native.StreamCommand] = []
        # Copies handed out since something else was, with their regions: a batch has no order.
        self.copied: list[Copy] = []
        self.events: dict[str, int] = {}
        self.recorded: set[str] = set()

    def launch(self) -> Launch:
        lanes = {name: list(steps) for name, steps in self.schedule.lanes.items()}
        if self.polled:
            # The first kernel does it all: it polls for what the others would wait for.
            first = next(step for step in lanes["compute"] if isinstance(step, Compute))
            lanes["compute"] = [first]
        others = [name for name in lanes if name != "compute"]
        self._add(_Kind.RECORD, "compute", event=_BEGIN)
        for name in others:
            self._add(_Kind.WAIT_EVENT, name, event=_BEGIN)
        # Lane copy first: what peers wait for goes out before kernels do.
        position = dict.fromkeys(lanes, 0)
        while any(position[name] < len(steps) for name, steps in lanes.items()):
            before = dict(position)
            for name in (*others, "compute"):
                if name in lanes:
                    position[name] = self._advance(name, lanes[name], position[name])
            assert position != before, f"{self.schedule.name}: lanes wait for each other"
        for name in others if self.joined else ():
            self._add(_Kind.RECORD, name, event=_JOIN)
            self._add(_Kind.WAIT_EVENT, "compute", event=_JOIN)
        if self.joined:
            self._add(_Kind.RECORD, "compute", event=_END)
        self._release("copy")
        self._flush()
        assert _FIRST_FREE + len(self.events) <= events_needed(self.schedule.world_size)
        return Launch(tuple(self.items), self.joined)

    def _advance(self, lane: str, steps: Sequence[Step], position: int) -> int:
        """Hands out steps: up to a wait for another lane, or one kernel and what follows it."""
        kernels = 0
        while position < len(steps):
            step = steps[position]
            if isinstance(step, Wait) and step.source == self.rank:
                if step.flag not in self.recorded:
                    return position
            elif isinstance(step, Compute):
                kernels += 1
                if kernels > 1:
                    return position
            self._lower(lane, step)
            position += 1
        return position

    def _release(self, lane: str) -> None:
        if not self.released:
            self.released = True
            self._add(_Kind.RECORD, lane, event=_JOIN)
            self._add(_Kind.WAIT_EVENT, "compute", event=_JOIN)

    def _lower(self, lane: str, step: Step) -> None:
        if isinstance(step, Signal) and step.to != self.rank:
            # In the background nothing reads the input after the first signal.
            self._release(lane)
        if isinstance(step, Compute):
            self._call(step.kernel, step.index, lane)
        elif isinstance(step, Copy):
            self._copy(lane, step)
        elif self.polled and isinstance(step, Signal) and step.flag.startswith("pulled"):
            turn = int(step.flag.removeprefix("pulled"))
            self._add(_Kind.ARRIVED, lane, peer=turn, flag=FLAGS.index("arrived"))
        elif isinstance(step, Signal) and step.to == self.rank:
            self.recorded.add(step.flag)
            self._add(_Kind.RECORD, lane, event=self._event(step.flag))
        elif isinstance(step, Wait) and step.source == self.rank:
            self._add(_Kind.WAIT_EVENT, lane, event=self._event(step.flag))
        elif self.by_kernels:
            peer = step.to if isinstance(step, Signal) else step.source
            self._call(step.flag, peer, lane, type(step).__name__.lower())
        elif isinstance(step, Signal):
            self._add(_Kind.SIGNAL, lane, peer=step.to, flag=FLAGS.index(step.flag))
        else:
            flag = FLAGS.index(step.flag)
            self._add(_Kind.WAIT, lane, peer=step.source, flag=flag, lag=step.lag)

    def _event(self, flag: str) -> int:
        return self.events.setdefault(flag, _FIRST_FREE + len(self.events))

    def _add(self, kind: _Kind, lane: str, **fields: int) -> None:
        self.copied = []
        command = native.StreamCommand(kind=kind, lane=LANES.index(lane), **fields)
        self.commands.append(command)

    def _flush(self) -> None:
        if self.commands:
            self.items.append(_batch(self.commands))
            self.commands = []

    def _call(self, name: str, index: int, lane: str, signals: str | None = None) -> None:
        self.copied = []
        self._flush()
        self.items.append(_Call(name, index, lane, signals))

    def _reference(self, region: Region, extent: Extent, chunk: int) -> native.Reference:
        offset = extent.offsets[chunk]
        if extent.operand is None:
            return native.Reference(_SLOT, region.rank, offset)
        # The peers' symmetric tensors are operands, too, one after the other.
        operand = extent.operand + (region.rank if region.buffer == "symmetric" else 0)
        return native.Reference(_OPERAND, operand, offset)

    def _parts(self, region: Region) -> Iterator[tuple[native.Reference, int, int, int]]:
        """Where the parts of a region begin, their bytes per row, rows and pitch."""
        slot = region.buffer == "slot"
        for extent in self.slots[region.rank] if slot else self.binding[region.buffer]:
            chunk = 0 if region.chunk is None else region.chunk
            nbytes = sum(extent.nbytes) if region.chunk is None else extent.nbytes[chunk]
            pitch = extent.pitch or nbytes
            yield self._reference(region, extent, chunk), nbytes, extent.rows, pitch

    def _copy(self, lane: str, step: Copy) -> None:
        alone = any(
            _overlap(step.src, other.dst)
            or _overlap(step.dst, other.src)
            or _overlap(step.dst, other.dst)
            for other in self.copied
        )
        if alone:
            self.copied = []
        self.copied.append(step)
        for source, to in zip(self._parts(step.src), self._parts(step.dst), strict=False):
            self._copy_part(lane, source, to, alone)
            alone = False

    def _copy_part(
        self,
        lane: str,
        source: tuple[native.Reference, int, int, int],
        to: tuple[native.Reference, int, int, int],
        alone: bool,
    ) -> None:
        # A place that shards of several sizes take in turn is as large as the largest.
        assert source[1] * source[2] <= to[1] * to[2], (source, to)
        rows = max(source[2], to[2])
        nbytes = source[1] * source[2] // rows
        command = native.StreamCommand(
            kind=_Kind.COPY,
            lane=LANES.index(lane),
            alone=int(alone),
            to=to[0],
            source=source[0],
            bytes=nbytes,
            rows=rows,
            # The side that is one run has its rows one after the other.
            to_pitch=to[3] if to[2] == rows else nbytes,
            from_pitch=source[3] if source[2] == rows else nbytes,
        )
        self.commands.append(command)


def lower(
    schedule: Schedule,
    binding: Binding,
    slots: Mapping[int, tuple[Extent, ...]],
    *,
    by_kernels: bool = False,
    joined: bool = True,
    polled: bool = False,
) -> Launch:
    """Lowers a schedule; `binding` says where each buffer lies, `slots` does for each rank's slot.

    With `by_kernels` signals and waits become kernels of torch's. Without `joined` the caller's
    stream goes on, and only waits until its input has been read. With `polled` the first kernel
    stands for all of lane "compute": the i-th pull writes the epoch to the i-th flag "arrived".
    """
    lowering = _Lowering(
        schedule, binding, slots, by_kernels=by_kernels, joined=joined, polled=polled
    )
    return lowering.launch()
