"""Lowers the steps of a schedule to a program: native commands, and kernels between them.

A loop (on CPU) has the commands of one piece of an exchange. It contains no sizes and no addresses,
and its kernels are native. A program of streams is made for the sizes of its buffers: each command
has a lane, flags that a rank raises for itself become events, and kernels are calls of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from symm_cp.native import wire
from symm_cp.schedule.graphs import GraphOrder, Ordered, graph_order
from symm_cp.schedule.patterns import Variant
from symm_cp.schedule.patterns.pattern import IssueOrder
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Step, Wait
from symm_cp.tensors.shards import ByteRows, Parts, joint_rows

#: A Python kernel takes the index of its step.
Kernel: TypeAlias = Callable[[int], None]
#: Native commands, one after the other.
Batch: TypeAlias = "ctypes.Array[wire.Command]"
#: Lanes of schedules: the caller's stream, a stream that drives the copy engines, one that signals
#: concurrently with the caller's, and one for kernels beside the caller's. A lane's number is its
#: index here.
LANES = ("compute", "copy", "signal", "compute2")

# Events of every call: where the caller's stream begins it, where a lane has ended it, and where
# the caller's stream has ended it.
_BEGIN, _JOIN, END = 0, 1, 2
_FIRST_FREE = 3


@dataclass(frozen=True)
class KernelCall:
    """A call of a Python kernel."""

    name: str
    index: int
    lane: str


@dataclass(frozen=True)
class Program:
    """A lowered schedule."""

    items: tuple[KernelCall | Batch, ...]
    #: Of reductions.
    sources: ctypes.Array[wire.Place]


@dataclass(frozen=True)
class Binding:
    """Where each buffer lies; `by_rank` is for buffers that differ from rank to rank."""

    buffers: Mapping[str, Parts] = field(default_factory=dict)
    by_rank: Mapping[str, Mapping[int, Parts]] = field(default_factory=dict)

    def runs(self, region: Region) -> Iterator[tuple[wire.Place, ByteRows]]:
        """Where each part of a region begins, and its bytes."""
        by_rank = self.by_rank.get(region.buffer)
        parts = self.buffers[region.buffer] if by_rank is None else by_rank[region.rank]
        for extent in parts:
            run = extent.run(region.chunk)
            if extent.operand is None:
                buffer, index = wire.Buffer.SLOT, region.rank
            else:
                # The peers' symmetric tensors are operands, too, one after the other.
                buffer = wire.Buffer.OPERAND
                index = extent.operand + (region.rank if region.buffer == "symmetric" else 0)
            yield wire.Place(buffer, index, -1, run.offset), run


def batch(commands: Sequence[wire.Command]) -> Batch:
    """Returns commands as native code takes them."""
    return (wire.Command * len(commands))(*commands)


class Lowering:
    """Lowers steps, in the order in which they are issued."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: list[KernelCall | Batch] = []
        self.commands: list[wire.Command] = []
        self.sources: list[wire.Place] = []

    def program(self) -> Program:
        """Returns the program of the steps so far; call it once."""
        self._flush()
        sources = (wire.Place * len(self.sources))(*self.sources)
        return Program(tuple(self.items), sources)

    def step(self, lane: str, step: Step) -> None:
        """Lowers a step of a lane."""
        if isinstance(step, Compute):
            self.kernel(lane, step)
        elif isinstance(step, Copy):
            self.copy(lane, step)
        elif isinstance(step, Signal):
            self.signal(lane, step)
        else:
            self.wait(lane, step)

    def add(self, kind: wire.Kind, lane: str, **fields: object) -> None:
        """Appends a command."""
        self.commands.append(wire.Command(kind=kind, lane=LANES.index(lane), **fields))

    def signal(self, lane: str, step: Signal) -> None:
        """Lowers a signal to a peer."""
        self.add(wire.Kind.SIGNAL, lane, peer=step.to, flag=wire.DEVICE_FLAGS.index(step.flag))

    def wait(self, lane: str, step: Wait) -> None:
        """Lowers a wait for a peer."""
        flag = wire.DEVICE_FLAGS.index(step.flag)
        self.add(wire.Kind.WAIT, lane, peer=step.source, flag=flag, lag=step.lag)

    def copy(self, lane: str, step: Copy) -> None:
        """Lowers a copy."""
        raise NotImplementedError

    def kernel(self, lane: str, step: Compute) -> None:
        """Lowers the call of a kernel."""
        raise NotImplementedError

    def _flush(self) -> None:
        if self.commands:
            self.items.append(batch(self.commands))
            self.commands = []


