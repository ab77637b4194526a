"""Lowers a lane of a schedule to native commands, with calls of Python kernels between them.

A program is made once for a variant and the sizes of its buffers, then run for every call: only
the addresses of the operands and the epoch differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from symm_cp import native
from symm_cp.group.memory import Workspace
from symm_cp.native import wire
from symm_cp.runtime import recorder
from symm_cp.schedule.patterns import Variant
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Step, Wait
from symm_cp.tensors.shards import ByteRows, Parts, joint_rows

#: A Python kernel takes the index of its step.
Kernel: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Binding:
    """Where each buffer lies; `by_rank` is for buffers that differ from rank to rank."""

    buffers: Mapping[str, Parts] = field(default_factory=dict)
    by_rank: Mapping[str, Mapping[int, Parts]] = field(default_factory=dict)

    def parts(self, region: Region) -> Parts:
        """The parts of the buffer that a region is in."""
        by_rank = self.by_rank.get(region.buffer)
        return self.buffers[region.buffer] if by_rank is None else by_rank[region.rank]

    def runs(self, region: Region) -> Iterator[tuple[int | None, ByteRows]]:
        """The operand (None: the slot) and the bytes of each part of a region."""
        for extent in self.parts(region):
            yield extent.operand, extent.run(region.chunk)


#: Where a part of a region begins, and its bytes.
PlacedRows: TypeAlias = tuple[wire.Reference, ByteRows]


def copied_parts(
    sources: Iterable[PlacedRows], targets: Iterable[PlacedRows]
) -> Iterator[dict[str, Any]]:
    """Yields the fields of the command that copies each part of a region to another region.

    A target with fewer parts ("gathered") takes the first ones.
    """
    for (source, from_run), (to, to_run) in zip(sources, targets, strict=False):
        nbytes, rows, to_pitch, from_pitch = joint_rows(from_run, to_run)
        sizes = {"bytes": nbytes, "rows": rows, "to_pitch": to_pitch, "from_pitch": from_pitch}
        yield {"to": to, "source": source, **sizes}


@dataclass(frozen=True)
class Reduction:
    """The element type (torch's number) of native reductions, and whether they average."""

    dtype: int
    mean: bool = False


class Steps:
    """The number of steps, once the block has ended."""

    count = 0


#: Whether the native part counts the steps that run in Python.
_probing = False


@contextmanager
def probing(*, seed: int = 0, delay_us: int = 0, fatal: int = -1) -> Iterator[Steps]:
    """For tests: delays this process's steps by up to `delay_us`, or kills it before step `fatal`.

    Delays are random. The steps inside the block count from 0; `fatal` -1: none.
    """
    global _probing
    library = native.load()
    steps = Steps()
    library.symm_cp_probe_begin(seed, delay_us, fatal)
    _probing = True
    try:
        yield steps
    finally:
        _probing = False
        steps.count = library.symm_cp_probe_end()


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
        call_name: bytes,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        """Runs the program in the calling thread; raises `RuntimeError` if a peer fails.

        Runs inside `Group.call`.
        """
        run = native.load().symm_cp_run
        addresses = (ctypes.c_void_p * len(operands))(*operands)
        recording = recorder.active
        for item, number in self.items:
            if isinstance(item, str):
                assert kernels is not None
                if _probing:
                    native.load().symm_cp_probe_step()
                if recording is None:
                    kernels[item](number)
                else:
                    recording.kernel(kernels[item], item, number, call_name, epoch)
            elif run(workspace.handle, item, number, self.references, addresses) < 0:
                raise RuntimeError(native.error())


def _buffers_of(step: Step) -> set[str]:
    if isinstance(step, Copy):
        return {step.src.buffer, step.dst.buffer}
    if isinstance(step, Compute):
        return {region.buffer for region in (*step.reads, *step.writes)}
    return set()


class Lowering:
    """Lowers steps of one lane. Runtimes call `lower`, which takes registered variants only."""

    def __init__(
        self,
        steps: Sequence[Step],
        rank: int,
        binding: Binding,
        reduction: Reduction | None,
        python_copies: frozenset[str],
    ) -> None:
        self.rank = rank
        self.binding = binding
        self.reduction = reduction
        self.python_copies = python_copies
        self.steps = steps
        self.in_place = any("symmetric" in _buffers_of(step) for step in steps)
        self.items: list[tuple[object, int]] = []
        self.commands: list[wire.Command] = []
        self.references: list[wire.Reference] = []
        self.announced = False

    def program(self) -> Program:
        """Returns the program; call it once."""
        for step in self.steps:
            self._lower(step)
        if any(isinstance(step, Wait) for step in self.steps):
            # Not a step of the schedule: discards data whose owner has left the call.
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
                wire.Command(
                    kind=wire.Kind.WAIT,
                    peer=step.source,
                    flag=flag,
                    lag=step.lag,
                    piece=step.piece,
                )
            )
        elif isinstance(step, Signal):
            self._announce()
            flag = wire.FLAGS.index(step.flag)
            self.commands.append(
                wire.Command(kind=wire.Kind.SIGNAL, peer=step.to, flag=flag, piece=step.piece)
            )
        elif isinstance(step, Copy):
            if step.src.buffer in self.python_copies:
                chunk = step.dst.chunk if step.dst.chunk is not None else -1
                self._call(f"{step.src.buffer}->{step.dst.buffer}", chunk)
            else:
                self._copy(step)
        elif step.kernel in ("reduce", "add", "combine") and self.reduction is not None:
            self._reduce(step, self.reduction)
        else:
            self._call(step.kernel, step.index)

    def _announce(self) -> None:
        # Before the first signal of the call: peers read the record after that.
        if self.announced:
            return
        self.announced = True
        command = wire.Command(kind=wire.Kind.PUBLISH, mean=int(self.in_place))
        if self.in_place:
            command.source, _ = next(self._places(Region(self.rank, "symmetric")))
        self.commands.append(command)

    def _places(self, region: Region) -> Iterator[PlacedRows]:
        for operand, run in self.binding.runs(region):
            if region.rank != self.rank:
                # In ops on symmetric tensors a peer's shard is its announced tensor, not its slot.
                by_slot = self.in_place and region.buffer == "slot"
                space, index = wire.Space.SLOT if by_slot else wire.Space.SHARD, region.rank
            elif operand is None:
                space, index = wire.Space.SLOT, self.rank
            else:
                space, index = wire.Space.OPERAND, operand
            yield wire.Reference(space, index, run.offset), run

    def _copy(self, step: Copy) -> None:
        for fields in copied_parts(self._places(step.src), self._places(step.dst)):
            self.commands.append(wire.Command(kind=wire.Kind.COPY, **fields))

    def _reduce(self, step: Compute, reduction: Reduction) -> None:
        first = len(self.references)
        to, to_run = next(self._places(step.writes[0]))
        # All sources but the target itself have the same layout.
        from_run = to_run
        for region in step.reads:
            source, run = next(self._places(region))
            self.references.append(source)
            if run.rows >= from_run.rows and region.buffer != step.writes[0].buffer:
                from_run = run
        nbytes, rows, to_pitch, from_pitch = joint_rows(from_run, to_run)
        self.commands.append(
            wire.Command(
                kind=wire.Kind.REDUCE,
                to=to,
                bytes=nbytes,
                rows=rows,
                to_pitch=to_pitch,
                from_pitch=from_pitch,
                dtype=reduction.dtype,
                mean=int(reduction.mean),
                first_source=first,
                sources=len(step.reads),
            )
        )


def lower(
    variant: Variant,
    rank: int,
    world_size: int,
    binding: Binding,
    *,
    reduction: Reduction | None = None,
    python_copies: frozenset[str] = frozenset(),
    pieces: int = 1,
) -> Program:
    """Lowers a registered variant whose schedules have one lane.

    With a `reduction` the kernels "reduce", "add" and "combine" become native; every other kernel,
    and each copy out of a buffer in `python_copies`, becomes a call of the Python kernel of its
    name (for a copy: `"source->target"`, with the target's chunk). `pieces`: the number of pieces
    of a chained variant.
    """
    steps = [step for _, step in variant.issue_order(rank, world_size, pieces=pieces)]
    return Lowering(steps, rank, binding, reduction, python_copies).program()
