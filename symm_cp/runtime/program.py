"""Lowers a lane of a schedule to native commands, with calls of Python kernels between them.

A program is made once for a schedule and the sizes of its buffers, then run for every call: only
the addresses of the operands and the epoch differ.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from symm_cp import native, wire
from symm_cp.alignment import part_offsets
from symm_cp.memory import Workspace
from symm_cp.runtime import probe, recorder
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait


@dataclass(frozen=True)
class Extent:
    """Where the chunks of a buffer begin, and how long they are, in bytes.

    Each chunk is `rows` runs of bytes, `pitch` apart (one run: it is contiguous). The buffer is
    the call's operand number `operand`, or the slot when that is None.
    """

    operand: int | None
    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]
    rows: int = 1
    pitch: int = 0

    @classmethod
    def even(cls, operand: int | None, nbytes: int, chunks: int = 1, *, start: int = 0) -> Extent:
        """A contiguous buffer of `chunks` equal chunks, `nbytes` bytes each."""
        offsets = tuple(start + i * nbytes for i in range(chunks))
        return cls(operand, offsets, (nbytes,) * chunks)

    @classmethod
    def aligned(cls, operand: int | None, nbytes: int, chunks: int) -> Extent:
        """A buffer of `chunks` equal chunks that kernels write, each of them aligned."""
        sizes = (nbytes,) * chunks
        return cls(operand, part_offsets(sizes)[:-1], sizes)


#: For each buffer its parts: a shard may be several tensors that travel together.
Binding: TypeAlias = Mapping[str, tuple[Extent, ...]]
#: A Python kernel takes the index of its step.
Kernel: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Reduction:
    """The element type (torch's number) of native reductions, and whether they average."""

    dtype: int
    mean: bool


@dataclass
class _Batch:
    commands: list[wire.Command] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """A lowered lane: native batches `(commands, count)` and Python calls `(kernel, index)`."""

    items: tuple[tuple[object, int], ...]
    references: object

    def run(
        self,
        workspace: Workspace,
        epoch: int,
        operands: Sequence[int],
        what: bytes,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        """Carries the program out in the calling thread; raises `RuntimeError` if a peer fails.

        The call that is under way on the workspace is that of `Group.call`.
        """
        run = native.load().symm_cp_run
        addresses = (ctypes.c_void_p * len(operands))(*operands)
        recording = recorder.active
        for item, number in self.items:
            if isinstance(item, str):
                assert kernels is not None
                if probe.active:
                    probe.step()
                if recording is None:
                    kernels[item](number)
                else:
                    recording.kernel(kernels[item], item, number, what, epoch)
            elif run(workspace.handle, item, number, self.references, addresses) < 0:
                raise RuntimeError(native.error())

    def plan(self, what: bytes) -> Plan:
        """Makes the native plan of a program without Python kernels."""
        library = native.load()
        commands, count = self.items[0] if self.items else (None, 0)
        assert isinstance(self.references, ctypes.Array)
        handle: int = library.symm_cp_plan(
            commands, count, self.references, len(self.references), what
        )
        return Plan(handle)


class Plan:
    """A native plan, freed with this object; transfers under way keep their own share of it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, native.load().symm_cp_plan_free, handle).atexit = False


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        reduction: Reduction | None,
        python_copies: frozenset[str],
        slots: Mapping[int, tuple[Extent, ...]] | None,
    ) -> None:
        self.rank = schedule.rank
        self.binding = binding
        self.slots = slots
        self.reduction = reduction
        self.python_copies = python_copies
        self.steps = [step for lane in schedule.lanes.values() for step in lane]
        self.in_place = any("symmetric" in buffers_of(step) for step in self.steps)
        self.items: list[tuple[object, int]] = []
        self.commands: list[wire.Command] = []
        self.references: list[wire.Reference] = []
        self.announced = False

    def program(self) -> Program:
        for step in self.steps:
            self._lower(step)
        if any(isinstance(step, Wait) for step in self.steps):
            # No step of the schedule: what was read counts unless its owner has left the call.
            self.commands.append(wire.Command(kind=wire.Kind.VERIFY))
        self._flush()
        references = (wire.Reference * max(1, len(self.references)))(*self.references)
        return Program(tuple(self.items), references)

    def _flush(self) -> None:
        if self.commands:
            count = len(self.commands)
            self.items.append(((wire.Command * count)(*self.commands), count))
            self.commands = []

    def _call(self, kernel: str, index: int) -> None:
        self._flush()
        self.items.append((kernel, index))

    def _lower(self, step: Step) -> None:
        if isinstance(step, Wait):
            flag = wire.FLAGS.index(step.flag)
            self.commands.append(
                wire.Command(kind=wire.Kind.WAIT, peer=step.source, flag=flag, lag=step.lag)
            )
        elif isinstance(step, Signal):
            self._announce()
            flag = wire.FLAGS.index(step.flag)
            self.commands.append(wire.Command(kind=wire.Kind.SIGNAL, peer=step.to, flag=flag))
        elif isinstance(step, Copy):
            if step.src.buffer in self.python_copies:
                chunk = step.dst.chunk if step.dst.chunk is not None else -1
                self._call(f"{step.src.buffer}->{step.dst.buffer}", chunk)
            else:
                self._copy(step)
        elif step.kernel in ("reduce", "add") and self.reduction is not None:
            self._reduce(step, self.reduction)
        else:
            self._call(step.kernel, step.index)

    def _announce(self) -> None:
        # The record must be there before the first signal of the call: peers read it after that.
        if self.announced:
            return
        self.announced = True
        command = wire.Command(kind=wire.Kind.PUBLISH, mean=int(self.in_place))
        if self.in_place:
            command.source = self._reference(Region(self.rank, "symmetric"), 0)[0]
        self.commands.append(command)

    def _parts(self, region: Region) -> tuple[Extent, ...]:
        if self.slots is not None and region.buffer == "slot":
            return self.slots[region.rank]
        return self.binding[region.buffer]

    def _reference(self, region: Region, part: int) -> tuple[wire.Reference, int, int, int]:
        """Returns where a region begins, its bytes per row, its rows and their pitch."""
        extent = self._parts(region)[part]
        if region.chunk is None:
            offset, nbytes, rows, pitch = extent.offsets[0], sum(extent.nbytes), extent.rows, 0
            if rows > 1:
                pitch = extent.pitch
        else:
            offset, nbytes = extent.offsets[region.chunk], extent.nbytes[region.chunk]
            rows, pitch = extent.rows, extent.pitch
        pitch = pitch or nbytes
        if region.rank != self.rank:
            # In an op on symmetric tensors a peer's slot is no shard: nothing was announced there.
            by_slot = self.in_place and region.buffer == "slot"
            space = wire.Space.SLOT if by_slot else wire.Space.SHARD
            return wire.Reference(space, region.rank, offset), nbytes, rows, pitch
        if extent.operand is None:
            return wire.Reference(wire.Space.SLOT, self.rank, offset), nbytes, rows, pitch
        return wire.Reference(wire.Space.OPERAND, extent.operand, offset), nbytes, rows, pitch

    def _copy(self, step: Copy) -> None:
        # A target with fewer parts ("gathered") takes the first ones.
        for part in range(min(len(self._parts(step.src)), len(self._parts(step.dst)))):
            source, source_bytes, source_rows, from_pitch = self._reference(step.src, part)
            to, to_bytes, to_rows, to_pitch = self._reference(step.dst, part)
            assert source_bytes * source_rows == to_bytes * to_rows, (step, part)
            rows = max(source_rows, to_rows)
            nbytes = source_bytes * source_rows // rows
            self.commands.append(
                wire.Command(
                    kind=wire.Kind.COPY,
                    to=to,
                    source=source,
                    bytes=nbytes,
                    rows=rows,
                    # The side that is one run has its rows one after the other.
                    to_pitch=to_pitch if to_rows == rows else nbytes,
                    from_pitch=from_pitch if source_rows == rows else nbytes,
                )
            )

    def _reduce(self, step: Compute, reduction: Reduction) -> None:
        first = len(self.references)
        to, to_bytes, to_rows, to_pitch = self._reference(step.writes[0], 0)
        rows, from_pitch = to_rows, to_pitch
        for region in step.reads:
            source, _, source_rows, source_pitch = self._reference(region, 0)
            self.references.append(source)
            if source_rows >= rows and region.buffer != step.writes[0].buffer:
                rows, from_pitch = source_rows, source_pitch
        nbytes = to_bytes * to_rows // rows
        self.commands.append(
            wire.Command(
                kind=wire.Kind.REDUCE,
                to=to,
                bytes=nbytes,
                rows=rows,
                to_pitch=to_pitch if to_rows == rows else nbytes,
                from_pitch=from_pitch,
                dtype=reduction.dtype,
                mean=int(reduction.mean),
                first_source=first,
                sources=len(step.reads),
            )
        )


def buffers_of(step: Step) -> set[str]:
    """Returns the buffers that a step touches."""
    if isinstance(step, Copy):
        return {step.src.buffer, step.dst.buffer}
    if isinstance(step, Compute):
        return {region.buffer for region in (*step.reads, *step.writes)}
    return set()


def lower(
    schedule: Schedule,
    binding: Binding,
    *,
    reduction: Reduction | None = None,
    python_copies: frozenset[str] = frozenset(),
    slots: Mapping[int, tuple[Extent, ...]] | None = None,
) -> Program:
    """Lowers a schedule of one lane.

    `binding` says where each buffer lies, `slots` does for each rank where ranks' slots differ.
    `Compute("reduce")` and `Compute("add")` become native with a `reduction`; every other kernel,
    and each copy out of a buffer in `python_copies`, becomes a call of the Python kernel of its
    name (for a copy: `"source->target"`, with the target's chunk).
    """
    return _Lowering(schedule, binding, reduction, python_copies, slots).program()
