"""Which heads of which positions travel from rank to rank when a sequence is exchanged for heads.

Ranks that hold part of a sequence with all heads get the whole sequence with part of the heads, or
the other way round. B batch, H heads, S positions of the sequence, E features of a head; h and s
are a rank's part of the heads and of the sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import torch

from symm_cp.results import new_result
from symm_cp.runtime.api import PlacedBox
from symm_cp.runtime.sums import wide
from symm_cp.schedule.layout import SequenceLayout, Span
from symm_cp.shards import Shape

#: The heads that each rank has, from the first to the one behind the last.
HeadRanges: TypeAlias = tuple[tuple[int, int], ...]
Tensors: TypeAlias = Sequence[torch.Tensor]


class _Fragment(NamedTuple):
    """Heads of consecutive positions that travel in one piece, to lie at byte `at` of its part."""

    piece: int
    at: int
    tensor: int
    sample: int
    heads: tuple[int, int]  # counted from the first that travels; the one behind the last
    features: tuple[int, int]
    span: Span


@dataclass(frozen=True)
class HeadExchange:
    """An exchange on one rank: `shapes` are those of the whole tensors, (B, H, S, E) each."""

    rank: int
    to_heads: bool
    layout: SequenceLayout
    shapes: tuple[Shape, ...]
    ranges: tuple[HeadRanges, ...]

    @cached_property
    def disjoint(self) -> tuple[bool, ...]:
        """Of each tensor: whether no two ranks have the same head."""
        return tuple(
            sum(end - begin for begin, end in ranges) == shape[1]
            for shape, ranges in zip(self.shapes, self.ranges, strict=True)
        )

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """How many elements each rank (first index) gives to each (second index)."""
        ranks = range(self.layout.world_size)
        return tuple(
            tuple(sum(map(math.prod, self._message(source, to))) for to in ranks)
            for source in ranks
        )

    def _message(self, source: int, to: int) -> list[Shape]:
        """The shapes of what a rank gives to another: (B, h, s, E) of each tensor."""
        of_sequence, of_heads = (source, to) if self.to_heads else (to, source)
        rows = self.layout.lengths[of_sequence]
        return [
            (batch, end - begin, rows, features)
            for (batch, _, _, features), ranges in zip(self.shapes, self.ranges, strict=True)
            for begin, end in [ranges[of_heads]]
        ]

    def _parts(self, memory: torch.Tensor, source: int, to: int) -> list[torch.Tensor]:
        shapes = self._message(source, to)
        parts = memory.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def new_outputs(self, tensors: Tensors) -> list[torch.Tensor]:
        """Returns memory for what arrives; heads that several ranks give come once from each."""
        return [
            new_result(tensor, shape) if self.to_heads else _rows_first(tensor, shape)
            for tensor, shape in zip(tensors, self._arriving_shapes, strict=True)
        ]

    @cached_property
    def _arriving_shapes(self) -> list[Shape]:
        shapes: list[Shape] = []
        for (batch, heads, length, features), ranges in zip(self.shapes, self.ranges, strict=True):
            if self.to_heads:
                begin, end = ranges[self.rank]
                heads = end - begin
            else:
                heads = sum(end - begin for begin, end in ranges)
                length = self.layout.lengths[self.rank]
            shapes.append((batch, heads, length, features))
        return shapes

    def _first_head(self, tensor: int, rank: int, *, arriving: bool) -> int:
        """Where a rank's heads begin in a tensor that has those of all ranks."""
        ranges = self.ranges[tensor]
        if not arriving or self.disjoint[tensor]:
            return ranges[rank][0]
        return sum(end - begin for begin, end in ranges[:rank])

    def _heads_of(
        self, tensors: Tensors, rank: int, *, arriving: bool = False
    ) -> Iterator[torch.Tensor]:
        """The heads of a rank in tensors that have those of all ranks."""
        for index, (tensor, ranges) in enumerate(zip(tensors, self.ranges, strict=True)):
            begin, end = ranges[rank]
            first = self._first_head(index, rank, arriving=arriving)
            yield tensor.narrow(1, first, end - begin)

    def _rows_of(
        self, parts: Tensors, wholes: Tensors, rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows of a rank's part of the sequence, and of the whole, that are the same."""
        for part, whole in zip(parts, wholes, strict=True):
            for span in self.layout.spans(rank):
                yield (
                    part.narrow(2, span.row, span.length),
                    whole.narrow(2, span.start, span.length),
                )

    def give(self, tensors: Tensors, to: int, memory: torch.Tensor) -> None:
        """Writes what goes to a rank to memory for `counts[self.rank][to]` elements."""
        message = self._parts(memory, self.rank, to)
        if self.to_heads:
            for part, given in zip(message, self._heads_of(tensors, to), strict=True):
                part.copy_(given)
            return
        for part, given in self._rows_of(message, tensors, to):
            part.copy_(given)

    def take(self, outputs: Tensors, source: int, memory: torch.Tensor) -> None:
        """Writes what a rank has given to where it belongs."""
        message = self._parts(memory, source, self.rank)
        if self.to_heads:
            for part, place in self._rows_of(message, outputs, source):
                place.copy_(part)
            return
        places = self._heads_of(outputs, source, arriving=True)
        for part, place in zip(message, places, strict=True):
            place.copy_(part)

    def keep(self, tensors: Tensors, outputs: Tensors) -> None:
        """Copies what stays on this rank."""
        if self.to_heads:
            own = list(self._heads_of(tensors, self.rank))
            for part, place in self._rows_of(own, outputs, self.rank):
                place.copy_(part)
            return
        places = list(self._heads_of(outputs, self.rank, arriving=True))
        for place, given in self._rows_of(places, tensors, self.rank):
            place.copy_(given)

    def summed(self, outputs: Tensors) -> list[torch.Tensor]:
        """Returns outputs in which heads that several ranks gave are added, in rank order."""
        if self.to_heads:
            return list(outputs)
        return [
            output if self.disjoint[index] else self._sum(index, output)
            for index, output in enumerate(outputs)
        ]

    def _sum(self, index: int, arrived: torch.Tensor) -> torch.Tensor:
        batch, _, rows, features = arrived.shape
        total = _rows_first(arrived, (batch, self.shapes[index][1], rows, features))
        dtype = wide(arrived.dtype)
        sums = total if dtype == arrived.dtype else torch.empty_like(total, dtype=dtype)
        sums.zero_()
        for rank, (begin, end) in enumerate(self.ranges[index]):
            first = self._first_head(index, rank, arriving=True)
            sums.narrow(1, begin, end - begin).add_(arrived.narrow(1, first, end - begin))
        return total if sums is total else total.copy_(sums)

    def boxes(
        self, strides: Sequence[tuple[int, ...]], item: int, room: int
    ) -> tuple[list[PlacedBox], list[PlacedBox]]:
        """What is given and taken as boxes; see `Parcels`."""
        given: list[PlacedBox] = []
        taken: list[PlacedBox] = []
        for peer in range(self.layout.world_size):
            for fragment in self._fragments(self.rank, peer, item, room):
                index = fragment.tensor
                given.append(self._box(fragment, peer, index, strides[index], item, given=True))
            for fragment in self._fragments(peer, self.rank, item, room):
                index = len(self.shapes) + fragment.tensor
                taken.append(self._box(fragment, peer, index, strides[index], item, given=False))
        return given, taken

    def _box(
        self,
        fragment: _Fragment,
        peer: int,
        operand: int,
        stride: tuple[int, ...],
        item: int,
        *,
        given: bool,
    ) -> PlacedBox:
        (first, end), (feature, last), span = fragment.heads, fragment.features, fragment.span
        row, head = span.row, first
        if given == self.to_heads:  # a tensor with all heads
            head += self._first_head(fragment.tensor, peer, arriving=not given)
        else:
            row = span.start
        corner = (fragment.sample, head, row, feature)
        offset = sum(at * step for at, step in zip(corner, stride, strict=True)) * item
        shape = (end - first, stride[1] * item, span.length, stride[2] * item)
        place = (peer, fragment.piece, operand, offset, fragment.at)
        return PlacedBox(*place, *shape, (last - feature) * item)

    def _fragments(self, source: int, to: int, item: int, room: int) -> list[_Fragment]:
        """What a rank gives to another, in the order in which it lies in the pieces."""
        of_sequence = source if self.to_heads else to
        fragments: list[_Fragment] = []
        piece = at = 0
        for index, (batch, heads, _, features) in enumerate(self._message(source, to)):
            columns = _ranges(features, room // item)
            parts = [
                (sample, group, column)
                for sample in range(batch)
                for column in columns
                for group in _ranges(heads, room // (item * max(1, column[1] - column[0])))
            ]
            for (sample, group, column), span in itertools.product(
                parts, self.layout.spans(of_sequence)
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
                    at += -(-length * row // _ALIGNMENT) * _ALIGNMENT
        return fragments


_ALIGNMENT = 64  # of fragments


def _ranges(count: int, most: int) -> list[tuple[int, int]]:
    """Divides a count into ranges of at most `most`; none of nothing."""
    return [(begin, min(begin + most, count)) for begin in range(0, count, max(1, most))]


def _rows_first(like: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Returns an empty tensor in which the heads of a position are one run of memory."""
    batch, heads, rows, features = shape
    return new_result(like, (batch, rows, heads, features)).transpose(1, 2)


@lru_cache(maxsize=512)
def head_exchange(
    rank: int,
    to_heads: bool,
    layout: SequenceLayout,
    shapes: tuple[Shape, ...],
    ranges: tuple[HeadRanges, ...],
) -> HeadExchange:
    """Returns an exchange, made once."""
    return HeadExchange(rank, to_heads, layout, shapes, ranges)
