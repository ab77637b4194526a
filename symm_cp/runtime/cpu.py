"""Pipelines on CPU: consumers read a peer's shard where it lies; no gather copy, no barrier."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch

from symm_cp import native, wire
from symm_cp.group.memory import Group, Workspace, has_symmetric, is_symmetric, reported
from symm_cp.runtime import loops as _loops  # noqa: F401 - gives every new group its loops
from symm_cp.runtime.all_reduce_ways import AllReduceWay, all_reduce_way
from symm_cp.runtime.api import (
    REDUCIBLE,
    Combine,
    Consume,
    ConsumeAndProduce,
    ConsumeHere,
    PackedBoxes,
    Pass,
    Poll,
    Produce,
    RelayStep,
    Sizes,
)
from symm_cp.runtime.binding import Binding
from symm_cp.runtime.numbers import QUESTION, numbers_on_host
from symm_cp.runtime.program import Kernel, Program, Reduction, lower
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets
from symm_cp.tensors.results import contiguous
from symm_cp.tensors.shards import Extent, Shape, Shapes, Shards, ShardSizes, Split

_NATIVE_COPIES: frozenset[str] = frozenset()
#: Copies of inputs that are strided, or several tensors to be laid out in a slot.
_PYTHON_COPIES = frozenset({"input"})


@lru_cache(maxsize=512)
def _consume_program(
    rank: int,
    sizes: ShardSizes,
    in_place: bool,
    strided: bool,
    gathered: tuple[Split, Shape, int] | None,
) -> Program:
    variant = patterns.ALL_GATHER_AND_CONSUME.direct(in_place=in_place, keep=gathered is not None)
    own = tuple(Extent.even(i, size) for i, size in enumerate(sizes.parts[rank]))
    slots = sizes.slots()
    buffers = {"input": own}
    if gathered is not None:
        buffers["gathered"] = (Extent.split(len(own), *gathered),)
    # In place, peers' tensors are as their slots would be.
    binding = Binding(buffers, {"slot": slots, "symmetric": {**slots, rank: own}})
    copies = _PYTHON_COPIES if strided else _NATIVE_COPIES
    return lower(variant, rank, len(sizes.parts), binding, python_copies=copies)


@lru_cache(maxsize=512)
def _combine_program(rank: int, sizes: ShardSizes, in_place: bool, strided: bool) -> Program:
    variant = patterns.ALL_GATHER_AND_COMBINE.direct(in_place=in_place)
    own, slots = (Extent.even(0, sizes.parts[rank][0]),), sizes.slots()
    binding = Binding({"input": own}, {"slot": slots, "symmetric": {**slots, rank: own}})
    copies = _PYTHON_COPIES if strided else _NATIVE_COPIES
    return lower(variant, rank, len(sizes.parts), binding, python_copies=copies)


@lru_cache(maxsize=512)
def _produce_program(
    rank: int, partials: tuple[int, ...], dtype: int, mean: bool
) -> tuple[Program, tuple[int, ...]]:
    """The program, and where the partial sums begin in a slot; the last offset is its size."""
    variant = patterns.PRODUCE_AND_REDUCE_SCATTER.direct()
    binding = Binding(
        {"slot": (Extent.aligned(None, partials),), "output": (Extent.even(0, partials[rank]),)}
    )
    reduction = Reduction(dtype, mean)
    program = lower(variant, rank, len(partials), binding, reduction=reduction)
    return program, part_offsets(partials)


@lru_cache(maxsize=512)
def _all_reduce_program(
    rank: int, chunks: tuple[int, ...], way: AllReduceWay, dtype: int, mean: bool
) -> tuple[Program, tuple[int, ...]]:
    """The program, and where the chunks begin in a slot; the last offset is its size."""
    variant = patterns.PRODUCE_AND_ALL_REDUCE.direct(**way.options)
    offsets = way.offsets(chunks)
    binding = Binding(
        {
            "slot": (Extent(None, offsets[:-1], chunks),),
            "output": (Extent.consecutive(0, chunks),),
        }
    )
    program = lower(variant, rank, len(chunks), binding, reduction=Reduction(dtype, mean))
    return program, offsets


@lru_cache(maxsize=512)
def _exchange_program(
    rank: int, partials: tuple[int, ...], dtype: int, ring: bool
) -> tuple[Program, tuple[int, ...]]:
    """The program, and where the partial sums begin in a slot; the last offset is the shard's."""
    variant = patterns.CONSUME_AND_REDUCE_SCATTER.direct(ring=ring)
    # In a ring, chunk 0 or 1 of a peer's slot is read as this rank's partial sum.
    sizes = (partials[rank],) * 2 if ring else partials
    offsets = part_offsets((max(partials),) * 2 if ring else partials)
    binding = Binding(
        {
            "slot": (Extent(None, offsets[: len(sizes)], sizes),),
            "output": (Extent.even(0, partials[rank]),),
        }
    )
    program = lower(
        variant,
        rank,
        len(partials),
        binding,
        reduction=Reduction(dtype),
        python_copies=_PYTHON_COPIES,
    )
    return program, offsets


