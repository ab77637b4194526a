"""Writes calls of every communication pattern for `ranks.cpp`, which carries them out.

Kernels become copies of what they read to memory of the rank's own, and of such memory to what
they write: the accesses are those that `check` has proved to be ordered.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import struct
from collections.abc import Sequence

import torch

from symm_cp import wire
from symm_cp.runtime.cpu import REDUCIBLE
from symm_cp.runtime.program import Extent, Program, Reduction, lower
from symm_cp.schedule import CHANNELS, Pattern
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Step, accesses

CHUNK = 512
_REDUCTIONS = ("reduce", "add")
#: What `ranks.cpp` does with an operand.
INPUT, SYMMETRIC, SCRATCH, GATHERED, SUM = range(5)
#: Patterns whose output it can foretell, when all elements of a rank's input are equal.
_RESULTS = {
    "all_gather": GATHERED,
    "all_to_all": GATHERED,
    "reduce_scatter": SUM,
    "one_shot_all_reduce": SUM,
}


def _without_kernels(schedule: Schedule) -> Schedule:
    def copies(step: Step) -> list[Step]:
        if not isinstance(step, Compute) or step.kernel in _REDUCTIONS:
            return [step]
        rank = schedule.rank
        read = [Copy(r, Region(rank, f"read {r.buffer}", r.chunk)) for r in step.reads]
        written = [Copy(Region(rank, f"written {w.buffer}", w.chunk), w) for w in step.writes]
        return [*read, *written]

    lanes = {
        name: tuple(new for step in lane for new in copies(step))
        for name, lane in schedule.lanes.items()
    }
    return Schedule(schedule.name, schedule.rank, schedule.world_size, lanes, schedule.slots)


def _chunks(schedules: Sequence[Schedule]) -> dict[str, int]:
    """How many chunks each buffer has."""
    steps = [step for s in schedules for lane in s.lanes.values() for step in lane]
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


def _lowered(pattern: Pattern, world_size: int) -> list[tuple[Program, list[tuple[int, int]]]]:
    """For each rank its commands, and the kind and bytes of each operand."""
    schedules = [_without_kernels(schedule) for schedule in pattern.schedules(world_size)]
    chunks = _chunks(schedules)
    numbers = itertools.count()
    binding, operands = {}, []
    result = _RESULTS.get(pattern.builder.__name__, SCRATCH)
    kinds = {"input": INPUT, "staging": INPUT, "symmetric": SYMMETRIC, "output": result}
    for name, parts in chunks.items():
        if name == "slot":
            binding[name] = (Extent.even(None, CHUNK, parts),)
        else:
            binding[name] = (Extent.even(next(numbers), CHUNK, parts),)
            operands.append((kinds.get(name, SCRATCH), CHUNK * parts))
    reduction = Reduction(REDUCIBLE[torch.float32], False)
    return [(lower(s, binding, reduction=reduction), operands) for s in schedules]


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
    """Every pattern once, then others at random: `calls` in all, of both channels."""
    everything = [(name, pattern) for name, patterns in CHANNELS.items() for pattern in patterns]
    chosen = [*everything, *choose.choices(everything, k=max(0, calls - len(everything)))]
    known = {pattern: _lowered(pattern, world_size) for _, pattern in everything}
    parts = [struct.pack("2q", world_size, len(chosen))]
    for channel, pattern in chosen:
        parts.append(struct.pack("q40s", channel == "async", str(pattern).encode()[:39]))
        parts += [_bytes(*lowered) for lowered in known[pattern]]
    return b"".join(parts)
