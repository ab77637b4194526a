"""Binds the buffers that a schedule names to memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from symm_cp.schedule.steps import Compute, Copy, Region, Step
from symm_cp.tensors.shards import Extent, Run

#: The parts of a buffer: a shard may be several tensors that travel together.
Parts: TypeAlias = tuple[Extent, ...]


@dataclass(frozen=True)
class Binding:
    """Where each buffer lies; `by_rank` says it for those that differ from rank to rank."""

    buffers: Mapping[str, Parts] = field(default_factory=dict)
    by_rank: Mapping[str, Mapping[int, Parts]] = field(default_factory=dict)

    def parts(self, region: Region) -> Parts:
        """The parts of the buffer that a region is in."""
        by_rank = self.by_rank.get(region.buffer)
        return self.buffers[region.buffer] if by_rank is None else by_rank[region.rank]

    def runs(self, region: Region) -> Iterator[tuple[int | None, Run]]:
        """The operand (None: the slot) and the bytes of each part of a region."""
        for extent in self.parts(region):
            yield extent.operand, extent.run(region.chunk)


def buffers_of(step: Step) -> set[str]:
    """Returns the buffers that a step touches."""
    if isinstance(step, Copy):
        return {step.src.buffer, step.dst.buffer}
    if isinstance(step, Compute):
        return {region.buffer for region in (*step.reads, *step.writes)}
    return set()