@lru_cache(maxsize=512)
def _relay_program(rank: int, world_size: int, pieces: int, reverse: bool) -> Program:
    variant = patterns.RELAY.direct(reverse=reverse)
    return lower(variant, rank, world_size, Binding(), pieces=pieces)


@lru_cache(maxsize=512)
def _exchange_and_consume_program(rank: int, sizes: Sizes) -> tuple[Program, Sizes, int]:
    """The program, where parts begin in each rank's slot, and the bytes of the largest slot."""
    offsets = tuple(part_offsets(to_each) for to_each in sizes)
    program = lower(patterns.EXCHANGE_AND_CONSUME.direct(), rank, len(sizes), Binding())
    return program, offsets, max(each[-1] for each in offsets)


Boxes: TypeAlias = "tuple[ctypes.Array[wire.Box], ctypes.Array[wire.Box]]"


@lru_cache(maxsize=128)
def boxes_of(packed: PackedBoxes, strides: tuple[tuple[int, ...], ...], world_size: int) -> Boxes:
    """Returns the boxes that a rank sends and receives, for native code."""
    room = wire.EXCHANGE_PIECE // world_size // wire.EXCHANGE_PART * wire.EXCHANGE_PART
    given, taken = packed.boxes(strides, room)
    given_boxes, taken_boxes = ([wire.Box(*box) for box in boxes] for boxes in (given, taken))
    return (wire.Box * len(given))(*given_boxes), (wire.Box * len(taken))(*taken_boxes)


