"""Lowers a schedule to streams: native commands, with Python kernels between them.

The steps of all lanes are issued in the order that the pattern gives (`Variant.issue_order`), which
`check_issue_order` has proven to make progress even when all streams share one hardware queue.
Captured graphs do not keep that order, so they get further events (`schedule/graphs.py`). Flags
that a rank raises for itself become events. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

from symm_cp.cuda import plans
from symm_cp.cuda.base import LANES, DeviceWorkspace, events_needed
from symm_cp.cuda.workspaces import give_up_on
from symm_cp.native import wire
from symm_cp.runtime import recorder
from symm_cp.runtime.program import Binding, Kernel, PlacedRows, copied_parts
from symm_cp.schedule.graphs import GraphOrder, Ordered, graph_order
from symm_cp.schedule.patterns import Variant
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Step, Wait

# Events of every call: where the caller's stream begins it, where a lane has ended it, and where
# the caller's stream has ended it.
_BEGIN, _JOIN, _END = 0, 1, 2
_FIRST_FREE = 3


@dataclass(frozen=True)
class _KernelCall:
    """A Python kernel."""

    name: str
    index: int
    lane: str

    def launch(
        self,
        workspace: DeviceWorkspace,
        function: Kernel,
        recording: recorder.Recording | None,
        epoch: int,
        call_name: bytes,
    ) -> None:
        device, channel = workspace.device, workspace.channel
        kernel = partial(function, self.index)
        if recording is None:
            device.launch(self.lane, channel, kernel)
            return
        step = Compute(self.name, self.index, (), ())
        with recording.on_lane(step, device, self.lane, channel, epoch, call_name):
            device.launch(self.lane, channel, kernel)


#: The streams of the lanes.
_Lanes = ctypes.c_void_p * len(LANES)
#: Native commands, one after the other.
_Batch: TypeAlias = "ctypes.Array[wire.StreamCommand]"


@dataclass(frozen=True)
class Launch:
    """A lowered schedule, made once for the sizes of its buffers."""

    items: tuple[_KernelCall | _Batch, ...]
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
        call_name: bytes,
    ) -> None:
        """Issues the schedule. Raises `RuntimeError` when a call of the driver fails."""
        device = workspace.device
        compute, copy, signal = device.streams(workspace.channel)
        lanes = _Lanes(compute, copy, signal)
        addresses = (ctypes.c_void_p * max(1, len(operands)))(*operands)
        call = addresses, lanes, epoch, capturing, call_name
        recording = None if capturing else recorder.active
        plan = plans.current()
        if plan is not None and (reason := self._not_planned(workspace, capturing)):
            plan.refuse(reason)
            plan = None
        try:
            if capturing and workspace.moved_to(compute):
                workspace.issue(_FOLLOW, *call)
            if plan is not None:
                plan.launch(workspace, epoch, lanes, addresses, call_name, self.joined)
            for item in self.items:
                if isinstance(item, _KernelCall):
                    kernel = kernels[item.name]
                    if plan is not None:
                        kernel = plan.numbered(kernel, LANES.index(item.lane))
                    item.launch(workspace, kernel, recording, epoch, call_name)
                elif recording is None:
                    workspace.issue(item, *call)
                    if plan is not None:
                        plan.commands(item)
                else:
                    for step, lane, part in _apart(item, workspace.rank):
                        channel = workspace.channel
                        with recording.on_lane(step, device, lane, channel, epoch, call_name):
                            workspace.issue(part, *call)
            if plan is not None:
                plan.end_launch()
        except BaseException as error:
            give_up_on(workspace, error)
            raise

    def _not_planned(self, workspace: DeviceWorkspace, capturing: bool) -> str:
        """Why a launch cannot be part of a plan (plans.py); empty if it can."""
        if capturing or recorder.active is not None:
            return "it is captured, or traced"
        if type(workspace).issue is not DeviceWorkspace.issue:
            return "its commands are not those of the driver"
        return ""


def _batch(commands: Sequence[wire.StreamCommand]) -> _Batch:
    return (wire.StreamCommand * len(commands))(*commands)


def _step_of(command: wire.StreamCommand, rank: int) -> Step | None:
    if command.kind == wire.StreamKind.WAIT_EVENT:
        return Wait(rank, f"event {command.event}")
    own = command.flag == wire.DEVICE_FLAGS.index("arrived")
    if command.kind == wire.StreamKind.ARRIVED:
        return Signal(rank, "arrived")
    if command.kind == wire.StreamKind.WAIT and own:
        return Wait(rank, "arrived")
    return recorder.exchange_of(command, rank)


def _apart(batch: _Batch, rank: int) -> Iterator[tuple[Step | None, str, _Batch]]:
    """The parts of a batch, each with its step (None: no step of a schedule) and its lane.

    Copies of a lane that follow each other stay together, as the driver gets them.
    """
    for (copies, lane), run in groupby(batch, lambda c: (c.kind == wire.StreamKind.COPY, c.lane)):
        commands = list(run)
        for part in [commands] if copies else [[command] for command in commands]:
            yield _step_of(part[0], rank), LANES[lane], _batch(part)


# Calls follow one another, even when the caller has changed streams. Outside of captures this is
# part of each launch, as handles do not tell streams apart: a new stream may have an old handle.
# While a graph is captured, no event may be awaited that was not recorded in the same capture.
_FOLLOW = _batch([wire.StreamCommand(kind=wire.StreamKind.WAIT_EVENT, lane=0, event=_END)])


def _overlap(one: Region, other: Region) -> bool:
    if (one.rank, one.buffer) != (other.rank, other.buffer):
        return False
    return None in (one.chunk, other.chunk) or one.chunk == other.chunk


class StreamLowering:
    """Lowers steps in issue order. Runtimes call `lower`, which takes registered variants only."""

    def __init__(
        self,
        order: Sequence[tuple[str, Step]],
        rank: int,
        world_size: int,
        binding: Binding,
        *,
        joined: bool,
        captured: bool = False,
    ) -> None:
        self.binding, self.rank, self.world_size = binding, rank, world_size
        # Outside of graphs the issue order needs no edges.
        plain = GraphOrder(tuple(Ordered(lane, step) for lane, step in order))
        self.order = graph_order(tuple(order), rank) if captured else plain
        self.joined = joined
        # In the background, the peers' signals order steps of the caller's streams, except in
        # graphs, where waiters reset the signals: a wait could consume another wait's signal.
        self.follows = joined or captured
        self.captured = captured
        # Own flags that a kernel polls, or raises, are numbers in memory; all others are events.
        self.in_memory = {
            flag: number
            for _, step in order
            if isinstance(step, Compute)
            for number, (flag, _) in enumerate((*step.awaits, *step.raises))
        }
        self.items: list[_KernelCall | _Batch] = []
        self.commands: list[wire.StreamCommand] = []
        # The places of signals to peers that steps of other lanes must follow in a graph.
        self.awaited = {place for held in self.order.steps for place in held.behind}
        if not joined:
            self.awaited |= set(self.order.end_behind)
        # Copies issued since the last other step: copies in a batch have no order.
        self.copied: list[Copy] = []
        self.events: dict[str | int, int] = {}

    def launch(self) -> Launch:
        """Returns the launch; call it once."""
        lanes = list(dict.fromkeys(held.lane for held in self.order.steps))
        others = [lane for lane in lanes if lane != "compute"]
        if self.follows and not self.captured:
            self._add(wire.StreamKind.WAIT_EVENT, "compute", event=_END)
        self._add(wire.StreamKind.RECORD, "compute", event=_BEGIN)
        if "copy" in others:  # lane "signal" begins with a wait for "compute" anyway
            self._add(wire.StreamKind.WAIT_EVENT, "copy", event=_BEGIN)
        for place, held in enumerate(self.order.steps):
            for signal in held.behind:
                self._add(wire.StreamKind.WAIT_EVENT, held.lane, event=self._event(signal))
            self._lower(held.lane, held.step)
            if place in self.awaited:
                self._add(wire.StreamKind.RECORD, held.lane, event=self._event(place))
        for signal in self.order.end_behind if not self.joined else ():
            self._add(wire.StreamKind.WAIT_EVENT, "compute", event=self._event(signal))
        for lane in others if self.joined else ():
            self._add(wire.StreamKind.RECORD, lane, event=_JOIN)
            self._add(wire.StreamKind.WAIT_EVENT, "compute", event=_JOIN)
        if self.follows:
            self._add(wire.StreamKind.RECORD, "compute", event=_END)
        self._flush()
        assert _FIRST_FREE + len(self.events) <= events_needed(self.world_size, self.captured)
        return Launch(tuple(self.items), self.joined)

    def _lower(self, lane: str, step: Step) -> None:
        if isinstance(step, Compute):
            self.copied = []
            self._flush()
            self.items.append(_KernelCall(step.kernel, step.index, lane))
        elif isinstance(step, Copy):
            self._copy(lane, step)
        elif isinstance(step, Signal):
            self._signal(lane, step)
        else:
            self._wait(lane, step)

    def _signal(self, lane: str, step: Signal) -> None:
        if step.to == self.rank and step.flag in self.in_memory:
            number, flag = self.in_memory[step.flag], wire.DEVICE_FLAGS.index("arrived")
            self._add(wire.StreamKind.ARRIVED, lane, peer=number, flag=flag)
            return
        if step.to == self.rank:
            self._add(wire.StreamKind.RECORD, lane, event=self._event(step.flag))
            return
        # Each lane has a word that its streams copy to flags. These streams follow one another only
        # where calls are joined (csrc/cuda/streams.h).
        assert self.joined or lane == "copy", step
        flag = wire.DEVICE_FLAGS.index(step.flag)
        self._add(wire.StreamKind.SIGNAL, lane, peer=step.to, flag=flag)

    def _wait(self, lane: str, step: Wait) -> None:
        if step.source == self.rank and step.flag in self.in_memory:
            number, flag = self.in_memory[step.flag], wire.DEVICE_FLAGS.index("arrived")
            self._add(wire.StreamKind.WAIT, lane, peer=number, flag=flag)
        elif step.source == self.rank:
            self._add(wire.StreamKind.WAIT_EVENT, lane, event=self._event(step.flag))
        else:
            flag = wire.DEVICE_FLAGS.index(step.flag)
            self._add(wire.StreamKind.WAIT, lane, peer=step.source, flag=flag, lag=step.lag)

    def _event(self, what: str | int) -> int:
        """The event of a flag to oneself, by name, or of a signal to a peer, by its place."""
        return self.events.setdefault(what, _FIRST_FREE + len(self.events))

    def _add(self, kind: wire.StreamKind, lane: str, **fields: int) -> None:
        self.copied = []
        command = wire.StreamCommand(kind=kind, lane=LANES.index(lane), **fields)
        self.commands.append(command)

    def _flush(self) -> None:
        if self.commands:
            self.items.append(_batch(self.commands))
            self.commands = []

    def _places(self, region: Region) -> Iterator[PlacedRows]:
        for operand, run in self.binding.runs(region):
            if operand is None:
                space, index = wire.Space.SLOT, region.rank
            else:
                # The peers' symmetric tensors are operands, too, one after the other.
                space = wire.Space.OPERAND
                index = operand + (region.rank if region.buffer == "symmetric" else 0)
            yield wire.Reference(space, index, run.offset), run

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
        remote = int({step.src.rank, step.dst.rank} != {self.rank})
        fixed = {"kind": wire.StreamKind.COPY, "lane": LANES.index(lane), "remote": remote}
        for fields in copied_parts(self._places(step.src), self._places(step.dst)):
            self.commands.append(wire.StreamCommand(**fixed, **fields, alone=int(alone)))
            alone = False


def lower(
    variant: Variant,
    rank: int,
    world_size: int,
    binding: Binding,
    *,
    slots: int = 2,
) -> Launch:
    """Lowers a registered variant.

    In channel "sync" the caller's stream waits for the end of all lanes, otherwise only for its own
    steps. With one slot the calls are captured into graphs.
    """
    order = variant.issue_order(rank, world_size, slots)
    joined = variant.channel == "sync"
    lowering = StreamLowering(order, rank, world_size, binding, joined=joined, captured=slots == 1)
    return lowering.launch()
