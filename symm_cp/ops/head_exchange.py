"""Which heads of which positions travel from rank to rank when sequences are exchanged for heads.

Ranks that hold part of a sequence with all heads get the whole sequence with part of the heads, or
the other way round. B batch, H heads, S positions of the sequence, E features of a head; h and s
are a rank's part of the heads and of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from symm_cp.results import new_result
from symm_cp.runtime.sums import wide
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.shards import Shape

#: The heads that each rank has, from the first to the one behind the last.
HeadRanges: TypeAlias = tuple[tuple[int, int], ...]


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

    def message(self, source: int, to: int) -> list[Shape]:
        """The shapes of the parts that a rank gives to another: (B, h, s, E) of each tensor."""
        of_sequence, of_heads = (source, to) if self.to_heads else (to, source)
        rows = self.layout.lengths[of_sequence]
        return [
            (batch, end - begin, rows, features)
            for (batch, _, _, features), ranges in zip(self.shapes, self.ranges, strict=True)
            for begin, end in [ranges[of_heads]]
        ]

    def new_outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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

    def _first_heads(self, tensor: int, rank: int) -> int:
        """Where the heads that a rank gives begin in what arrives."""
        ranges = self.ranges[tensor]
        if self.disjoint[tensor]:
            return ranges[rank][0]
        return sum(end - begin for begin, end in ranges[:rank])

    def _of_sequence(
        self, tensors: Sequence[torch.Tensor], rank: int, *, arriving: bool
    ) -> Iterator[torch.Tensor]:
        """This rank's positions of the heads of a rank."""
        for index, (tensor, ranges) in enumerate(zip(tensors, self.ranges, strict=True)):
            begin, end = ranges[rank]
            first = self._first_heads(index, rank) if arriving else begin
            yield tensor.narrow(1, first, end - begin)

    def give(
        self, tensors: Sequence[torch.Tensor], to: int, message: Sequence[torch.Tensor]
    ) -> None:
        """Writes what goes to a rank to `message`, of the shapes of `self.message`."""
        if self.to_heads:
            for part, given in zip(
                message, self._of_sequence(tensors, to, arriving=False), strict=True
            ):
                part.copy_(given)
            return
        for part, tensor in zip(message, tensors, strict=True):
            for span in self.layout.spans(to):
                rows = tensor.narrow(2, span.start, span.length)
                part.narrow(2, span.row, span.length).copy_(rows)

    def take(
        self, outputs: Sequence[torch.Tensor], source: int, message: Sequence[torch.Tensor]
    ) -> None:
        """Writes what a rank gives to where it belongs in `outputs`."""
        if not self.to_heads:
            for part, place in zip(
                message, self._of_sequence(outputs, source, arriving=True), strict=True
            ):
                place.copy_(part)
            return
        for part, output in zip(message, outputs, strict=True):
            for span in self.layout.spans(source):
                rows = part.narrow(2, span.row, span.length)
                output.narrow(2, span.start, span.length).copy_(rows)

    def summed(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns outputs in which heads that several ranks gave are added, in rank order."""
        if self.to_heads:
            return list(outputs)
        return [
            output if self.disjoint[index] else self._sum(index, output)
            for index, output in enumerate(outputs)
        ]

    def _sum(self, index: int, arrived: torch.Tensor) -> torch.Tensor:
        batch, _, rows, features = arrived.shape
        shape = (batch, self.shapes[index][1], rows, features)
        total = _rows_first(arrived, shape)
        dtype = wide(arrived.dtype)
        sums = total if dtype == arrived.dtype else torch.empty_like(total, dtype=dtype)
        sums.zero_()
        for rank, (begin, end) in enumerate(self.ranges[index]):
            part = arrived.narrow(1, self._first_heads(index, rank), end - begin)
            sums.narrow(1, begin, end - begin).add_(part)
        return total if sums is total else total.copy_(sums)


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
