"""The heads and positions that each rank sends to each, and where they lie on both sides.

Ranks that hold part of a sequence with all heads get the whole sequence with part of the heads, or
the other way round. B batch, H heads, S positions of the sequence, E features of a head; h and s
are a rank's part of the heads and of the sequence. A message holds for each tensor (B, h, s, E):
heads of its receiver and positions of its sender, or the reverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import torch

from symm_cp.runtime.calls import PlacedBox
from symm_cp.schedule.layout import SequenceLayout, Span
from symm_cp.tensors.alignment import padded, part_offsets
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Shape, viewing

#: Each rank's heads, as (first, last + 1).
HeadRanges: TypeAlias = tuple[tuple[int, int], ...]
Tensors: TypeAlias = Sequence[torch.Tensor]


class _Fragment(NamedTuple):
    """Heads of consecutive positions in one piece of a message, at byte `at` of the peer's part."""

    piece: int
    at: int
    tensor: int
    sample: int
    heads: tuple[int, int]  # first and last + 1, counted from the first in the message
    features: tuple[int, int]
    span: Span


@dataclass(frozen=True)
class HeadPart:
    """A tensor to exchange: the layout of its positions, and the heads of each rank.

    `shape` is the shape of the whole tensor, (B, H, S, E).
    """

    shape: Shape
    dtype: torch.dtype
    layout: SequenceLayout
    ranges: HeadRanges

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two ranks have the same head."""
        held = [head for begin, end in self.ranges for head in range(begin, end)]
        return len(held) == len(set(held))

    def heads(self, rank: int) -> int:
        """The number of a rank's heads."""
        begin, end = self.ranges[rank]
        return end - begin

    def arriving_shape(self, rank: int, *, to_heads: bool) -> Shape:
        """The shape of a rank's result; heads that several ranks send come once from each."""
        batch, heads, length, features = self.shape
        if to_heads:
            return batch, self.heads(rank), length, features
        if not self.disjoint:
            heads = sum(end - begin for begin, end in self.ranges)
        return batch, heads, self.layout.lengths[rank], features

    def first_head(self, rank: int, *, arriving: bool) -> int:
        """Where a rank's heads begin in a tensor with the heads of all ranks."""
        if not arriving or self.disjoint:
            return self.ranges[rank][0]
        return sum(end - begin for begin, end in self.ranges[:rank])

    def heads_of(self, whole: torch.Tensor, rank: int, *, arriving: bool = False) -> torch.Tensor:
        """The heads of a rank, in a tensor with the heads of all ranks."""
        first = self.first_head(rank, arriving=arriving)
        return whole.narrow(1, first, self.heads(rank))

    def rows_of(
        self, part: torch.Tensor, whole: torch.Tensor, rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields matching rows of a rank's part of the sequence and of the whole sequence."""
        for span in self.layout.spans(rank):
            yield part.narrow(2, span.row, span.length), whole.narrow(2, span.start, span.length)

    def summed(self, arrived: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the heads that several ranks sent, added in rank order."""
        batch, _, rows, features = arrived.shape
        total = rows_first(arrived, (batch, self.shape[1], rows, features))
        dtype = wide(arrived.dtype)
        sums = total if dtype == arrived.dtype else torch.empty_like(total, dtype=dtype)
        sums.zero_()
        for rank, (begin, end) in enumerate(self.ranges):
            heads = self.heads_of(arrived, rank, arriving=True)
            sums.narrow(1, begin, end - begin).add_(heads)
        return total if sums is total else total.copy_(sums)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """An exchange of several tensors on one rank; `head_exchange` caches equal ones."""

    rank: int
    to_heads: bool
    parts: tuple[HeadPart, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.parts[0].ranges)

    @property
    def joins(self) -> bool:
        """See `PackedBoxes`: the heads of all ranks end up side by side."""
        return not self.to_heads

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The bytes of the message from each rank (first index) to each (second index)."""
        ranks = range(self.world_size)
        return tuple(tuple(self.offsets(source, to)[-1] for to in ranks) for source in ranks)

    def _message(self, source: int, to: int) -> list[Shape]:
        """The shapes of the tensors in a message: (B, h, s, E) of each."""
        of_sequence, of_heads = (source, to) if self.to_heads else (to, source)
        return [
            (part.shape[0], part.heads(of_heads), part.layout.lengths[of_sequence], part.shape[3])
            for part in self.parts
        ]

    def offsets(self, source: int, to: int) -> tuple[int, ...]:
        """Where the tensors begin in a message, then the message's bytes."""
        shapes = self._message(source, to)
        parts = zip(shapes, self.parts, strict=True)
        return part_offsets([math.prod(shape) * part.dtype.itemsize for shape, part in parts])

    def _tensors(self, memory: torch.Tensor, source: int, to: int) -> list[torch.Tensor]:
        """Returns the tensors in a message."""
        view_at, shapes = viewing(memory), self._message(source, to)
        parts = zip(self.offsets(source, to), shapes, self.parts, strict=False)
        return [view_at(begin, shape, part.dtype) for begin, shape, part in parts]

    def _copy(
        self, part: HeadPart, sent: torch.Tensor, tensor: torch.Tensor, peer: int, *, given: bool
    ) -> None:
        """Copies a peer's part of a tensor to `sent`; unless `given`, copies `sent` to it."""
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
        if given == self.to_heads:  # a tensor with all heads
            pairs = [(sent, part.heads_of(tensor, peer, arriving=not given))]
        else:
            pairs = part.rows_of(sent, tensor, peer)
        for there, here in pairs:
            target, source = (there, here) if given else (here, there)
            target.copy_(source)

    def new_outputs(self, tensors: Tensors) -> list[torch.Tensor]:
        """Returns memory for the results; heads that several ranks send come once from each."""
        new = new_result if self.to_heads else rows_first
        return [
            new(tensor, part.arriving_shape(self.rank, to_heads=self.to_heads))
            for tensor, part in zip(tensors, self.parts, strict=True)
        ]

    def give(self, tensors: Tensors, to: int, memory: torch.Tensor) -> None:
        """Writes the message for a rank to memory of `sizes[self.rank][to]` bytes."""
        message = self._tensors(memory, self.rank, to)
        for part, sent, tensor in zip(self.parts, message, tensors, strict=True):
            self._copy(part, sent, tensor, to, given=True)

    def take(self, outputs: Tensors, source: int, memory: torch.Tensor) -> None:
        """Copies the tensors in a rank's message to their places."""
        message = self._tensors(memory, source, self.rank)
        for part, sent, output in zip(self.parts, message, outputs, strict=True):
            self._copy(part, sent, output, source, given=False)

    def keep(self, tensors: Tensors, outputs: Tensors) -> None:
        """Copies this rank's own part directly from the tensors to the outputs."""
        rank = self.rank
        for part, tensor, output in zip(self.parts, tensors, outputs, strict=True):
            if self.to_heads:
                self._copy(part, part.heads_of(tensor, rank), output, rank, given=False)
            else:
                own = part.heads_of(output, rank, arriving=True)
                self._copy(part, own, tensor, rank, given=True)

    def summed(self, outputs: Tensors) -> list[torch.Tensor]:
        """Returns outputs in which heads that several ranks sent are added, in rank order."""
        return [
            output if self.to_heads or part.disjoint else part.summed(output)
            for part, output in zip(self.parts, outputs, strict=True)
        ]

    def boxes(
        self, strides: Sequence[tuple[int, ...]], room: int
    ) -> tuple[list[PlacedBox], list[PlacedBox]]:
        """See `PackedBoxes`."""
        given: list[PlacedBox] = []
        taken: list[PlacedBox] = []
        for peer in range(self.world_size):
            for fragment in self._fragments(self.rank, peer, room):
                index = fragment.tensor
                given.append(self._box(fragment, peer, index, strides[index], given=True))
            for fragment in self._fragments(peer, self.rank, room):
                index = len(self.parts) + fragment.tensor
                taken.append(self._box(fragment, peer, index, strides[index], given=False))
        return given, taken

    def _box(
        self, fragment: _Fragment, peer: int, operand: int, stride: tuple[int, ...], *, given: bool
    ) -> PlacedBox:
        part = self.parts[fragment.tensor]
        item = part.dtype.itemsize
        (first, end), (feature, last), span = fragment.heads, fragment.features, fragment.span
        row, head = span.row, first
        if given == self.to_heads:  # a tensor with all heads
            head += part.first_head(peer, arriving=not given)
        else:
            row = span.start
        corner = (fragment.sample, head, row, feature)
        offset = sum(at * step for at, step in zip(corner, stride, strict=True)) * item
        shape = (end - first, stride[1] * item, span.length, stride[2] * item)
        place = (peer, fragment.piece, operand, offset, fragment.at)
        return PlacedBox(*place, *shape, (last - feature) * item)

    def _fragments(self, source: int, to: int, room: int) -> list[_Fragment]:
        """Divides a message into fragments, in the order in which they lie in its pieces."""
        of_sequence = source if self.to_heads else to
        fragments: list[_Fragment] = []
        piece = at = 0
        for index, (batch, heads, _, features) in enumerate(self._message(source, to)):
            item, layout = self.parts[index].dtype.itemsize, self.parts[index].layout
            columns = _ranges(features, room // item)
            parts = [
                (sample, group, column)
                for sample in range(batch)
                for column in columns
                for group in _ranges(heads, room // (item * max(1, column[1] - column[0])))
            ]
            for (sample, group, column), span in itertools.product(
                parts, layout.spans(of_sequence)
            ):
                row = (group[1] - group[0]) * (column[1] - column[0]) * item
                done = 0
                while done < span.length:
                    if at + row > room:
                        piece, at = piece + 1, 0
                    length = min(span.length - done, (room - at) // row)
                    part = Span(span.start + done, length, span.row + done)
                    fragments.append(_Fragment(piece, at, index, sample, group, column, part))
                    done += length
                    at += padded(length * row)
        return fragments


def _ranges(count: int, most: int) -> list[tuple[int, int]]:
    """Divides a count into ranges of at most `most`; 0 into no ranges."""
    return [(begin, min(begin + most, count)) for begin in range(0, count, max(1, most))]


def rows_first(like: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Returns an empty tensor in which the heads of a position are one run of memory."""
    batch, heads, rows, features = shape
    return new_result(like, (batch, rows, heads, features)).transpose(1, 2)


@lru_cache(maxsize=512)
def head_exchange(rank: int, to_heads: bool, parts: tuple[HeadPart, ...]) -> HeadExchange:
    """Returns an exchange, cached by its arguments."""
    return HeadExchange(rank, to_heads, parts)
