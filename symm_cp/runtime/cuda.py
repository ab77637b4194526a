"""Pipelines on CUDA: copy engines pull peers' shards ahead of the kernels that consume them.

The same functions as runtime/cpu.py. The caller's stream computes; a second stream moves bytes and
exchanges signals, without a multiprocessor. A call begins where the caller's stream is, and that
stream waits for its end, so memory that it allocates needs no further care.

While a CUDA graph is captured, ops take another workspace (device.py) and read nothing in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from symm_cp.alignment import part_offsets, scratch, scratch_rows
from symm_cp.devices import (
    Device,
    DeviceWorkspace,
    device_for,
    is_whole,
    symmetric_addresses,
    workspace,
)
from symm_cp.memory import Group
from symm_cp.runtime.agreement import agree
from symm_cp.runtime.cpu import Consume, Shapes
from symm_cp.runtime.launch import Kernel, Launch, lower
from symm_cp.runtime.program import Extent
from symm_cp.runtime.reduce import add_rows
from symm_cp.schedule import staged
from symm_cp.schedule.builders import peers

# From this many ranks on, shards that nobody keeps are pulled into two places in turn.
_BOUNDED_FROM = 4


@dataclass(frozen=True)
class Mode:
    """How calls are carried out now, as far as their lowering depends on it."""

    slots: int
    by_kernels: bool

    @classmethod
    def of(cls, device: Device) -> Mode:
        """Returns the mode of the current stream of a device."""
        return cls(1 if device.capturing() else 2, not device.signals_by_stream())


@dataclass(frozen=True)
class Sizes:
    """The bytes of the parts of each rank's shard; a part begins at the same place on all ranks."""

    parts: tuple[tuple[int, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the parts begin, and behind them the room that a shard takes."""
        return part_offsets([max(sizes) for sizes in zip(*self.parts, strict=True)])

    def slots(self) -> dict[int, tuple[Extent, ...]]:
        """Each rank's slot when it holds a shard."""
        return {
            rank: tuple(
                Extent(None, (offset,), (size,))
                for offset, size in zip(self.offsets, sizes, strict=False)
            )
            for rank, sizes in enumerate(self.parts)
        }

    def pulled(self, operand: int, bounded: bool) -> list[Extent]:
        """Where shards are pulled to: each to its own place, or `bounded` to two in turn."""
        room = self.offsets[-1]
        extents = []
        for offset, sizes in zip(self.offsets, zip(*self.parts, strict=True), strict=False):
            places = (max(sizes),) * 2 if bounded else sizes
            starts = tuple(index * room + offset for index in range(len(places)))
            extents.append(Extent(operand, starts, places))
        return extents


class Shard:
    """This rank's shard, and the shapes of all ranks'."""

    def __init__(self, own: Sequence[torch.Tensor], shapes: Sequence[Shapes] | None, ranks: int):
        # Copy engines move runs of bytes.
        self.own = [t.contiguous() for t in own]
        like = tuple(tuple(t.shape) for t in own)
        self.shapes = tuple((like,) * ranks if shapes is None else shapes)
        self.dtypes = tuple(t.dtype for t in own)
        self.sizes = Sizes(
            tuple(
                tuple(
                    math.prod(shape) * dtype.itemsize
                    for shape, dtype in zip(rank_shapes, self.dtypes, strict=True)
                )
                for rank_shapes in self.shapes
            )
        )
        self.room = self.sizes.offsets[-1]

    def addresses(self) -> list[int]:
        """Where the parts of the own shard are."""
        return [t.data_ptr() for t in self.own]

    def staging(self, places: int) -> torch.Tensor:
        """Memory for the shards of peers."""
        return scratch(self.own[0], max(1, places * self.room))

    def views(self, staging: torch.Tensor, place: int, rank: int) -> list[torch.Tensor]:
        """The shard of a rank, in a place of the staging memory."""
        tensors = zip(self.sizes.offsets, self.shapes[rank], self.dtypes, strict=False)
        base = place * self.room
        return [_view(staging, base + offset, shape, dtype) for offset, shape, dtype in tensors]


def _view(
    memory: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(tuple(shape))


@contextmanager
def _call(group: Group, device: Device, slot_bytes: int) -> Iterator[tuple[DeviceWorkspace, int]]:
    with group.lock, device.guard():
        space = workspace(group, device, "sync", slot_bytes)
        yield space, space.next_epoch()


def peers_in_place(
    group: Group, device: Device, shard: Sequence[torch.Tensor], mode: Mode, what: bytes
) -> tuple[int, ...] | None:
    """Where the peers' shards are, if they can be read there; the first thing that a call does."""
    agree(group, what)
    addresses = None
    if len(shard) == 1 and mode.slots > 1 and is_whole(device, shard[0], group):
        addresses = symmetric_addresses(shard[0], group)
    agree(group, what + (b" by way of a slot" if addresses is None else b" of symmetric memory"))
    return addresses


@dataclass(frozen=True)
class _Kept:
    """The caller's own place for the first part of all shards: rows, or column blocks of `rows`."""

    rows: int
    columns: bool

    def extent(self, operand: int, nbytes: int, ranks: int) -> Extent:
        if not self.columns:
            return Extent.even(operand, nbytes, ranks)
        row = nbytes // max(1, self.rows)
        starts = tuple(rank * row for rank in range(ranks))
        return Extent(operand, starts, (row,) * ranks, rows=max(1, self.rows), pitch=row * ranks)


@lru_cache(maxsize=512)
def _gather_launch(
    rank: int, sizes: Sizes, mode: Mode, in_place: bool, bounded: bool, kept: _Kept | None
) -> Launch:
    ranks, own = len(sizes.parts), sizes.parts[rank]
    schedule = staged.gather_and_consume(
        rank, ranks, in_place=in_place, bounded=bounded, keep=kept is not None, slots=mode.slots
    )
    # Operands: the parts of the own shard, the staging memory, the caller's own place, and in place
    # the tensors of all ranks.
    gathered = sizes.pulled(len(own), bounded)
    if kept is not None:
        gathered[0] = kept.extent(len(own) + 1, own[0], ranks)
    binding = {
        "input": tuple(Extent.even(i, size) for i, size in enumerate(own)),
        "gathered": tuple(gathered),
        "symmetric": (Extent.even(len(own) + 2, own[0]),),
    }
    return lower(schedule, binding, sizes.slots(), by_kernels=mode.by_kernels)


def all_gather_and_consume(
    group: Group,
    shard: Sequence[torch.Tensor],
    consume: Consume,
    what: bytes,
    *,
    shapes: Sequence[Shapes] | None = None,
    gathered: torch.Tensor | None = None,
    columns: bool = False,
) -> None:
    """Calls `consume(shards of rank r, r)` for each rank, one's own first, the others as they come.

    As `cpu.all_gather_and_consume`; the peers' shards are pulled to `gathered` where it is given
    (as column blocks `consume` gets them as they lie there), else to staging memory.
    """
    ranks, rank = group.world_size, group.rank
    device = device_for(group, shard[0].device)
    mode = Mode.of(device)
    addresses = peers_in_place(group, device, shard, mode, what)
    mine = Shard(shard, shapes, ranks)
    kept = None if gathered is None else _Kept(shard[0].shape[0] if columns else 1, columns)
    even = len(set(mine.sizes.parts)) == 1
    bounded = gathered is None and even and ranks >= _BOUNDED_FROM
    launch = _gather_launch(rank, mine.sizes, mode, addresses is not None, bounded, kept)
    turns = {peer: turn for turn, peer in enumerate(peers(rank, ranks))}
    # Where the first part is kept, the others come to lie in staging memory, one's own too.
    needs_staging = len(mine.own) > 1 if gathered is not None else ranks > 1
    staging = mine.staging((2 if bounded else ranks) if needs_staging else 0)
    if gathered is not None:
        places = gathered.chunk(ranks, 1 if columns else 0)

    def run_consume(source: int) -> None:
        if source == rank:
            consume(mine.own, rank)
            return
        if needs_staging:
            parts = mine.views(staging, turns[source] % 2 if bounded else source, source)
        if gathered is not None:
            parts = [places[source], *(parts[1:] if needs_staging else ())]
        consume(parts, source)

    operands = [*mine.addresses(), staging.data_ptr()]
    operands += [0 if gathered is None else gathered.data_ptr(), *(addresses or ())]
    with _call(group, device, 0 if addresses is not None else mine.room) as (space, epoch):
        kernels: dict[str, Kernel] = {"consume": run_consume}
        launch.run(space, epoch, operands, kernels, capturing=mode.slots == 1, what=what)


@lru_cache(maxsize=512)
def _combine_launch(rank: int, sizes: Sizes, mode: Mode, in_place: bool) -> Launch:
    ranks, nbytes = len(sizes.parts), sizes.parts[rank][0]
    schedule = staged.gather_and_combine(rank, ranks, in_place=in_place, slots=mode.slots)
    binding = {
        "input": (Extent.even(0, nbytes),),
        "gathered": tuple(sizes.pulled(1, bounded=False)),
        "symmetric": (Extent.even(2, nbytes),),
    }
    return lower(schedule, binding, sizes.slots(), by_kernels=mode.by_kernels)


def all_gather_and_combine(
    group: Group,
    shard: torch.Tensor,
    combine: Callable[[list[torch.Tensor]], None],
    what: bytes,
) -> None:
    """Calls `combine(shards of all ranks)` once, when all have been pulled.

    As `cpu.all_gather_and_combine`.
    """
    ranks = group.world_size
    device = device_for(group, shard.device)
    mode = Mode.of(device)
    addresses = peers_in_place(group, device, [shard], mode, what)
    mine = Shard([shard], None, ranks)
    launch = _combine_launch(group.rank, mine.sizes, mode, addresses is not None)
    staging = mine.staging(ranks)

    def run_combine(_: int) -> None:
        combine([mine.views(staging, rank, rank)[0] for rank in range(ranks)])

    operands = [*mine.addresses(), staging.data_ptr(), *(addresses or ())]
    with _call(group, device, 0 if addresses is not None else mine.room) as (space, epoch):
        kernels = {"combine": run_combine}
        launch.run(space, epoch, operands, kernels, capturing=mode.slots == 1, what=what)


def _partials(operand: int, sizes: tuple[int, ...], rank: int) -> tuple[Extent, ...]:
    """Where the partial sums for this rank come to lie: in `scratch_rows`."""
    return (Extent.aligned(operand, sizes[rank], len(sizes)),)


@lru_cache(maxsize=512)
def _produce_launch(rank: int, ranks: int, nbytes: int, mode: Mode) -> Launch:
    schedule = staged.produce_and_scatter(rank, ranks, slots=mode.slots)
    slot = (Extent.aligned(None, nbytes, ranks),)
    binding = {"partials": _partials(0, (nbytes,) * ranks, rank)}
    slots = dict.fromkeys(range(ranks), slot)
    return lower(schedule, binding, slots, by_kernels=mode.by_kernels)


def produce_and_reduce_scatter(
    group: Group,
    produce: Callable[[int, torch.Tensor], None],
    out: torch.Tensor,
    what: bytes,
    *,
    mean: bool = False,
) -> None:
    """Calls `produce(r, partial)` for each rank r, one's own last; `out` is the sum over ranks.

    As `cpu.produce_and_reduce_scatter`. The peers' partial sums are pulled while this rank still
    produces, and one kernel adds all of them in rank order.
    """
    agree(group, what)
    rank, ranks = group.rank, group.world_size
    device = device_for(group, out.device)
    mode = Mode.of(device)
    nbytes = out.numel() * out.element_size()
    launch = _produce_launch(rank, ranks, nbytes, mode)
    partials, places = scratch_rows(out, ranks), part_offsets((nbytes,) * ranks)
    with _call(group, device, places[-1]) as (space, epoch):

        def run_produce(target: int) -> None:
            if target == rank:
                produce(target, partials[rank])
            else:
                slot = space.slot(epoch, places[target], nbytes)
                produce(target, slot.view(out.dtype).view(out.shape))

        kernels: dict[str, Kernel] = {
            "produce": run_produce,
            "reduce": lambda _: add_rows(partials, out, mean=mean),
        }
        operands = [partials.data_ptr()]
        launch.run(space, epoch, operands, kernels, capturing=mode.slots == 1, what=what)


@dataclass(frozen=True)
class _Exchange:
    """A slot that holds partial sums (for each rank, or for two in a ring) and behind them a shard.

    `partials` are the bytes of the partial sum for each rank.
    """

    shard: Sizes
    partials: tuple[int, ...]
    ring: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the partial sums begin, and behind them the shard."""
        return part_offsets((max(self.partials),) * 2 if self.ring else self.partials)

    def slots(self, rank: int) -> dict[int, tuple[Extent, ...]]:
        """Each rank's slot, as rank `rank` reads it. The shard is chunk W."""
        ranks = len(self.partials)
        # In a ring, chunk 0 or 1 of a peer's slot is read as a partial sum for this rank.
        sizes = (self.partials[rank],) * ranks if self.ring else self.partials
        starts = self.offsets[:2] if self.ring else self.offsets[:-1]
        starts = (*starts, *(0,) * (ranks - len(starts)))[:ranks]
        found = {}
        for peer, parts in enumerate(self.shard.parts):
            extents = []
            for part, size in enumerate(parts):
                begin = self.offsets[-1] + self.shard.offsets[part]
                extents.append(Extent(None, (*starts, begin), (*sizes, size)))
            found[peer] = tuple(extents)
        return found


@lru_cache(maxsize=512)
def _exchange_launch(rank: int, exchange: _Exchange, mode: Mode) -> Launch:
    ranks, own = len(exchange.partials), exchange.shard.parts[rank]
    builder = staged.consume_and_pass_on if exchange.ring else staged.consume_and_scatter
    # Operands: the parts of the own shard, the staging memory, the partial sums for this rank.
    binding = {
        "input": tuple(Extent.even(i, size) for i, size in enumerate(own)),
        "gathered": tuple(exchange.shard.pulled(len(own), exchange.ring)),
        "partials": _partials(len(own) + 1, exchange.partials, rank),
    }
    schedule = builder(rank, ranks, slots=mode.slots)
    return lower(schedule, binding, exchange.slots(rank), by_kernels=mode.by_kernels)


def consume_and_reduce_scatter(
    group: Group,
    shard: Sequence[torch.Tensor],
    consume: Callable[[list[torch.Tensor], int, torch.Tensor], None],
    out: torch.Tensor,
    what: bytes,
    *,
    shapes: Sequence[Shapes],
    partials: Shapes,
    ring: bool = False,
) -> None:
    """Calls `consume(shards of rank r, r, partial)` for each rank r; `out` sums what is for it.

    As `cpu.consume_and_reduce_scatter`. Without `ring` all shards and all partial sums for this
    rank have room here; with it two shards and one partial sum.
    """
    agree(group, what)
    rank, ranks = group.rank, group.world_size
    device = device_for(group, out.device)
    mode = Mode.of(device)
    mine = Shard(shard, shapes, ranks)
    exchange = _Exchange(
        mine.sizes, tuple(math.prod(shape) * out.element_size() for shape in partials), ring
    )
    launch = _exchange_launch(rank, exchange, mode)
    staging = mine.staging(min(2, ranks) if ring else ranks)
    sums = scratch_rows(out, 1 if ring else ranks)
    turns = {peer: turn for turn, peer in enumerate(peers(rank, ranks))}
    with _call(group, device, exchange.offsets[-1] + mine.room) as (space, epoch):

        def run_consume(source: int) -> None:
            if source == rank:
                consume(list(shard), rank, out if ring else sums[rank])
                return
            place = turns[source] % 2 if ring else source
            nbytes = exchange.partials[source]
            slot = space.slot(epoch, exchange.offsets[place], nbytes)
            partial = slot.view(out.dtype).view(tuple(partials[source]))
            consume(mine.views(staging, place, source), source, partial)

        kernels: dict[str, Kernel] = {
            "consume": run_consume,
            "add": lambda _: out.add_(sums[0]),
            "reduce": lambda _: add_rows(sums, out),
        }
        operands = [*mine.addresses(), staging.data_ptr(), sums.data_ptr()]
        launch.run(space, epoch, operands, kernels, capturing=mode.slots == 1, what=what)
