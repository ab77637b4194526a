"""Pipelines on CPU: consumers read a peer's shard where it lies; no gather copy, no barrier.

They know no matmul: they take `consume(shards, rank)` and `produce(rank, out)`. `what` is the
bytes that name the call in errors and by which ranks notice that they disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from symm_cp import wire
from symm_cp.alignment import part_offsets
from symm_cp.memory import Group, Workspace, is_symmetric, reported
from symm_cp.runtime.program import Binding, Extent, Kernel, Program, Reduction, lower
from symm_cp.schedule import builders
from symm_cp.schedule.steps import Schedule

# Below this many bytes waking the engine costs more than the transfer, which then waits for
# `wait_tensor`, or for the next transfer that wakes the engine. No peer may depend on it: it is not
# in place, where others wait until this rank has read.
_WAKE_BYTES = 64 * 1024

#: The element types that native reductions take, with torch's numbers for them.
REDUCIBLE: dict[torch.dtype, int] = {
    torch.uint8: wire.DType.UINT8,
    torch.int8: wire.DType.INT8,
    torch.int16: wire.DType.INT16,
    torch.int32: wire.DType.INT32,
    torch.int64: wire.DType.INT64,
    torch.float16: wire.DType.FLOAT16,
    torch.float32: wire.DType.FLOAT32,
    torch.float64: wire.DType.FLOAT64,
    torch.bfloat16: wire.DType.BFLOAT16,
}


#: The shapes of the tensors of a shard.
Shapes: TypeAlias = Sequence[tuple[int, ...]]
#: Takes the shards of a rank, and the rank.
Consume: TypeAlias = Callable[[list[torch.Tensor], int], None]


@lru_cache(maxsize=512)
def _consume_program(
    rank: int,
    world_size: int,
    in_place: bool,
    nbytes: tuple[int, ...],
    rows: int,
    strided: bool,
    gather: bool,
) -> Program:
    schedule = builders.all_gather_and_consume(rank, world_size, in_place=in_place, gather=gather)
    offsets = part_offsets(nbytes)
    shard = tuple(Extent.even(i, size) for i, size in enumerate(nbytes))
    row = nbytes[0] // rows if rows else 0
    binding: Binding = {
        "input": shard,
        "symmetric": shard,
        "slot": tuple(
            Extent(None, (offset,), (size,)) for offset, size in zip(offsets, nbytes, strict=False)
        ),
        # Chunk p of the gathered tensor: one run, or with rows > 1 a column block.
        "gathered": (
            Extent(
                len(nbytes),
                tuple(p * (row if rows > 1 else nbytes[0]) for p in range(world_size)),
                ((row if rows > 1 else nbytes[0]),) * world_size,
                rows=max(rows, 1),
                pitch=row * world_size if rows > 1 else 0,
            ),
        ),
    }
    return lower(schedule, binding, python_copies=frozenset({"input"}) if strided else frozenset())


class _Shards:
    """What the ranks contribute to a call, as tensors: one's own as given, and in slots.

    `shapes` gives the shapes of each rank's shard; without it all are like one's own.
    """

    def __init__(
        self, group: Group, own: Sequence[torch.Tensor], shapes: Sequence[Shapes] | None
    ) -> None:
        self.group = group
        self.own = own
        like = tuple(tuple(t.shape) for t in own)
        self.shapes = (like,) * group.world_size if shapes is None else shapes
        self.strided = not all(t.is_contiguous() for t in own)
        self.nbytes = tuple(t.numel() * t.element_size() for t in own)
        self.slot_bytes = max(self._offsets(rank)[-1] for rank in range(group.world_size))

    def _offsets(self, rank: int) -> tuple[int, ...]:
        sizes = zip(self.shapes[rank], self.own, strict=True)
        return part_offsets([math.prod(shape) * t.element_size() for shape, t in sizes])

    def at(self, workspace: Workspace, base: int, rank: int) -> list[torch.Tensor]:
        """The shard of a rank at an address."""
        places = zip(self._offsets(rank), self.shapes[rank], self.own, strict=False)
        return [workspace.view(base + offset, shape, t.dtype) for offset, shape, t in places]

    def fill(self, workspace: Workspace, base: int) -> None:
        """Copies one's own shard to an address."""
        for slot, tensor in zip(self.at(workspace, base, self.group.rank), self.own, strict=True):
            slot.copy_(tensor)


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

    `shard` is one or more tensors of any strides; `consume` gets contiguous ones (its own as
    given, when there is but one use for it). A single contiguous tensor in symmetric memory that
    was rendezvoused with the group is read in place, without a copy: on all ranks or on none.
    `shapes` gives the shapes of each rank's shard where they differ. `gathered`, if given, receives
    the first tensor of all ranks: chunk r of its first dimension, or with `columns` column block r.
    """
    world_size, rank = group.world_size, group.rank
    in_place = len(shard) == 1 and shard[0].is_contiguous() and is_symmetric(shard[0], group)
    shards = _Shards(group, shard, shapes)
    rows = shard[0].shape[0] if columns else 1
    program = _consume_program(
        rank, world_size, in_place, shards.nbytes, rows, shards.strided, gathered is not None
    )
    with group.call(0 if in_place else shards.slot_bytes, what) as (workspace, epoch):

        def fill_gathered(chunk: int) -> None:
            assert gathered is not None
            gathered.chunk(world_size, 1 if columns else 0)[chunk].copy_(shard[0])

        def run_consume(source: int) -> None:
            if source != rank:
                consume(shards.at(workspace, workspace.shard(source), source), source)
            elif shards.strided and world_size > 1:
                consume(shards.at(workspace, workspace.slot(), rank), rank)
            else:
                consume([t.contiguous() for t in shard], rank)

        operands = [t.data_ptr() for t in shard]
        if gathered is not None:
            operands.append(gathered.data_ptr())
        kernels = {
            "consume": run_consume,
            "input->slot": lambda _: shards.fill(workspace, workspace.slot()),
            "input->gathered": fill_gathered,
        }
        program.run(workspace, epoch, operands, what, kernels)


@lru_cache(maxsize=512)
def _combine_program(
    rank: int, world_size: int, in_place: bool, nbytes: int, strided: bool
) -> Program:
    schedule = builders.one_shot_all_reduce(rank, world_size, in_place=in_place)
    shard = (Extent.even(0, nbytes),)
    binding: Binding = {
        "input": shard,
        "symmetric": shard,
        "slot": (Extent.even(None, nbytes),),
    }
    return lower(schedule, binding, python_copies=frozenset({"input"}) if strided else frozenset())


def all_gather_and_combine(
    group: Group,
    shard: torch.Tensor,
    combine: Callable[[list[torch.Tensor]], None],
    what: bytes,
) -> None:
    """Calls `combine(shards of all ranks)` once, when all are there, to be read where they lie.

    For what needs all shards at once. In place as in `all_gather_and_consume`.
    """
    in_place = shard.is_contiguous() and is_symmetric(shard, group)
    nbytes = shard.numel() * shard.element_size()
    program = _combine_program(
        group.rank, group.world_size, in_place, nbytes, not shard.is_contiguous()
    )
    with group.call(0 if in_place else nbytes, what) as (workspace, epoch):

        def view(rank: int) -> torch.Tensor:
            if rank != group.rank:
                at = workspace.shard(rank)
            else:
                at = shard.data_ptr() if in_place else workspace.slot()
            return workspace.view(at, shard.shape, shard.dtype)

        kernels = {
            "reduce": lambda _: combine([view(rank) for rank in range(group.world_size)]),
            "input->slot": lambda _: view(group.rank).copy_(shard),
        }
        program.run(workspace, epoch, [shard.data_ptr()], what, kernels)


@lru_cache(maxsize=512)
def _produce_program(rank: int, world_size: int, nbytes: int, dtype: int, mean: bool) -> Program:
    schedule = builders.produce_and_reduce_scatter(rank, world_size)
    binding: Binding = {
        "slot": (Extent.aligned(None, nbytes, world_size),),
        "output": (Extent.even(0, nbytes),),
    }
    return lower(schedule, binding, reduction=Reduction(dtype, mean))


def produce_and_reduce_scatter(
    group: Group,
    produce: Callable[[int, torch.Tensor], None],
    out: torch.Tensor,
    what: bytes,
    *,
    mean: bool = False,
) -> None:
    """Calls `produce(r, partial)` for each rank r, one's own last; `out` is the sum over ranks.

    `produce` writes this rank's contribution to rank r's output into the contiguous `partial`,
    shaped as `out`: memory that r reads, or for one's own rank `out` itself. Partial sums are
    added in rank order, in float32 for the 16-bit types.
    """
    nbytes = out.numel() * out.element_size()
    program = _produce_program(group.rank, group.world_size, nbytes, REDUCIBLE[out.dtype], mean)
    places = part_offsets((nbytes,) * group.world_size)
    with group.call(places[-1], what) as (workspace, epoch):

        def run_produce(target: int) -> None:
            if target == group.rank:
                produce(target, out)
            else:
                at = workspace.slot() + places[target]
                produce(target, workspace.view(at, out.shape, out.dtype))

        program.run(workspace, epoch, [out.data_ptr()], what, {"produce": run_produce})


@lru_cache(maxsize=512)
def _exchange_program(
    rank: int, world_size: int, partials: tuple[int, ...], dtype: int, ring: bool
) -> Program:
    schedule = builders.consume_and_reduce_scatter(rank, world_size, ring=ring)
    places = _exchange_offsets(partials, ring)
    # In a ring, chunk 0 or 1 of a peer's slot is read as this rank's partial sum.
    sizes = (partials[rank],) * 2 if ring else partials
    binding: Binding = {
        "slot": (Extent(None, places[: len(sizes)], sizes),),
        "output": (Extent.even(0, partials[rank]),),
    }
    copies = frozenset({"input"})
    return lower(schedule, binding, reduction=Reduction(dtype, False), python_copies=copies)


def _exchange_offsets(partials: tuple[int, ...], ring: bool) -> tuple[int, ...]:
    """Where the partial sums begin in a slot, and behind them the shard."""
    return part_offsets((max(partials),) * 2 if ring else partials)


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

    As `all_gather_and_consume`; and `consume` writes this rank's contribution to rank r into the
    contiguous `partial` of shape `partials[r]` and dtype of `out`: memory that r reads, or for
    one's own rank `out` itself. Its own shard it gets as given. The sums are taken in rank order;
    with `ring` in the order rank, rank-1, ..., and then the slot takes two partial sums at a time
    instead of one for each rank.
    """
    rank, itemsize = group.rank, out.element_size()
    shards = _Shards(group, shard, shapes)
    sizes = tuple(math.prod(shape) * itemsize for shape in partials)
    program = _exchange_program(rank, group.world_size, sizes, REDUCIBLE[out.dtype], ring)
    places = _exchange_offsets(sizes, ring)
    turns = {peer: turn for turn, peer in enumerate(builders.peers(rank, group.world_size))}
    with group.call(places[-1] + shards.slot_bytes, what) as (workspace, epoch):

        def run_consume(source: int) -> None:
            if source == rank:
                consume(list(shard), rank, out)
                return
            at = workspace.slot() + places[turns[source] % 2 if ring else source]
            partial = workspace.view(at, partials[source], out.dtype)
            base = workspace.shard(source) + places[-1]
            consume(shards.at(workspace, base, source), source, partial)

        kernels: dict[str, Kernel] = {
            "consume": run_consume,
            "input->slot": lambda _: shards.fill(workspace, workspace.slot() + places[-1]),
        }
        program.run(workspace, epoch, [out.data_ptr()], what, kernels)


