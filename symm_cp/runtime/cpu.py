"""Pipelines on CPU: consumers read a peer's shard where it lies; no gather copy, no barrier."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from symm_cp.alignment import part_offsets
from symm_cp.memory import Group, is_symmetric, reported
from symm_cp.results import contiguous
from symm_cp.runtime import loops as _loops  # noqa: F401 - gives every new group its loops
from symm_cp.runtime.api import (
    REDUCIBLE,
    Collective,
    Combine,
    Consume,
    ConsumeAndProduce,
    Poll,
    Produce,
)
from symm_cp.runtime.binding import Binding
from symm_cp.runtime.program import Kernel, Program, Reduction, lower
from symm_cp.runtime.sums import real
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import Pattern, peers
from symm_cp.shards import Extent, Shape, Shapes, Shards, ShardSizes, Split

# Below this many bytes waking the engine costs more than the transfer, which then waits for
# `wait_tensor`, or for the next transfer that wakes the engine. No peer may depend on it: it is not
# in place, where others wait until this rank has read.
_WAKE_BYTES = 64 * 1024
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
        in_place = len(shard) == 1 and _readable(shards, group)
        strided = not shards.contiguous
        target = None
        if gathered is not None:
            split = split or Split.equal(shard[0].shape[0], group.world_size)
            target = (split, tuple(gathered.shape), gathered.element_size())
        program = _consume_program(rank, shards.sizes, in_place, strided, target)
        with group.call(0 if in_place else shards.nbytes, call_name) as (workspace, epoch):

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
        in_place = _readable(shards, group)
        program = _combine_program(rank, shards.sizes, in_place, not shards.contiguous)
        with group.call(0 if in_place else shards.nbytes, call_name) as (workspace, epoch):

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

    def consume_and_reduce_scatter(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: ConsumeAndProduce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes],
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

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `Runtime`."""
        whole = tuple(split.whole_shape(tensor.shape))
        output = Extent.split(1, split, whole, tensor.element_size())
        shards = dict(enumerate(output.nbytes))
        binding = Binding(
            {"input": (Extent.even(0, shards[group.rank]),), "output": (output,)},
            {
                "symmetric": {rank: (Extent.even(0, size),) for rank, size in shards.items()},
                "slot": {rank: (Extent.even(None, size),) for rank, size in shards.items()},
            },
        )
        pattern, slot_bytes = patterns.BACKGROUND_ALL_GATHER, max(output.nbytes)
        # An empty tensor has no address: ranks could not agree on whether theirs are symmetric.
        return _collective(
            group,
            pattern,
            binding,
            None,
            call_name,
            whole,
            slot_bytes,
            ever_in_place=min(split.sizes) > 0,
        )

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `Runtime`."""
        pattern = patterns.BACKGROUND_REDUCE_SCATTER
        return _reduce_scatter(group, pattern, tensor, split, call_name, mean)

    def prepare_reduce_scatter_into(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `Runtime`."""
        return _reduce_scatter(group, patterns.REDUCE_SCATTER, tensor, split, call_name, False)

    def prepare_all_reduce(
        self, group: Group, tensor: torch.Tensor, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `Runtime`."""
        nbytes = tensor.numel() * tensor.element_size()
        whole = (Extent.even(0, nbytes),)
        binding = Binding(
            {
                "input": whole,
                "symmetric": whole,
                "slot": (Extent.even(None, nbytes),),
                "output": (Extent.even(1, nbytes),),
            }
        )
        pattern, reduction = patterns.ALL_REDUCE, _reduction(tensor, mean)
        shape = tuple(tensor.shape)
        return _collective(group, pattern, binding, reduction, call_name, shape, nbytes)

    def prepare_all_reduce_in_place(
        self, group: Group, tensor: torch.Tensor, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `Runtime`. Each rank reduces a chunk; chunks at the end may be shorter."""
        reduction, ranks = _reduction(tensor, mean), group.world_size
        numbers = real(tensor)
        chunk, elements = -(-numbers.numel() // ranks), numbers.numel()
        ends = [min(rank * chunk, elements) for rank in range(ranks + 1)]
        split = Split(tuple(end - start for start, end in itertools.pairwise(ends)))
        chunks = Extent.split(0, split, (elements,), numbers.element_size())
        slot = Extent.split(None, split, (elements,), numbers.element_size())
        binding = Binding({"symmetric": (chunks,), "slot": (slot,)})
        variant = patterns.TWO_SHOT_ALL_REDUCE.direct(in_place=True)
        program = lower(variant, group.rank, ranks, binding, reduction=reduction)
        room = elements * numbers.element_size()
        shape = tuple(tensor.shape)
        return _CpuCollective(program, program, call_name, shape, room, always=True)


def _readable(shards: Shards, group: Group) -> bool:
    """Whether the one tensor of the own shard can be read in place, as those of all ranks."""
    return shards.contiguous and not shards.sizes.some_empty and is_symmetric(shards.own[0], group)


def _reduction(tensor: torch.Tensor, mean: bool) -> Reduction:
    return Reduction(REDUCIBLE[tensor.dtype.to_real()], mean)


def _reduce_scatter(
    group: Group, pattern: Pattern, tensor: torch.Tensor, split: Split, call_name: bytes, mean: bool
) -> Collective:
    whole, item = tuple(tensor.shape), tensor.element_size()
    parts = Extent.split(0, split, whole, item)
    own = parts.nbytes[group.rank] * parts.rows
    binding = Binding(
        {
            "input": (parts,),
            "symmetric": (parts,),
            "slot": (Extent.split(None, split, whole, item),),
            "output": (Extent.even(1, own),),
        }
    )
    shape = tuple(split.shape_of(group.rank, whole))
    nbytes, reduction = tensor.numel() * item, _reduction(tensor, mean)
    return _collective(group, pattern, binding, reduction, call_name, shape, nbytes)


def _collective(
    group: Group,
    pattern: Pattern,
    binding: Binding,
    reduction: Reduction | None,
    call_name: bytes,
    output_shape: Shape,
    slot_bytes: int,
    *,
    ever_in_place: bool = True,
) -> Collective:
    """Lowers a pattern for a plain input and for one in symmetric memory."""
    plain, in_place = (
        lower(
            pattern.direct(in_place=place),
            group.rank,
            group.world_size,
            binding,
            reduction=reduction,
        )
        for place in (False, True)
    )
    in_place = in_place if ever_in_place else plain
    return _CpuCollective(plain, in_place, call_name, output_shape, slot_bytes)


class _CpuCollective:
    """A collective without Python kernels.

    `plain` and `in_place` are its programs for an input outside of symmetric memory and for one
    inside; operand 0 is the input and operand 1 the output. The slot takes `slot_bytes` for a plain
    input, and with `always` for one in place too.
    """

    def __init__(
        self,
        plain: Program,
        in_place: Program,
        call_name: bytes,
        output_shape: Shape,
        slot_bytes: int,
        *,
        always: bool = False,
    ) -> None:
        plan = plain.plan(call_name)
        self._plans = (plan, plan if in_place is plain else in_place.plan(call_name))
        handles = (self._plans[0].handle, self._plans[1].handle)
        self._output_shape = output_shape
        self._wake = slot_bytes > _WAKE_BYTES
        slots = (slot_bytes, slot_bytes if always else 0)
        self._run = (*handles, *slots)
        self._start = (*handles, *slots) if self._wake else (handles[0],) * 2 + (slots[0],) * 2

    @property
    def output_shape(self) -> Shape:
        """See `Collective`."""
        return self._output_shape

    def run(self, group: Group, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Runs the collective in the calling thread."""
        with group.own_lock():
            try:
                torch.ops.symm_cp.run_collective.default(group.handle, *self._run, tensor, output)
            except RuntimeError as error:
                raise reported(error)  # noqa: B904 - the same error

    def start(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Starts the collective on a copy engine; see `Collective`."""
        with group.own_lock():
            try:
                return torch.ops.symm_cp.start_transfer.default(
                    group.handle, *self._start, tensor, self._output_shape, self._wake
                )
            except RuntimeError as error:
                raise reported(error)  # noqa: B904 - the same error
