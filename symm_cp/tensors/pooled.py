"""Where the rows of all peers of a rank lie when it has them, in an order of its choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from symm_cp.tensors.alignment import part_offsets
from symm_cp.tensors.shards import Extent, ViewAt


class Rows(NamedTuple):
    """Rows [first, first + length) of a rank's shard."""

    rank: int
    first: int
    length: int


@dataclass(frozen=True)
class PooledRows:
    """The rows of the peers of `rank`, run by run, for each tensor of a shard.

    `lengths` are the rows of each rank's tensors, `row_bytes` the bytes of a row of each tensor.
    """

    rank: int
    lengths: tuple[int, ...]
    runs: tuple[Rows, ...]
    row_bytes: tuple[int, ...]

    @cached_property
    def slot_offsets(self) -> tuple[int, ...]:
        """Where the tensors of a shard begin in a slot, and last the bytes of a slot."""
        return part_offsets([max(self.lengths) * row for row in self.row_bytes])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's pooled rows begin, and last the bytes of all."""
        return part_offsets([self.count * row for row in self.row_bytes])

    @cached_property
    def count(self) -> int:
        """The number of pooled rows."""
        return sum(run.length for run in self.runs)

    def input(self) -> tuple[Extent, ...]:
        """The own tensors: operand number i is tensor i."""
        rows = self.lengths[self.rank]
        return tuple(Extent.even(i, rows * row) for i, row in enumerate(self.row_bytes))

    def slots(self) -> dict[int, tuple[Extent, ...]]:
        """Each rank's slot: the own tensors there, and of the peers' the runs that are pulled."""
        rows = self.lengths[self.rank]
        starts = tuple(zip(self.slot_offsets, self.row_bytes, strict=False))
        found = {
            peer: tuple(
                Extent(None, (offset + run.first * row,), (run.length * row,))
                for offset, row in starts
                for _, run in runs
            )
            for peer, runs in enumerate(self._by_peer)
        }
        found[self.rank] = tuple(Extent(None, (at,), (rows * row,)) for at, row in starts)
        return found

    def pooled(self, operand: int) -> tuple[Extent, ...]:
        """The memory that the runs are pulled to: chunk p of the extents is where peer p's go."""
        found = []
        for offset, row in zip(self.offsets, self.row_bytes, strict=False):
            for runs in zip(*self._by_peer, strict=True):
                starts = tuple(offset + before * row for before, _ in runs)
                found.append(Extent(operand, starts, tuple(run.length * row for _, run in runs)))
        return tuple(found)

    @cached_property
    def _by_peer(self) -> list[list[tuple[int, Rows]]]:
        """The runs of each rank, equally many, each with the number of pooled rows before it."""
        found: list[list[tuple[int, Rows]]] = [[] for _ in self.lengths]
        before = 0
        for run in self.runs:
            found[run.rank].append((before, run))
            before += run.length
        most = max(map(len, found))
        for rank, runs in enumerate(found):
            runs += [(0, Rows(rank, 0, 0))] * (most - len(runs))
        return found

    def views(self, view_at: ViewAt, shard: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the pooled rows of each tensor, shaped as this rank's."""
        return [
            view_at(offset, (self.count, *tensor.shape[1:]), tensor.dtype)
            for offset, tensor in zip(self.offsets, shard, strict=False)
        ]


def row_bytes_of(shard: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns the bytes of a row of each tensor."""
    return tuple(math.prod(t.shape[1:]) * t.element_size() for t in shard)