def lower_both(
    builder: Callable[..., Schedule],
    group: Group,
    binding: Binding,
    reduction: Reduction | None = None,
) -> tuple[Program, Program]:
    """Lowers what a `Collective` needs: a builder's schedules for a plain input and in place."""
    plain, in_place = (
        lower(builder(group.rank, group.world_size, in_place=place), binding, reduction=reduction)
        for place in (False, True)
    )
    return plain, in_place


class Collective:
    """A collective without Python kernels, on inputs of one shape.

    `plain` and `in_place` are its programs for an input outside of symmetric memory and for one
    inside; operand 0 is the input and operand 1 the output, of shape `output`. The slot takes
    `slot_bytes` for a plain input, and with `always` for one in place too.
    """

    def __init__(
        self,
        plain: Program,
        in_place: Program,
        what: bytes,
        output: tuple[int, ...],
        slot_bytes: int,
        *,
        always: bool = False,
    ) -> None:
        self._plans = (plain.plan(what), in_place.plan(what))
        handles = (self._plans[0].handle, self._plans[1].handle)
        self.output = output
        self._wake = slot_bytes > _WAKE_BYTES
        slots = (slot_bytes, slot_bytes if always else 0)
        self._run = (*handles, *slots)
        self._start = (*handles, *slots) if self._wake else (handles[0],) * 2 + (slots[0],) * 2

    def run(self, group: Group, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Carries the collective out in the calling thread. Raises `RuntimeError`."""
        with group.own_lock():
            try:
                torch.ops.symm_cp.run_collective.default(group.handle, *self._run, tensor, output)
            except RuntimeError as error:
                raise reported(error)  # noqa: B904 - the same error

    def start(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Starts the collective on a copy engine; `wait_tensor` completes the returned output.

        Waits for no peer, at the first call neither.
        """
        with group.own_lock():
            try:
                return torch.ops.symm_cp.start_transfer.default(
                    group.handle, *self._start, tensor, self.output, self._wake
                )
            except RuntimeError as error:
                raise reported(error)  # noqa: B904 - the same error
