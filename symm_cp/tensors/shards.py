"""How a dimension is divided among ranks (`Split`), and where shards lie in memory (`Shards`).

All arithmetic of a call's bytes is here: parts of shards, slots, staging memory, messages.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import torch

from symm_cp.tensors.alignment import contiguous_strides, part_offsets

Shape: TypeAlias = tuple[int, ...]
#: The shapes of the tensors that make up a shard.
Shapes: TypeAlias = Sequence[Shape]
#: Returns a contiguous tensor over memory, given where it begins, its shape and its dtype.
ViewAt: TypeAlias = Callable[[int, Shape, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Split:
    """Dimension `dim` of a tensor, divided into consecutive parts: rank r has `sizes[r]` of it."""

    sizes: tuple[int, ...]
    dim: int = 0

    @classmethod
    def equal(cls, size: int, ranks: int, dim: int = 0) -> Split:
        """Every rank has a part of the same size."""
        # While a compiler traces, sizes are symbols, which have no hash.
        return _equal(size, ranks, dim) if type(size) is int else cls((size,) * ranks, dim)

    @classmethod
    def nearly_equal(cls, length: int, ranks: int, dim: int = 0) -> Split:
        """Parts differ by at most 1, the larger ones first, as with `torch.tensor_split`."""
        size, longer = divmod(length, ranks)
        return cls(tuple(size + (rank < longer) for rank in range(ranks)), dim)

    @cached_property
    def length(self) -> int:
        """The length of the whole dimension."""
        return sum(self.sizes)

    @cached_property
    def is_equal(self) -> bool:
        """Whether all parts have the same size."""
        return self.sizes.count(self.sizes[0]) == len(self.sizes)

    def start(self, rank: int) -> int:
        """Where a rank's part begins."""
        return sum(self.sizes[:rank])

    def of(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns a rank's part of a whole tensor, as a view."""
        if self.dim == 0:  # takes half the time
            begin = self.start(rank)
            return whole[begin : begin + self.sizes[rank]]
        return whole.narrow(self.dim, self.start(rank), self.sizes[rank])

    def parts(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns every rank's part of a whole tensor, as views: less work than one by one."""
        return whole.split_with_sizes(self.sizes, self.dim)

    def along(self, dim: int) -> Split:
        """The same division of another dimension."""
        if dim == self.dim:
            return self
        if self.is_equal:
            return Split.equal(self.sizes[0], len(self.sizes), dim)
        return Split(self.sizes, dim)

    def leading(self, shape: Sequence[int]) -> tuple[Split, list[int]]:
        """Moves the dimension to the front unless it is the last; also returns the whole's shape.

        Then a part is consecutive rows or columns of a matrix with the tensor's last dimension.
        """
        if self.dim == len(shape) - 1:
            return self, list(shape)
        return self.along(0), [shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :]]

    def shape_of(self, rank: int, shape: Sequence[int]) -> list[int]:
        """Returns the shape of a rank's part, given the shape of the whole or of any part."""
        return self._replaced(shape, self.sizes[rank])

    def shapes(self, shape: Sequence[int]) -> list[Shape] | None:
        """Returns the shape of every part, given the shape of any; None when all are equal."""
        if self.is_equal:
            return None
        return [tuple(self._replaced(shape, size)) for size in self.sizes]

    def shard_shapes(self, *shard: torch.Tensor) -> list[Shapes] | None:
        """Like `shapes`, for shards of one or more tensors."""
        if self.is_equal:
            return None
        return [
            tuple(tuple(self._replaced(tensor.shape, size)) for tensor in shard)
            for size in self.sizes
        ]

    def largest_shape(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the largest part, given the shape of any."""
        return self._replaced(shape, max(self.sizes))

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the whole, given the shape of any part."""
        return self._replaced(shape, self.length)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor for the whole, given any part."""
        return part.new_empty(self.whole_shape(part.shape))

    def _replaced(self, shape: Sequence[int], size: int) -> list[int]:
        replaced = list(shape)
        replaced[self.dim] = size
        return replaced


@lru_cache(maxsize=512)
def _equal(size: int, ranks: int, dim: int) -> Split:
    return Split((size,) * ranks, dim)


class ByteRows(NamedTuple):
    """A chunk of a buffer: `rows` runs of `nbytes` bytes, `pitch` bytes apart, from `offset` on."""

    offset: int
    nbytes: int
    rows: int
    pitch: int


def joint_rows(source: ByteRows, to: ByteRows) -> tuple[int, int, int, int]:
    """Returns bytes per row, rows, and the pitches of target and source, for a copy between runs.

    The side that is contiguous has its rows one after the other.
    """
    assert source.nbytes * source.rows <= to.nbytes * to.rows, (source, to)
    rows = max(source.rows, to.rows)
    nbytes = source.nbytes * source.rows // rows
    to_pitch = to.pitch if to.rows == rows else nbytes
    from_pitch = source.pitch if source.rows == rows else nbytes
    return nbytes, rows, to_pitch, from_pitch


@dataclass(frozen=True)
class Extent:
    """Where the chunks of a buffer begin, and how long they are, in bytes.

    Each chunk is `rows` runs of bytes, `pitch` apart (one run: it is contiguous). The buffer is
    the call's operand number `operand`, or the slot when that is None.
    """

    operand: int | None
    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]
    rows: int = 1
    pitch: int = 0

    @classmethod
    def even(cls, operand: int | None, nbytes: int, chunks: int = 1) -> Extent:
        """A contiguous buffer of `chunks` equal chunks, `nbytes` bytes each."""
        return cls(operand, tuple(i * nbytes for i in range(chunks)), (nbytes,) * chunks)

    @classmethod
    def consecutive(cls, operand: int | None, sizes: Sequence[int]) -> Extent:
        """A buffer whose chunks follow one another without gaps."""
        return cls(operand, tuple(itertools.accumulate((0, *sizes[:-1]))), tuple(sizes))

    @classmethod
    def aligned(cls, operand: int | None, sizes: Sequence[int]) -> Extent:
        """A buffer whose chunks kernels write or read, each of them aligned."""
        return cls(operand, part_offsets(sizes)[:-1], tuple(sizes))

    @classmethod
    def split(cls, operand: int | None, split: Split, shape: Sequence[int], item: int) -> Extent:
        """The parts of a contiguous tensor of `shape`, with `item` bytes an element."""
        rows = math.prod(shape[: split.dim])
        inner = math.prod(shape[split.dim + 1 :]) * item if rows > 0 else 0
        sizes = tuple(size * inner for size in split.sizes)
        offsets = tuple(itertools.accumulate((0, *sizes[:-1])))
        if rows <= 1:
            return cls(operand, offsets, sizes)
        return cls(operand, offsets, sizes, rows, split.length * inner)

    def run(self, chunk: int | None) -> ByteRows:
        """Returns where a chunk lies, or with None the whole buffer."""
        if chunk is None:
            offset, nbytes = self.offsets[0], sum(self.nbytes)
        else:
            offset, nbytes = self.offsets[chunk], self.nbytes[chunk]
        return ByteRows(offset, nbytes, self.rows, self.pitch or nbytes)


#: The parts of a buffer: a shard may be several tensors that travel together.
Parts: TypeAlias = tuple[Extent, ...]


@dataclass(frozen=True)
class ShardSizes:
    """The bytes of the parts of each rank's shard: `parts[rank][i]`.

    Part i begins at the same offset on all ranks, so that one place fits the shards of all ranks.
    """

    parts: tuple[tuple[int, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of the parts; the last entry is the bytes that a shard takes."""
        return part_offsets([max(sizes) for sizes in zip(*self.parts, strict=True)])

    @cached_property
    def nbytes(self) -> int:
        """The bytes that a shard takes."""
        return self.offsets[-1]

    @cached_property
    def some_empty(self) -> bool:
        """Whether a rank's shard is empty: it has no address, so no shard is read in place."""
        return not all(any(sizes) for sizes in self.parts)

    def slots(self, base: int = 0) -> dict[int, tuple[Extent, ...]]:
        """Each rank's slot when it holds a shard, from byte `base` on."""
        return {
            rank: tuple(
                Extent(None, (base + offset,), (size,))
                for offset, size in zip(self.offsets, sizes, strict=False)
            )
            for rank, sizes in enumerate(self.parts)
        }

    def places_by_rank(self, operand: int) -> tuple[Extent, ...]:
        """Memory with a place for each rank's shard: chunk r is rank r's."""
        starts = [rank * self.nbytes for rank in range(len(self.parts))]
        return tuple(
            Extent(operand, tuple(start + offset for start in starts), tuple(sizes))
            for offset, sizes in self._by_part()
        )

    def places_in_turn(self, operand: int, order: Sequence[int]) -> tuple[Extent, ...]:
        """Memory with places that any rank's shard fits: chunk c is place `order[c]`."""
        return tuple(
            Extent(
                operand,
                tuple(place * self.nbytes + offset for place in order),
                (max(sizes),) * len(order),
            )
            for offset, sizes in self._by_part()
        )

    def _by_part(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Where each part begins, and its bytes on each rank."""
        return zip(self.offsets, zip(*self.parts, strict=True), strict=False)


#: The shapes of each rank's tensors, and their dtypes.
_Layout: TypeAlias = tuple[tuple[tuple[Shape, ...], ...], tuple[torch.dtype, ...], ShardSizes]


@lru_cache(maxsize=512)
def _equal_layout(parts: tuple[tuple[Shape, torch.dtype], ...], ranks: int) -> _Layout:
    shapes, dtypes = (tuple(shape for shape, _ in parts),) * ranks, tuple(d for _, d in parts)
    return shapes, dtypes, _sizes_of(shapes, dtypes)


@lru_cache(maxsize=512)
def _sizes_of(shapes: tuple[tuple[Shape, ...], ...], dtypes: tuple[torch.dtype, ...]) -> ShardSizes:
    return ShardSizes(
        tuple(
            tuple(
                math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(rank_shapes, dtypes, strict=True)
            )
            for rank_shapes in shapes
        )
    )


class Shards:
    """The shards of all ranks in a call: this rank's tensors, and the layout of every rank's.

    A shard is one or more tensors that travel together. `shapes` are the shapes of each rank's
    tensors; without it all ranks have the shapes of this rank.
    """

    def __init__(
        self, own: Sequence[torch.Tensor], ranks: int, shapes: Sequence[Shapes] | None = None
    ) -> None:
        self.own = own
        #: Whether the own tensors can be copied as bytes.
        self.contiguous = True
        parts = []
        for tensor in own:
            parts.append((tensor.shape, tensor.dtype))
            self.contiguous = self.contiguous and tensor.is_contiguous()
        if shapes is None:
            self.shapes, self.dtypes, self.sizes = _equal_layout(tuple(parts), ranks)
        else:
            self.dtypes = tuple([dtype for _, dtype in parts])
            self.shapes = tuple(tuple(tuple(shape) for shape in parts) for parts in shapes)
            self.sizes = _sizes_of(self.shapes, self.dtypes)
        self.nbytes = self.sizes.nbytes

    def packed(self) -> Shards:
        """Returns the shards with contiguous own tensors: copy engines move runs of bytes."""
        packed = copy.copy(self)
        packed.own, packed.contiguous = [t.contiguous() for t in self.own], True
        return packed

    def views(self, rank: int, view_at: ViewAt, base: int = 0) -> list[torch.Tensor]:
        """Returns a rank's shard that lies at `base`."""
        parts = zip(self.sizes.offsets, self.shapes[rank], self.dtypes, strict=False)
        return [view_at(base + offset, shape, dtype) for offset, shape, dtype in parts]

    def pack(self, rank: int, view_at: ViewAt, base: int = 0) -> None:
        """Copies the own shard to the layout of rank `rank`'s shard at `base`."""
        for part, tensor in zip(self.views(rank, view_at, base), self.own, strict=True):
            part.copy_(tensor)


def viewing(memory: torch.Tensor) -> ViewAt:
    """Returns a function that makes tensors over parts of aligned bytes (`scratch`)."""
    numbers: dict[torch.dtype, torch.Tensor] = {}

    def view_at(offset: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        typed = numbers.get(dtype)
        if typed is None:
            rest = memory.numel() % dtype.itemsize
            typed = (memory[:-rest] if rest else memory).view(dtype)
            numbers[dtype] = typed
        begin = typed.storage_offset() + offset // dtype.itemsize
        return typed.as_strided(shape, contiguous_strides(shape), begin)

    return view_at
