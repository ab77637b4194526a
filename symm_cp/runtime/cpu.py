"""Pipelines on CPU: consumers read a peer's shard where it lies; no gather copy, no barrier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

from symm_cp.group.hosts import QUESTION, numbers_on_host
from symm_cp.group.memory import Group, has_symmetric, is_symmetric
from symm_cp.native import wire
from symm_cp.runtime import exchange, small
from symm_cp.runtime import loops as _loops  # noqa: F401 - gives every new group its loops
from symm_cp.runtime.all_reduce import AllReduceVariant, all_reduce_variant
from symm_cp.runtime.api import Runtime
from symm_cp.runtime.calls import (
    AllReduceCall,
    CombineCall,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    PackedBoxes,
    RelayCall,
    ScatterCall,
    Sizes,
)
from symm_cp.runtime.program import Binding, Kernel, Program, Reduction, lower
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets
from symm_cp.tensors.dtypes import REDUCIBLE
from symm_cp.tensors.results import contiguous
from symm_cp.tensors.shards import Extent, Shape, ShardSizes, Split

_NATIVE_COPIES: frozenset[str] = frozenset()
#: Copies of strided inputs, or of several tensors into a slot.
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
    # In place, peers' tensors have the layout of their slots.
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
    rank: int, chunks: tuple[int, ...], variant: AllReduceVariant, dtype: int, mean: bool
) -> tuple[Program, tuple[int, ...]]:
    """The program, and where the chunks begin in a slot; the last offset is its size."""
    pattern = patterns.PRODUCE_AND_ALL_REDUCE.direct(**variant.options)
    offsets = variant.offsets(chunks)
    binding = Binding(
        {
            "slot": (Extent(None, offsets[:-1], chunks),),
            "output": (Extent.consecutive(0, chunks),),
        }
    )
    program = lower(pattern, rank, len(chunks), binding, reduction=Reduction(dtype, mean))
    return program, offsets


@lru_cache(maxsize=512)
def _exchange_program(
    rank: int, partials: tuple[int, ...], dtype: int, ring: bool
) -> tuple[Program, tuple[int, ...]]:
    """Returns the program, and the offsets of the partial sums and of the shard in a slot."""
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


_C = TypeVar("_C", GatherCall, CombineCall)


class CpuRuntime(Runtime):
    """The runtime for CPU tensors of ranks on one host."""

    def _gather(self, call: GatherCall) -> None:
        nbytes = call.shards.nbytes
        if nbytes < small.MOST_BYTES and small.serves(call.group, nbytes):
            small.gather(call)
        else:
            _run_in_place_if_all_can(call, self._gather_shards)

    def _gather_shards(self, call: GatherCall, in_place: bool) -> None:
        """A peer's shard is read where it lies, with strides of a new tensor."""
        group, shards, gathered, split = call.group, call.shards, call.gathered, call.split
        rank, own, strided = group.rank, shards.own, not shards.contiguous
        target = None
        if gathered is not None and split is not None:
            target = (split, tuple(gathered.shape), gathered.element_size())
        with group.call(0 if in_place else shards.nbytes, call.name) as (workspace, epoch):
            program = _consume_program(rank, shards.sizes, in_place, strided, target)

            def copy_to_gathered(chunk: int) -> None:
                assert gathered is not None
                assert split is not None
                split.of(chunk, gathered).copy_(own[0])

            def run_consume(source: int) -> None:
                if source != rank:
                    at = workspace.shard(source)
                elif strided and group.world_size > 1:
                    at = workspace.slot()
                else:
                    call.consume([contiguous(t) for t in own] if strided else list(own), rank)
                    return
                call.consume(shards.views(source, workspace.view, at), source)

            operands = [t.data_ptr() for t in own]
            if gathered is not None:
                operands.append(gathered.data_ptr())
            kernels: dict[str, Kernel] = {
                "consume": run_consume,
                "input->slot": lambda _: shards.pack(rank, workspace.view, workspace.slot()),
                "input->gathered": copy_to_gathered,
            }
            program.run(workspace, epoch, operands, call.name, kernels)

    def _combine(self, call: CombineCall) -> None:
        if small.serves(call.group, call.shards.nbytes):
            small.combine(call)
        else:
            _run_in_place_if_all_can(call, self._combine_shards)

    def _combine_shards(self, call: CombineCall, in_place: bool) -> None:
        """All shards are read where they lie."""
        group, shards, shard = call.group, call.shards, call.shards.own[0]
        rank = group.rank
        with group.call(0 if in_place else shards.nbytes, call.name) as (workspace, epoch):
            program = _combine_program(rank, shards.sizes, in_place, not shards.contiguous)

            def shard_of(source: int) -> torch.Tensor:
                if source == rank and in_place:
                    return shard
                at = workspace.slot() if source == rank else workspace.shard(source)
                return shards.views(source, workspace.view, at)[0]

            kernels: dict[str, Kernel] = {
                "combine": lambda _: call.combine([shard_of(r) for r in range(group.world_size)]),
                "input->slot": lambda _: shards.pack(rank, workspace.view, workspace.slot()),
            }
            program.run(workspace, epoch, [shard.data_ptr()], call.name, kernels)

    def _scatter(self, call: ScatterCall) -> None:
        """Contributions are written where the peers read them."""
        group, out = call.group, call.out
        rank, dtype = group.rank, REDUCIBLE[out.dtype]
        if small.serves(group, sum(call.nbytes)):
            small.scatter(call)
            return
        program, offsets = _produce_program(rank, call.nbytes, dtype, call.mean)
        # The peers' slots are as large as this rank's: all ranks have the same `nbytes`.
        with group.call(offsets[-1], call.name) as (workspace, epoch):

            def run_produce(target: int) -> None:
                if target == rank:
                    call.produce(target, out)
                else:
                    at = workspace.slot() + offsets[target]
                    call.produce(target, workspace.view(at, call.partials[target], out.dtype))

            kernels: dict[str, Kernel] = {"produce": run_produce}
            program.run(workspace, epoch, [out.data_ptr()], call.name, kernels)

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Contributions and sums are written where the peers read them."""
        group, out, split = call.group, call.out, call.split
        variant, chunks = all_reduce_variant(out, split, group.world_size)
        dtype = REDUCIBLE[out.dtype]
        program, offsets = _all_reduce_program(group.rank, chunks, variant, dtype, call.mean)
        with group.call(offsets[-1], call.name) as (workspace, epoch):

            def run_produce(target: int) -> None:
                if group.world_size == 1:
                    call.produce(target, out)
                elif split is None:
                    call.produce(target, workspace.view(workspace.slot(), out.shape, out.dtype))
                else:
                    at, shape = offsets[target], tuple(split.shape_of(target, out.shape))
                    call.produce(target, workspace.view(workspace.slot() + at, shape, out.dtype))

            kernels: dict[str, Kernel] = {"produce": run_produce}
            program.run(workspace, epoch, [out.data_ptr()], call.name, kernels)

    def _exchange(self, call: ExchangeCall) -> None:
        """Takes the peers' parts where the peers wrote them."""
        rank, sizes = call.group.rank, call.sizes
        program, offsets, slot_bytes = _exchange_and_consume_program(rank, sizes)
        if small.serves(call.group, slot_bytes):
            small.exchange(call)
            return
        with call.group.call(slot_bytes, call.name) as (workspace, epoch):

            def run_give(to: int) -> None:
                at = workspace.slot() + offsets[rank][to]
                call.give(to, workspace.view(at, (sizes[rank][to],), torch.uint8))

            def run_take(source: int) -> None:
                at = workspace.shard(source) + offsets[source][rank]
                call.take(source, workspace.view(at, (sizes[source][rank],), torch.uint8))

            kernels: dict[str, Kernel] = {
                "give": run_give,
                "consume": lambda _: call.consume(),
                "take": run_take,
            }
            program.run(workspace, epoch, [], call.name, kernels)

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """See `Runtime`."""
        exchange.exchange_boxes(group, packed, tensors, outputs, call_name)

    def all_gather_into(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        split: Split,
        call_name: bytes,
    ) -> None:
        """See `Runtime`."""
        for tensor, output in zip(shard, outputs, strict=True):
            exchange.all_gather_into(group, tensor, output, split, call_name)

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        """The slot holds the partial sums, and behind them the shard."""
        group, shards, out, ring = call.group, call.shards, call.out, call.ring
        rank, dtype = group.rank, REDUCIBLE[out.dtype]
        program, offsets = _exchange_program(rank, call.nbytes, dtype, ring)
        turns = {peer: turn for turn, peer in enumerate(peers(rank, group.world_size))}
        with group.call(offsets[-1] + shards.nbytes, call.name) as (workspace, epoch):

            def run_consume(source: int) -> None:
                if source == rank:
                    call.consume(list(shards.own), rank, out)
                    return
                at = workspace.slot() + offsets[turns[source] % 2 if ring else source]
                partial = workspace.view(at, call.partials[source], out.dtype)
                base = workspace.shard(source) + offsets[-1]
                call.consume(shards.views(source, workspace.view, base), source, partial)

            def publish(_: int) -> None:
                shards.pack(rank, workspace.view, workspace.slot() + offsets[-1])

            kernels: dict[str, Kernel] = {"consume": run_consume, "input->slot": publish}
            program.run(workspace, epoch, [out.data_ptr()], call.name, kernels)

    def _relay(self, call: RelayCall) -> None:
        """The next rank reads its input where this rank has written it."""
        if small.serves(call.group, sum(map(math.prod, call.shapes)) * call.like.itemsize):
            super()._relay(small.reporting(call))
            return
        rank, ranks, shapes = call.group.rank, call.group.world_size, call.shapes
        item, dtype = call.like.element_size(), call.like.dtype
        offsets = part_offsets([math.prod(shape) * item for shape in shapes])
        program = _relay_program(rank, ranks, len(shapes), call.reverse)
        before, after = (rank + 1, rank - 1) if call.reverse else (rank - 1, rank + 1)
        with call.group.call(offsets[-1], call.name) as (workspace, epoch):

            def run_step(piece: int) -> None:
                def view(base: int) -> torch.Tensor:
                    return workspace.view(base + offsets[piece], shapes[piece], dtype)

                received = view(workspace.shard(before)) if 0 <= before < ranks else None
                call.step(piece, received, view(workspace.slot()) if 0 <= after < ranks else None)

            program.run(workspace, epoch, [], call.name, {"step": run_step})


def _run_in_place_if_all_can(call: _C, run: Callable[[_C, bool], None]) -> None:
    """Runs a call, in place if all ranks' shards can be read in place. Collective.

    Ranks may differ: a shard may be contiguous on one rank and not on another, if only because a
    dimension that was moved to the front has length 1 there. So ranks exchange whether they can,
    if any of them may have symmetric shards.
    """
    group, shards = call.group, call.shards
    if len(shards.own) > 1 or shards.sizes.some_empty or not has_symmetric(group):
        run(call, False)
        return
    with group.own_lock():  # no other call of this rank comes between the exchange and the call
        readable = shards.contiguous and is_symmetric(shards.own[0], group)
        if group.world_size > 1:
            name = (QUESTION + call.name)[: wire.MAX_CALL_NAME]
            readable = all(each for (each,) in numbers_on_host(group, name, [readable]))
        run(call, readable)
