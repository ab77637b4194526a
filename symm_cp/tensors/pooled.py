"""The layout of the rows of all peers of a rank in its memory, in the order of the sequence.

A shard is one or more tensors, whose rows are positions of a sequence that a layout spreads. The
rows of the peers are *pooled* run by run, as `held_by_others` lists them: first all rows of the
first tensor, then all rows of the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import held_by_others
from symm_cp.tensors.alignment import part_offsets
from symm_cp.tensors.shards import Extent, Parts, ViewAt


class RowRange(NamedTuple):
    """Rows [first, first + length) of a rank, and the number of pooled rows before them."""

    first: int
    length: int
    before: int


_NOTHING = RowRange(0, 0, 0)


@dataclass(frozen=True)
class PooledRows:
    """The rows of the peers of a rank; `row_bytes` are the bytes of a row of each tensor."""

    rank: int
    layout: SequenceLayout
    row_bytes: tuple[int, ...]

    def of(self, rank: int) -> PooledRows:
        """The pooled rows of another rank."""
        return pooled_rows(rank, self.layout, self.row_bytes)

    @cached_property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.layout.world_size)

    @cached_property
    def own_rows(self) -> int:
        """The number of this rank's rows."""
        return self.layout.lengths[self.rank]

    @cached_property
    def count(self) -> int:
        """The number of pooled rows."""
        return self.layout.length - self.own_rows

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor's pooled rows; the last entry is the bytes of all."""
        return part_offsets([self.count * row for row in self.row_bytes])

    @cached_property
    def slot_offsets(self) -> tuple[int, ...]:
        """The offsets of a shard's tensors in a slot; the last entry is the bytes of a slot."""
        return part_offsets([max(self.layout.lengths) * row for row in self.row_bytes])

    @cached_property
    def runs(self) -> tuple[tuple[RowRange, ...], ...]:
        """The runs of each rank, padded with empty runs to one count; this rank's are all empty."""
        found: list[list[RowRange]] = [[] for _ in self.ranks]
        before = 0
        for owner, span in held_by_others(self.layout, self.rank):
            found[owner].append(RowRange(span.row, span.length, before))
            before += span.length
        most = max(len(self.layout.spans(rank)) for rank in self.ranks)
        return tuple((*runs, *(_NOTHING,) * (most - len(runs))) for runs in found)

    def input(self) -> Parts:
        """The own tensors: operand number i is tensor i."""
        return tuple(Extent.even(i, self.own_rows * row) for i, row in enumerate(self.row_bytes))

    def slots(self) -> dict[int, Parts]:
        """Each rank's slot: tensors in this rank's slot, runs to pull in the peers' slots."""
        starts = tuple(zip(self.slot_offsets, self.row_bytes, strict=False))
        found = {
            peer: tuple(
                Extent(None, (offset + run.first * row,), (run.length * row,))
                for offset, row in starts
                for run in runs
            )
            for peer, runs in enumerate(self.runs)
        }
        found[self.rank] = tuple(Extent(None, (at,), (self.own_rows * row,)) for at, row in starts)
        return found

    def pooled(self, operand: int | None) -> Parts:
        """The memory to which runs are pulled: chunk p of each extent receives runs of peer p."""
        return tuple(
            Extent(
                operand,
                tuple(offset + run.before * row for run in runs),
                tuple(run.length * row for run in runs),
            )
            for offset, row in zip(self.offsets, self.row_bytes, strict=False)
            for runs in zip(*self.runs, strict=True)
        )

    def views(
        self, view_at: ViewAt, shard: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Returns the pooled rows of each tensor, shaped as its rows, by default of its dtype."""
        return [
            view_at(offset, (self.count, *tensor.shape[1:]), dtype or tensor.dtype)
            for offset, tensor in zip(self.offsets, shard, strict=False)
        ]


@lru_cache(maxsize=512)
def pooled_rows(rank: int, layout: SequenceLayout, row_bytes: tuple[int, ...]) -> PooledRows:
    """Returns the object for these arguments, made once because it caches its properties."""
    return PooledRows(rank, layout, row_bytes)


@dataclass(frozen=True)
class PooledSums:
    """A slot with the gradients of all pooled rows, followed by the own shard as chunk W.

    `sums` are the gradients' rows, in their dtype.
    """

    shard: PooledRows
    sums: PooledRows

    @cached_property
    def shard_at(self) -> int:
        """Where the shard begins in every rank's slot."""
        return max(self.sums.of(rank).offsets[-1] for rank in self.sums.ranks)

    @cached_property
    def slot_bytes(self) -> int:
        """The bytes of a slot."""
        return self.shard_at + self.shard.slot_offsets[-1]

    def slots(self) -> dict[int, Parts]:
        """Each rank's slot: the chunks that this rank pulls, and its own shard."""
        shards = self.shard.slots()
        return {rank: self._slot(rank, shards[rank]) for rank in self.sums.ranks}

    def _slot(self, rank: int, shard: Parts) -> Parts:
        nothing = (0,) * len(self.sums.ranks)
        # No sums are copied from this rank's own slot; its shard has a part for each tensor.
        own = (Extent(None, nothing, nothing),) * len(shard)
        sums = own if rank == self.shard.rank else self.sums.of(rank).pooled(None)
        return tuple(
            Extent(
                None,
                (*of_sums.offsets, self.shard_at + of_shard.offsets[0]),
                (*of_sums.nbytes, of_shard.nbytes[0]),
            )
            for of_sums, of_shard in zip(sums, shard, strict=True)
        )

    def partials(self, operand: int) -> Parts:
        """Memory for the gradients of this rank's rows from each rank: chunk r is from rank r."""
        sums, rank = self.sums, self.sums.rank
        tensors = [sums.own_rows * row for row in sums.row_bytes]
        rows = part_offsets([sum(tensors)] * len(sums.ranks))[:-1]
        # The runs of this rank, in the order in which every peer has pooled them.
        runs = sums.of((rank + 1) % len(sums.ranks)).runs[rank]
        return tuple(
            Extent(
                operand,
                tuple(at + begin + run.first * row for at in rows),
                (run.length * row,) * len(rows),
            )
            for begin, row in zip(itertools.accumulate((0, *tensors)), sums.row_bytes, strict=False)
            for run in runs
        )


def row_bytes_of(
    shard: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Returns the bytes of a row of each tensor, in `dtype` if given."""
    return tuple(math.prod(tensor.shape[1:]) * (dtype or tensor.dtype).itemsize for tensor in shard)