class CpuRuntime:
    """The runtime for CPU tensors of ranks on one host; see `runtime.api.Runtime`."""

    def all_gather_and_consume(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: Consume,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None = None,
        gathered: torch.Tensor | None = None,
        split: Split | None = None,
    ) -> None:
        """See `Runtime`. A peer's shard is read where it lies, with strides of a new tensor."""
        rank = group.rank
        shards = Shards(shard, group.world_size, shapes)
        strided = not shards.contiguous
        target = None
        if gathered is not None:
            split = split or Split.equal(shard[0].shape[0], group.world_size)
            target = (split, tuple(gathered.shape), gathered.element_size())
        with _call_of(shards, group, call_name) as (workspace, epoch, in_place):
            program = _consume_program(rank, shards.sizes, in_place, strided, target)

            def copy_to_gathered(chunk: int) -> None:
                assert gathered is not None
                assert split is not None
                split.of(chunk, gathered).copy_(shard[0])

            def run_consume(source: int) -> None:
                if source != rank:
                    consume(shards.views(source, workspace.view, workspace.shard(source)), source)
                elif strided and group.world_size > 1:
                    consume(shards.views(rank, workspace.view, workspace.slot()), rank)
                else:
                    consume([contiguous(t) for t in shard], rank)

            operands = [t.data_ptr() for t in shard]
            if gathered is not None:
                operands.append(gathered.data_ptr())
            kernels: dict[str, Kernel] = {
                "consume": run_consume,
                "input->slot": lambda _: shards.pack(rank, workspace.view, workspace.slot()),
                "input->gathered": copy_to_gathered,
            }
            program.run(workspace, epoch, operands, call_name, kernels)

    def all_gather_and_combine(
        self,
        group: Group,
        shard: torch.Tensor,
        combine: Combine,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """See `Runtime`. All shards are read where they lie."""
        rank = group.rank
        parts = None if shapes is None else [(shape,) for shape in shapes]
        shards = Shards([shard], group.world_size, parts)
        with _call_of(shards, group, call_name) as (workspace, epoch, in_place):
            program = _combine_program(rank, shards.sizes, in_place, not shards.contiguous)

            def shard_of(source: int) -> torch.Tensor:
                if source == rank and in_place:
                    return shard
                at = workspace.slot() if source == rank else workspace.shard(source)
                return shards.views(source, workspace.view, at)[0]

            kernels: dict[str, Kernel] = {
                "combine": lambda _: combine([shard_of(r) for r in range(group.world_size)]),
                "input->slot": lambda _: shards.pack(rank, workspace.view, workspace.slot()),
            }
            program.run(workspace, epoch, [shard.data_ptr()], call_name, kernels)

    def all_gather_and_poll(
        self, group: Group, shard: Sequence[torch.Tensor], kernel: Poll, call_name: bytes
    ) -> None:
        """Raises `NotImplementedError`: kernels on CPU are torch's, which do not poll."""
        raise NotImplementedError(f"{call_name.decode()}: kernels on CPU cannot poll for shards")

    def produce_and_reduce_scatter(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
        mean: bool = False,
    ) -> None:
        """See `Runtime`. Contributions are written where the peers read them."""
        rank, item = group.rank, out.element_size()
        if shapes is None:
            partials: Sequence[Shape] = (tuple(out.shape),) * group.world_size
            sizes = (out.numel() * item,) * group.world_size
        else:
            partials, sizes = shapes, tuple(math.prod(shape) * item for shape in shapes)
        program, offsets = _produce_program(rank, sizes, REDUCIBLE[out.dtype], mean)
        # The peers' slots are as large as this rank's: the sizes of all are known to all.
        with group.call(offsets[-1], call_name) as (workspace, epoch):

            def run_produce(target: int) -> None:
                if target == rank:
                    produce(target, out)
                else:
                    at = workspace.slot() + offsets[target]
                    produce(target, workspace.view(at, partials[target], out.dtype))

            kernels: dict[str, Kernel] = {"produce": run_produce}
            program.run(workspace, epoch, [out.data_ptr()], call_name, kernels)

    def produce_and_all_reduce(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        split: Split | None = None,
        mean: bool = False,
    ) -> None:
        """See `Runtime`. Contributions and sums are written where the peers read them."""
        way, chunks = all_reduce_way(out, split, group.world_size)
        program, offsets = _all_reduce_program(group.rank, chunks, way, REDUCIBLE[out.dtype], mean)
        with group.call(offsets[-1], call_name) as (workspace, epoch):

            def run_produce(target: int) -> None:
                if group.world_size == 1:
                    produce(target, out)
                elif split is None:
                    produce(target, workspace.view(workspace.slot(), out.shape, out.dtype))
                else:
                    at, shape = offsets[target], tuple(split.shape_of(target, out.shape))
                    produce(target, workspace.view(workspace.slot() + at, shape, out.dtype))

            kernels: dict[str, Kernel] = {"produce": run_produce}
            program.run(workspace, epoch, [out.data_ptr()], call_name, kernels)

    def exchange_and_consume(
        self,
        group: Group,
        give: Pass,
        consume: ConsumeHere,
        take: Pass,
        device: torch.device,
        call_name: bytes,
        *,
        sizes: Sizes,
    ) -> None:
        """See `Runtime`. What the peers give is taken where they have written it."""
        rank = group.rank
        program, offsets, slot_bytes = _exchange_and_consume_program(rank, sizes)
        with group.call(slot_bytes, call_name) as (workspace, epoch):

            def run_give(to: int) -> None:
                at = workspace.slot() + offsets[rank][to]
                give(to, workspace.view(at, (sizes[rank][to],), torch.uint8))

            def run_take(source: int) -> None:
                at = workspace.shard(source) + offsets[source][rank]
                take(source, workspace.view(at, (sizes[source][rank],), torch.uint8))

            kernels: dict[str, Kernel] = {
                "give": run_give,
                "consume": lambda _: consume(),
                "take": run_take,
            }
            program.run(workspace, epoch, [], call_name, kernels)

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """See `Runtime`. One copy into the slot and one out of it, in pieces (csrc/boxes.h)."""
        used = (*tensors, *outputs)
        strides = tuple([t.stride() for t in used])
        given, taken = boxes_of(packed, strides, group.world_size)
        addresses = (ctypes.c_void_p * len(used))(*[t.data_ptr() for t in used])
        run = native.load().symm_cp_exchange_boxes
        lists = given, len(given), taken, len(taken)
        if run(group.handle, call_name, *lists, packed.joins, addresses, len(used)) < 0:
            raise reported(RuntimeError(native.error()))

    def consume_and_reduce_scatter(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: ConsumeAndProduce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None,
        partials: Sequence[Shape],
        ring: bool = False,
    ) -> None:
        """See `Runtime`. The slot holds the partial sums, and behind them the shard."""
        rank, item = group.rank, out.element_size()
        shards = Shards(shard, group.world_size, shapes)
        sizes = tuple(math.prod(shape) * item for shape in partials)
        program, offsets = _exchange_program(rank, sizes, REDUCIBLE[out.dtype], ring)
        turns = {peer: turn for turn, peer in enumerate(peers(rank, group.world_size))}
        with group.call(offsets[-1] + shards.nbytes, call_name) as (workspace, epoch):

            def run_consume(source: int) -> None:
                if source == rank:
                    consume(list(shard), rank, out)
                    return
                at = workspace.slot() + offsets[turns[source] % 2 if ring else source]
                partial = workspace.view(at, partials[source], out.dtype)
                base = workspace.shard(source) + offsets[-1]
                consume(shards.views(source, workspace.view, base), source, partial)

            def publish(_: int) -> None:
                shards.pack(rank, workspace.view, workspace.slot() + offsets[-1])

            kernels: dict[str, Kernel] = {"consume": run_consume, "input->slot": publish}
            program.run(workspace, epoch, [out.data_ptr()], call_name, kernels)

    def relay(
        self,
        group: Group,
        step: RelayStep,
        like: torch.Tensor,
        shapes: Sequence[Shape],
        call_name: bytes,
        *,
        reverse: bool = False,
    ) -> None:
        """See `Runtime`. What is passed on is read where it was written."""
        rank, ranks = group.rank, group.world_size
        offsets = part_offsets([math.prod(shape) * like.element_size() for shape in shapes])
        program = _relay_program(rank, ranks, len(shapes), reverse)
        before, after = (rank + 1, rank - 1) if reverse else (rank - 1, rank + 1)
        with group.call(offsets[-1], call_name) as (workspace, epoch):

            def run_step(piece: int) -> None:
                def view(base: int) -> torch.Tensor:
                    return workspace.view(base + offsets[piece], shapes[piece], like.dtype)

                received = view(workspace.shard(before)) if 0 <= before < ranks else None
                step(piece, received, view(workspace.slot()) if 0 <= after < ranks else None)

            program.run(workspace, epoch, [], call_name, {"step": run_step})


@contextmanager
def _call_of(
    shards: Shards, group: Group, call_name: bytes
) -> Iterator[tuple[Workspace, int, bool]]:
    """As `Group.call`, for shards; yields also whether all ranks' are read in place."""
    with group.own_lock():
        in_place = _readable(shards, group, call_name)
        with group.call(0 if in_place else shards.nbytes, call_name) as (workspace, epoch):
            yield workspace, epoch, in_place


def _readable(shards: Shards, group: Group, call_name: bytes) -> bool:
    """Whether the shards of all ranks are read in place. Collective where some might be.

    Whether its own shard can be, no rank knows of the others: it may be contiguous on one rank and
    not on another one, if only because a dimension was moved to the front that has length 1 there.
    """
    ranks = group.world_size
    if len(shards.own) > 1 or shards.sizes.some_empty or not has_symmetric(group):
        return False
    own = shards.contiguous and is_symmetric(shards.own[0], group)
    if ranks == 1:
        return own
    name = (QUESTION + call_name)[: wire.MAX_CALL_NAME]
    of_all = numbers_on_host(group, name, [own])
    return all(readable for (readable,) in of_all)
