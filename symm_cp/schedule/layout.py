"""Layouts of a sequence: which chunks each rank holds, and in which order.

A sequence is cut into chunks, numbered in sequence order. `chunk_order` lists the chunks of rank 0,
then the chunks of rank 1, and so on, the same number for each rank; `chunk_lengths[c]` is the
length of chunk c. Chunks may be empty, so a sequence of any length can be spread over any number of
ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Span:
    """`length` consecutive positions from `start`, held in consecutive rows from `row`."""

    start: int
    length: int
    row: int


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence is spread over ranks. Raises `ValueError` for inconsistent arguments."""

    world_size: int
    chunk_order: tuple[int, ...]
    chunk_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        chunks, ranks = len(self.chunk_order), self.world_size
        if ranks < 1:
            raise ValueError(f"world_size={ranks} must be at least 1")
        if chunks == 0 or chunks % ranks != 0:
            raise ValueError(
                f"chunk_order has {chunks} chunks, must have a positive multiple of world size "
                f"{ranks} (chunks may be empty)"
            )
        if sorted(self.chunk_order) != list(range(chunks)):
            raise ValueError(
                f"chunk_order={_shown(self.chunk_order)} must be a permutation of 0..{chunks - 1}"
            )
        if len(self.chunk_lengths) != chunks:
            raise ValueError(
                f"chunk_lengths has {len(self.chunk_lengths)} entries for {chunks} chunks, must "
                "have one for each chunk"
            )
        if min(self.chunk_lengths) < 0:
            raise ValueError(f"chunk_lengths={_shown(self.chunk_lengths)} must not be negative")

    @cached_property
    def length(self) -> int:
        """The length of the whole sequence."""
        return sum(self.chunk_lengths)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(
            sum(self.chunk_lengths[chunk] for chunk in self.chunks(rank))
            for rank in range(self.world_size)
        )

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, in the order of its rows."""
        each = len(self.chunk_order) // self.world_size
        return self.chunk_order[rank * each : (rank + 1) * each]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.chunk_lengths))

    @cached_property
    def _spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(tuple(self._joined(rank)) for rank in range(self.world_size))

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The maximal runs of consecutive positions that a rank holds, in the order of its rows."""
        return self._spans[rank]

    def _joined(self, rank: int) -> Iterator[Span]:
        start = length = row = 0
        for chunk in self.chunks(rank):
            if self.chunk_lengths[chunk] == 0:
                continue
            if length and self._starts[chunk] != start + length:
                yield Span(start, length, row)
                row += length
                length = 0
            if length == 0:
                start = self._starts[chunk]
            length += self.chunk_lengths[chunk]
        if length:
            yield Span(start, length, row)

    def positions(self, rank: int) -> Iterator[int]:
        """The position in the sequence of each row of a rank."""
        for span in self.spans(rank):
            yield from range(span.start, span.start + span.length)


def _shown(numbers: tuple[int, ...]) -> str:
    text = ", ".join(map(str, numbers[:16]))
    return f"[{text}, ...]" if len(numbers) > 16 else f"[{text}]"


def even_lengths(length: int, chunks: int) -> tuple[int, ...]:
    """Splits a length into chunks whose lengths differ by at most 1, longer ones first."""
    if length < 0:
        raise ValueError(f"{length=} must not be negative")
    each, more = divmod(length, chunks)
    return (each + 1,) * more + (each,) * (chunks - more)


def sequential(length: int, world_size: int) -> SequenceLayout:
    """Rank r holds the r-th part of the sequence."""
    return SequenceLayout(world_size, tuple(range(world_size)), even_lengths(length, world_size))


def head_tail_order(world_size: int) -> tuple[int, ...]:
    """The chunks of rank 0, of rank 1, ...: chunk r and, from the end, chunk 2W-1-r."""
    return tuple(chunk for rank in range(world_size) for chunk in (rank, 2 * world_size - 1 - rank))


def head_tail(length: int, world_size: int) -> SequenceLayout:
    """Rank r holds chunks r and 2W-1-r of 2W: equal work for all ranks under a causal mask.

    Source: the zigzag layout of ring-flash-attention, torch's `_HeadTailLoadBalancer`.
    """
    return SequenceLayout(
        world_size, head_tail_order(world_size), even_lengths(length, 2 * world_size)
    )


def among(layout: SequenceLayout, ranks: Sequence[int]) -> SequenceLayout:
    """The layout of some ranks' chunks over these ranks; positions count in these chunks only."""
    chunks = sorted(chunk for rank in ranks for chunk in layout.chunks(rank))
    order = [chunks.index(chunk) for rank in ranks for chunk in layout.chunks(rank)]
    return SequenceLayout(
        len(ranks), tuple(order), tuple(layout.chunk_lengths[chunk] for chunk in chunks)
    )


def pooled(layout: SequenceLayout, members: Sequence[Sequence[int]]) -> SequenceLayout:
    """The layout of a sequence over teams of equal size; each holds its part in sequence order."""
    order = (
        chunk
        for ranks in members
        for chunk in sorted(chunk for rank in ranks for chunk in layout.chunks(rank))
    )
    return SequenceLayout(len(members), tuple(order), layout.chunk_lengths)


def in_a_row(layouts: Sequence[SequenceLayout]) -> SequenceLayout:
    """The layout of sequences that follow one another as one sequence.

    A rank holds its part of the first, then of the second, and so on. All are spread over the
    same ranks.
    """
    if len(layouts) == 1:
        return layouts[0]
    begins = itertools.accumulate((len(each.chunk_order) for each in layouts), initial=0)
    numbered = list(zip(begins, layouts, strict=False))
    ranks = range(layouts[0].world_size)
    order = (begin + c for rank in ranks for begin, each in numbered for c in each.chunks(rank))
    lengths = (length for each in layouts for length in each.chunk_lengths)
    return SequenceLayout(len(ranks), tuple(order), tuple(lengths))


def held_layout(op: str, held: Sequence[int], local_length: int) -> int:
    """Returns which of several sequences a shard of `local_length` positions belongs to.

    `held` lists how many positions of each sequence this rank has, all different.
    """
    for index, length in enumerate(held):
        if length == local_length:
            return index
    raise ValueError(
        f"{op}: this rank has {local_length} positions, but the load balancers give it "
        f"{_shown(tuple(held))}"
    )