class LoopLowering(Lowering):
    """Lowers one piece of an exchange, whose steps are on one lane."""

    #: The kernels that are no reductions.
    _KERNELS: Mapping[str, wire.Kind] = {
        "give": wire.Kind.PRODUCE,
        "consume": wire.Kind.CONSUME,
        "take": wire.Kind.CONSUME,
    }
    published = False

    def signal(self, lane: str, step: Signal) -> None:
        """Lowers a signal; peers read the record of the call after the first."""
        if not self.published:
            self.published = True
            self.add(wire.Kind.PUBLISH, lane)
        super().signal(lane, step)

    def copy(self, lane: str, step: Copy) -> None:
        """Lowers a copy."""
        to, source = self._place(step.dst, written=True), self._place(step.src)
        self.add(wire.Kind.COPY, lane, to=to, source=source)

    def kernel(self, lane: str, step: Compute) -> None:
        """Lowers the call of a native kernel."""
        kind = self._KERNELS.get(step.kernel, wire.Kind.REDUCE)
        fields: dict[str, object] = {"peer": step.index}
        if kind == wire.Kind.REDUCE:
            fields = {"sources": len(step.reads), "first_source": len(self.sources)}
            self.sources += [self._place(region) for region in step.reads]
        if kind != wire.Kind.CONSUME:
            fields["to"] = self._place(step.writes[0], written=True)
        self.add(kind, lane, **fields)

    def _place(self, region: Region, *, written: bool = False) -> wire.Place:
        chunk = -1 if region.chunk is None else region.chunk
        # The caller's output may be symmetric.
        name = "output" if written and region.buffer == "symmetric" else region.buffer
        return wire.Place(wire.Buffer[name.upper()], region.rank, chunk, 0)


