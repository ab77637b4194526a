"""Writes calls of every variant of every pattern for `ranks.cpp`, which carries them out.

Kernels become copies of their operands to the rank's own memory, and of such memory to their
results, so that the program makes the accesses that `check` has proved to be ordered.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import struct
from collections.abc import Sequence

from symm_cp.native import wire
from symm_cp.runtime import loops
from symm_cp.runtime.program import Binding, Lowering, Program, Reduction
from symm_cp.schedule.patterns import Variant, variants
from symm_cp.schedule.steps import Compute, Copy, Region, Step, accesses
from symm_cp.tensors.shards import Extent

CHUNK = 512
_REDUCTIONS = ("reduce", "add", "combine")
#: How `ranks.cpp` fills or checks an operand.
INPUT, SYMMETRIC, SCRATCH, GATHERED, SUM = range(5)
#: Patterns whose output it can predict when all elements of a rank's input are equal.
_RESULTS = {
    "BACKGROUND_ALL_GATHER": GATHERED,
    "BACKGROUND_REDUCE_SCATTER": SUM,
    "REDUCE_SCATTER": SUM,
    "ALL_GATHER_AND_COMBINE": SUM,
}


def _without_kernels(steps: Sequence[Step], rank: int) -> list[Step]:
    def copies(step: Step) -> list[Step]:
        if not isinstance(step, Compute) or step.kernel in _REDUCTIONS:
            return [step]
        read = [Copy(r, Region(rank, f"read {r.buffer}", r.chunk)) for r in step.reads]
        written = [Copy(Region(rank, f"written {w.buffer}", w.chunk), w) for w in step.writes]
        return [*read, *written]

    return [new for step in steps for new in copies(step)]


def _chunks(steps: Sequence[Step]) -> dict[str, int]:
    """How many chunks each buffer has."""
    found: dict[str, int] = {}
    for step in steps:
        for region in itertools.chain(*accesses(step)):
            chunks = 1 if region.chunk is None else region.chunk + 1
            found[region.buffer] = max(found.get(region.buffer, 1), chunks)
    for _ in range(2):
        for step in steps:
            if isinstance(step, Copy) and step.src.chunk is None and step.dst.chunk is None:
                both = (step.src.buffer, step.dst.buffer)
                found |= dict.fromkeys(both, max(found[name] for name in both))
    return found


def _lowered(variant: Variant, world_size: int) -> list[tuple[Program, list[tuple[int, int]]]]:
    """For each rank its commands, and the kind and bytes of each operand."""
    by_rank = [
        _without_kernels([step for _, step in variant.issue_order(rank, world_size)], rank)
        for rank in range(world_size)
    ]
    numbers = itertools.count()
    buffers, operands = {}, []
    result = _RESULTS.get(variant.name, SCRATCH)
    kinds = {"input": INPUT, "symmetric": SYMMETRIC, "output": result}
    for name, parts in _chunks([step for steps in by_rank for step in steps]).items():
        if name == "slot":
            buffers[name] = (Extent.even(None, CHUNK, parts),)
        else:
            buffers[name] = (Extent.even(next(numbers), CHUNK, parts),)
            operands.append((kinds.get(name, SCRATCH), CHUNK * parts))
    binding, reduction = Binding(buffers), Reduction(wire.DType.FLOAT32)
    return [
        (Lowering(steps, rank, binding, reduction, frozenset()).program(), operands)
        for rank, steps in enumerate(by_rank)
    ]


def _bytes(program: Program, operands: list[tuple[int, int]]) -> bytes:
    assert all(isinstance(item, ctypes.Array) for item, _ in program.items)
    commands = b"".join(bytes(item) for item, _ in program.items)  # type: ignore[call-overload]
    references = bytes(program.references)  # type: ignore[call-overload]
    sizes = (
        len(commands) // ctypes.sizeof(wire.Command),
        len(references) // ctypes.sizeof(wire.Reference),
        len(operands),
    )
    listed = b"".join(struct.pack("2q", *operand) for operand in operands)
    return struct.pack("3q", *sizes) + commands + references + listed


def write(world_size: int, calls: int, choose: random.Random) -> bytes:
    """Writes every variant once, then random ones: `calls` calls in all."""
    everything = list(variants("sync", "direct"))
    chosen = [*everything, *choose.choices(everything, k=max(0, calls - len(everything)))]
    known = {variant: _lowered(variant, world_size) for variant in everything}
    parts = [struct.pack("2q", world_size, len(chosen))]
    for variant in chosen:
        parts.append(struct.pack("40s", str(variant).encode()[:39]))
        parts += [_bytes(*lowered) for lowered in known[variant]]
    return b"".join(parts)


def write_loops(world_size: int) -> bytes:
    """The steps of all exchanges on each rank, for `exchanges.cpp`."""
    parts = []
    exchanges = list(loops.exchanges())
    for kind, channel, variant in exchanges:
        parts.append(struct.pack("3q", kind, channel, loops.loop_kind(variant)))
        for rank in range(world_size):
            loop = loops.lower_loop(variant, rank, world_size)
            sizes = len(loop.steps), len(loop.sources)
            parts.append(struct.pack("5q", *sizes, loop.published, loop.parted, loop.slotted))
            parts += [bytes(loop.steps), bytes(loop.sources)]
    return struct.pack("2q", world_size, len(exchanges)) + b"".join(parts)