class StreamLowering(Lowering):
    """Lowers the steps of all lanes, in issue order.

    Captured graphs do not keep that order, so they get further events (`schedule/graphs.py`).
    """

    def __init__(
        self,
        order: IssueOrder,
        rank: int,
        binding: Binding,
        *,
        joined: bool,
        captured: bool = False,
    ) -> None:
        super().__init__(rank)
        self.binding = binding
        # Outside of graphs the issue order needs no edges.
        plain = GraphOrder(tuple(Ordered(lane, step) for lane, step in order))
        self.order = graph_order(order, rank) if captured else plain
        self.joined, self.captured = joined, captured
        # In the background, nothing needs an order of the caller's streams, except the proof of
        # graphs, which takes them for one lane.
        self.follows = joined or captured
        # Own flags that a kernel polls, or raises, are numbers in memory; all others are events.
        self.in_memory = {
            flag: number
            for _, step in order
            if isinstance(step, Compute)
            for number, (flag, _) in enumerate((*step.awaits, *step.raises))
        }
        # The places of signals to peers that steps of other lanes must follow in a graph.
        self.awaited = {place for held in self.order.steps for place in held.behind}
        if not joined:
            self.awaited |= set(self.order.end_behind)
        # Copies issued since the last other step: copies in a batch have no order.
        self.copied: list[Copy] = []
        self.events: dict[str | int, int] = {}

    @property
    def event_count(self) -> int:
        """The number of events of the program."""
        return _FIRST_FREE + len(self.events)

    def lowered(self) -> Program:
        """Returns the program of all steps; call it once."""
        lanes = list(dict.fromkeys(held.lane for held in self.order.steps))
        others = [lane for lane in lanes if lane != "compute"]
        if self.follows and not self.captured:
            self.add(wire.Kind.WAIT_EVENT, "compute", event=END)
        self.add(wire.Kind.RECORD, "compute", event=_BEGIN)
        for lane in others:
            if lane != "signal":  # which begins with a wait for "compute" anyway
                self.add(wire.Kind.WAIT_EVENT, lane, event=_BEGIN)
        for place, held in enumerate(self.order.steps):
            for signal in held.behind:
                self.add(wire.Kind.WAIT_EVENT, held.lane, event=self._event(signal))
            self.step(held.lane, held.step)
            if place in self.awaited:
                self.add(wire.Kind.RECORD, held.lane, event=self._event(place))
        for signal in self.order.end_behind if not self.joined else ():
            self.add(wire.Kind.WAIT_EVENT, "compute", event=self._event(signal))
        for lane in others if self.joined else ():
            self.add(wire.Kind.RECORD, lane, event=_JOIN)
            self.add(wire.Kind.WAIT_EVENT, "compute", event=_JOIN)
        if self.follows:
            self.add(wire.Kind.RECORD, "compute", event=END)
        return self.program()

    def add(self, kind: wire.Kind, lane: str, **fields: object) -> None:
        """Appends a command that is no copy."""
        self.copied = []
        super().add(kind, lane, **fields)

    def kernel(self, lane: str, step: Compute) -> None:
        """Lowers the call of a kernel in Python."""
        self.copied = []
        self._flush()
        self.items.append(KernelCall(step.kernel, step.index, lane))

    def signal(self, lane: str, step: Signal) -> None:
        """Lowers a signal to a peer, or to this rank's other lanes."""
        if step.to == self.rank and step.flag in self.in_memory:
            number, flag = self.in_memory[step.flag], wire.DEVICE_FLAGS.index("arrived")
            self.add(wire.Kind.ARRIVED, lane, peer=number, flag=flag)
        elif step.to == self.rank:
            self.add(wire.Kind.RECORD, lane, event=self._event(step.flag))
        else:
            # Each lane has a word that its streams copy to flags. These streams follow one another
            # only where calls are joined (csrc/cuda/streams.h).
            assert self.joined or lane == "copy", step
            super().signal(lane, step)

    def wait(self, lane: str, step: Wait) -> None:
        """Lowers a wait for a peer, or for this rank's other lanes."""
        if step.source == self.rank and step.flag in self.in_memory:
            number, flag = self.in_memory[step.flag], wire.DEVICE_FLAGS.index("arrived")
            self.add(wire.Kind.WAIT, lane, peer=number, flag=flag)
        elif step.source == self.rank:
            self.add(wire.Kind.WAIT_EVENT, lane, event=self._event(step.flag))
        else:
            super().wait(lane, step)

    def copy(self, lane: str, step: Copy) -> None:
        """Lowers a copy. A target with fewer parts ("gathered") takes the first ones."""
        alone = any(
            _overlap(step.src, other.dst)
            or _overlap(step.dst, other.src)
            or _overlap(step.dst, other.dst)
            for other in self.copied
        )
        copied = [step] if alone else [*self.copied, step]
        remote = int({step.src.rank, step.dst.rank} != {self.rank})
        runs = zip(self.binding.runs(step.src), self.binding.runs(step.dst), strict=False)
        for (source, from_run), (to, to_run) in runs:
            nbytes, rows, to_pitch, from_pitch = joint_rows(from_run, to_run)
            sizes = {"bytes": nbytes, "rows": rows, "to_pitch": to_pitch, "from_pitch": from_pitch}
            self.add(
                wire.Kind.COPY, lane, to=to, source=source, remote=remote, alone=int(alone), **sizes
            )
            alone = False
        self.copied = copied

    def _event(self, what: str | int) -> int:
        """The event of a flag to oneself, by name, or of a signal to a peer, by its place."""
        return self.events.setdefault(what, self.event_count)


def _overlap(one: Region, other: Region) -> bool:
    if (one.rank, one.buffer) != (other.rank, other.buffer):
        return False
    return None in (one.chunk, other.chunk) or one.chunk == other.chunk


def lower_loop(variant: Variant, rank: int, world_size: int) -> Program:
    """Lowers one piece of a registered variant whose schedules have one lane."""
    lowering = LoopLowering(rank)
    for lane, step in variant.issue_order(rank, world_size):
        lowering.step(lane, step)
    return lowering.program()
