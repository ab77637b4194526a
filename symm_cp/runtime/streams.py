"""Pipelines on devices with streams: copy engines pull peers' shards ahead of their consumers.

The caller's stream computes; a second stream moves bytes and exchanges signals, without a
multiprocessor. A call begins where the caller's stream is, and that stream waits for its end, so
memory that it allocates needs no further care. Background collectives run in the channel "async",
on a stream of their own: the caller's stream copies its input away, and goes on (leave a symmetric
input alone until the transfer was waited for).

While a graph is captured, calls take another workspace (devices/base.py) and read nothing in
place.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._C._distributed_c10d import Work, _register_work

from symm_cp import wire
from symm_cp.devices import (
    Device,
    DeviceWorkspace,
    Signals,
    device_for,
    found_in_place,
    hold,
    workspace,
)
from symm_cp.group.memory import Group
from symm_cp.runtime.agreement import agree
from symm_cp.runtime.all_reduce_ways import AllReduceWay, all_reduce_way
from symm_cp.runtime.api import (
    Collective,
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
from symm_cp.runtime.round_trips import exchange_in_messages
from symm_cp.runtime.stream_launches import (
    CallMode,
    Exchange,
    all_reduce_launch,
    background_launch,
    combine_launch,
    exchange_and_consume_launch,
    exchange_launch,
    gather_launch,
    poll_launch,
    produce_launch,
)
from symm_cp.runtime.stream_program import Kernel, Launch
from symm_cp.runtime.sums import add_rows, real
from symm_cp.runtime.turns import relay_in_turns
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets, scratch, scratch_rows
from symm_cp.tensors.shards import Extent, Shape, Shapes, Shards, Split, ViewAt, viewing

# From this many ranks on, shards that nobody keeps are pulled into two places in turn.
_BOUNDED_FROM = 4


class _Call:
    """A call of a group on a device: what every pipeline begins with."""

    def __init__(self, group: Group, device: torch.device, call_name: bytes) -> None:
        self.group, self.name = group, call_name
        self.device = device_for(group, device)
        self.mode = CallMode.of(self.device, group)

    def in_place(
        self, shard: Sequence[torch.Tensor], *, some_empty: bool = False
    ) -> tuple[int, ...] | None:
        """Where the peers' shards are, if they are read there (`read_in_place`).

        Where a rank's shard is empty, and so has no address, none is read in place.
        """
        agree(self.group, self.name)
        found, way = None, b" through a slot"
        if len(shard) == 1 and not self.mode.capturing and not some_empty:
            found = found_in_place(shard[0], self.group)
        if found is not None:
            way = b" of symmetric tensor number %d" % found.number
        agree(self.group, self.name + way)
        return None if found is None else found.addresses

    @contextmanager
    def workspace(self, slot_bytes: int) -> Iterator[tuple[DeviceWorkspace, int]]:
        """The workspace of channel "sync" and the epoch of the call."""
        with self.group.lock, self.device.guard():
            space = workspace(self.group, self.device, "sync", slot_bytes)
            yield space, space.next_epoch()

    def run(
        self,
        launch: Launch,
        space: DeviceWorkspace,
        epoch: int,
        operands: Sequence[int],
        kernels: Mapping[str, Kernel],
        *used: torch.Tensor,
    ) -> None:
        """Hands out a launch; `used` is all memory of this rank that its streams may touch.

        A call that ends as it should leaves nothing to take care of: the caller's stream waits for
        the other one, or in the background `_start` sees to it. After an error that stream may go
        on for long, and the caller frees what it is at work on.
        """
        capturing = self.mode.capturing
        try:
            launch.run(space, epoch, operands, kernels, capturing=capturing, call_name=self.name)
        except BaseException:
            if not capturing:
                hold(space, *used)
                with contextlib.suppress(RuntimeError):  # of a failed device
                    self.device.used_by_copies(space.channel, *used)
            raise


def _staging(shards: Shards, places: int) -> torch.Tensor:
    return scratch(shards.own[0], max(1, places * shards.nbytes))


def _viewing_slot(space: DeviceWorkspace, epoch: int) -> ViewAt:
    base, view_at = space.layout.slot_offset(epoch), viewing(space.memory)
    return lambda offset, shape, dtype: view_at(base + offset, shape, dtype)


def _contiguous(shard: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Copy engines move runs of bytes.
    return [t.contiguous() for t in shard]


class StreamRuntime:
    """The runtime for devices with streams; see `runtime.api.Runtime`."""

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
        """See `Runtime`.

        Peers' shards are pulled to `gathered` where it is given (`consume` gets them as they lie
        there), else to staging memory.
        """
        ranks, rank = group.world_size, group.rank
        call = _Call(group, shard[0].device, call_name)
        shards, target = Shards(_contiguous(shard), ranks, shapes), None
        addresses = call.in_place(shard, some_empty=shards.sizes.some_empty)
        if gathered is not None:
            split = split or Split.equal(shard[0].shape[0], ranks)
            target = (split, tuple(gathered.shape), gathered.element_size())
        bounded = gathered is None and shards.sizes.equal and ranks >= _BOUNDED_FROM
        in_place = addresses is not None
        launch = gather_launch(rank, shards.sizes, call.mode, in_place, bounded, target)
        order = peers(rank, ranks)
        # Where the first part is kept, the others come to lie in staging memory, one's own too.
        needs_staging = len(shards.own) > 1 if gathered is not None else ranks > 1
        staging = _staging(shards, (2 if bounded else ranks) if needs_staging else 0)
        kept = split.parts(gathered) if gathered is not None and split is not None else ()
        # Equal shards that take turns lie in the same two places.
        staged: dict[int, list[torch.Tensor]] = {}

        def run_consume(source: int) -> None:
            if source == rank:
                consume(list(shards.own), rank)
                return
            place = order.index(source) % 2 if bounded else source
            parts = staged.get(place) or [shards.own[0]]
            if needs_staging and place not in staged:
                parts = shards.views(source, viewing(staging), place * shards.nbytes)
                staged[place] = parts
            if kept:
                parts[0] = kept[source]
            consume(parts, source)

        operands = [*(t.data_ptr() for t in shards.own), staging.data_ptr()]
        operands += [0 if gathered is None else gathered.data_ptr(), *(addresses or ())]
        with call.workspace(0 if in_place else shards.nbytes) as (space, epoch):
            kernels: dict[str, Kernel] = {"consume": run_consume}
            used = [*shards.own, staging, *(() if gathered is None else (gathered,))]
            call.run(launch, space, epoch, operands, kernels, *used)

    def all_gather_and_combine(
        self,
        group: Group,
        shard: torch.Tensor,
        combine: Combine,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """See `Runtime`. All shards are pulled, the own one as well."""
        ranks = group.world_size
        call = _Call(group, shard.device, call_name)
        parts = None if shapes is None else [(shape,) for shape in shapes]
        shards = Shards(_contiguous([shard]), ranks, parts)
        addresses = call.in_place([shard], some_empty=shards.sizes.some_empty)
        launch = combine_launch(group.rank, shards.sizes, call.mode, addresses is not None)
        staging = _staging(shards, ranks)

        def run_combine(_: int) -> None:
            view_at = viewing(staging)
            combine([shards.views(r, view_at, r * shards.nbytes)[0] for r in range(ranks)])

        operands = [shards.own[0].data_ptr(), staging.data_ptr(), *(addresses or ())]
        with call.workspace(0 if addresses is not None else shards.nbytes) as (space, epoch):
            kernels: dict[str, Kernel] = {"combine": run_combine}
            call.run(launch, space, epoch, operands, kernels, *shards.own, staging)

    def all_gather_and_poll(
        self, group: Group, shard: Sequence[torch.Tensor], kernel: Poll, call_name: bytes
    ) -> None:
        """See `Runtime`."""
        agree(group, call_name)
        ranks = group.world_size
        call = _Call(group, shard[0].device, call_name)
        assert not call.mode.capturing, "numbers cannot change in a graph"
        shards = Shards(_contiguous(shard), ranks)
        launch = poll_launch(group.rank, shards.sizes, call.mode)
        staging = _staging(shards, ranks - 1)
        by_peer = staging[: (ranks - 1) * shards.nbytes].view(ranks - 1, shards.nbytes)
        parts = zip(shards.sizes.offsets, shards.sizes.parts[0], shards.own, strict=False)
        pulled = [
            by_peer[:, offset : offset + size].view(t.dtype).unflatten(1, t.shape)
            for offset, size, t in parts
        ]
        with call.workspace(shards.nbytes) as (space, epoch):
            words, step = space.flags("arrived"), wire.FLAG_BYTES // 4
            kernels: dict[str, Kernel] = {"consume": lambda _: kernel(pulled, words, step, epoch)}
            used = [*shards.own, staging]
            call.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used)

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
        """See `Runtime`.

        Peers' partial sums are pulled while this rank still produces, and one kernel adds all of
        them in rank order.
        """
        agree(group, call_name)
        rank, ranks = group.rank, group.world_size
        call = _Call(group, out.device, call_name)
        partials = [tuple(out.shape)] * ranks if shapes is None else shapes
        sizes = tuple(math.prod(shape) * out.element_size() for shape in partials)
        launch = produce_launch(rank, sizes, call.mode)
        sums, offsets = scratch_rows(out, ranks), part_offsets(sizes)
        with call.workspace(offsets[-1]) as (space, epoch):
            in_slot = _viewing_slot(space, epoch)

            def run_produce(target: int) -> None:
                if target == rank:
                    produce(target, sums[rank])
                else:
                    produce(target, in_slot(offsets[target], partials[target], out.dtype))

            kernels: dict[str, Kernel] = {
                "produce": run_produce,
                "reduce": lambda _: add_rows(sums, out, mean=mean),
            }
            call.run(launch, space, epoch, [sums.data_ptr()], kernels, sums, out)

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
        """See `Runtime`.

        Contributions to this rank's part are pulled while it still produces, one kernel adds them,
        and the peers' sums are pulled as they come.
        """
        agree(group, call_name)
        rank, ranks = group.rank, group.world_size
        call = _Call(group, out.device, call_name)
        way, chunks = all_reduce_way(out, split, ranks)
        launch = all_reduce_launch(rank, chunks, way, call.mode)
        offsets, one_shot = way.offsets(chunks), way is AllReduceWay.ONE_SHOT
        if split is not None:
            own = split.of(rank, out)
        else:
            own = out.view(-1)[: None if one_shot else chunks[rank] // out.element_size()]
        sums = scratch_rows(own, ranks)
        with call.workspace(offsets[-1]) as (space, epoch):
            in_slot = _viewing_slot(space, epoch)

            def run_produce(target: int) -> None:
                if ranks == 1:
                    produce(target, out)
                elif split is None:
                    produce(target, in_slot(0, tuple(out.shape), out.dtype))
                elif target == rank:
                    produce(target, sums[rank])
                else:
                    shape = tuple(split.shape_of(target, out.shape))
                    produce(target, in_slot(offsets[target], shape, out.dtype))

            def run_reduce(_: int) -> None:
                total = own
                if not one_shot:  # where the peers read it
                    total = in_slot(offsets[rank], tuple(own.shape), out.dtype)
                add_rows(sums, total, mean=mean)

            kernels: dict[str, Kernel] = {"produce": run_produce, "reduce": run_reduce}
            operands = [sums.data_ptr(), out.data_ptr()]
            call.run(launch, space, epoch, operands, kernels, sums, out)

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
        """See `Runtime`. What the peers give is pulled while this rank still gives or consumes."""
        agree(group, call_name)
        rank = group.rank
        call = _Call(group, device, call_name)
        launch, places = exchange_and_consume_launch(rank, sizes, call.mode)
        offsets = part_offsets(sizes[rank])
        like = torch.empty(0, dtype=torch.uint8, device=device)
        staging = scratch(like, max(1, places[-1]))
        with call.workspace(max(part_offsets(each)[-1] for each in sizes)) as (space, epoch):
            in_slot, view_at = _viewing_slot(space, epoch), viewing(staging)

            def run_give(to: int) -> None:
                give(to, in_slot(offsets[to], (sizes[rank][to],), torch.uint8))

            def run_take(source: int) -> None:
                take(source, view_at(places[source], (sizes[source][rank],), torch.uint8))

            kernels: dict[str, Kernel] = {
                "give": run_give,
                "consume": lambda _: consume(),
                "take": run_take,
            }
            call.run(launch, space, epoch, [staging.data_ptr()], kernels, staging)

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """See `Runtime`. Kernels copy to the slot and from the memory that copy engines fill."""
        exchange_in_messages(self, group, packed, tensors, outputs, call_name)

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
        """See `Runtime`.

        Without `ring` there is room here for all shards and all partial sums for this rank; with it
        for two shards and one partial sum.
        """
        agree(group, call_name)
        rank, ranks = group.rank, group.world_size
        call = _Call(group, out.device, call_name)
        shards = Shards(_contiguous(shard), ranks, shapes)
        sizes = tuple(math.prod(shape) * out.element_size() for shape in partials)
        exchange = Exchange(shards.sizes, sizes, ring)
        launch = exchange_launch(rank, exchange, call.mode)
        staging = _staging(shards, min(2, ranks) if ring else ranks)
        sums = scratch_rows(out, 1 if ring else ranks)
        order = peers(rank, ranks)
        with call.workspace(exchange.offsets[-1] + shards.nbytes) as (space, epoch):
            in_slot, view_at = _viewing_slot(space, epoch), viewing(staging)

            def run_consume(source: int) -> None:
                if source == rank:
                    consume(list(shard), rank, out if ring else sums[rank])
                    return
                place = order.index(source) % 2 if ring else source
                partial = in_slot(exchange.offsets[place], partials[source], out.dtype)
                parts = shards.views(source, view_at, place * shards.nbytes)
                consume(parts, source, partial)

            kernels: dict[str, Kernel] = {
                "consume": run_consume,
                "add": lambda _: out.add_(sums[0]),
                "reduce": lambda _: add_rows(sums, out),
            }
            used = [*shards.own, staging, sums]
            call.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used, out)

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
        """See `Runtime`. The ranks take turns: flags of streams have no pieces."""
        relay_in_turns(self, group, step, like, shapes, call_name, reverse=reverse)

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `Runtime`."""
        return _BackgroundGather(tensor, split, call_name)

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `Runtime`."""
        return _BackgroundScatter(tensor, split, group.rank, call_name, mean)


class _Transfer(Work):
    """What `wait_tensor` waits for: the current stream then follows the transfer."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self._ended = device, device.copies_ended("async")

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self._device.guard():  # whoever waits may be on another device, or a new thread
            self._ended.wait()
        return True


def _start(
    group: Group,
    tensor: torch.Tensor,
    call_name: bytes,
    pattern: patterns.Pattern,
    chunks: Extent,
    target: torch.Tensor,
    result: torch.Tensor,
    kernels: dict[str, Callable[[int], None]],
) -> None:
    """Runs a background pattern: `target` is its second operand, `result` what is waited for."""
    call = _Call(group, tensor.device, call_name)
    device = call.device
    source = tensor.contiguous()
    scatter = pattern is patterns.BACKGROUND_REDUCE_SCATTER
    with group.lock, device.guard():
        # torch's kernels reset "done": whoever reads in place and waits for that of this call would
        # take the one for the slot.
        through_slot = call.mode.signals is Signals.TORCH
        some_empty = not scatter and min(chunks.nbytes) == 0
        addresses = call.in_place([tensor], some_empty=some_empty or through_slot)
        room = sum(chunks.nbytes) if scatter else max(chunks.nbytes)
        space = workspace(group, device, "async", 0 if addresses is not None else room)
        launch = background_launch(pattern, group.rank, chunks, call.mode, addresses is not None)
        operands = [source.data_ptr(), target.data_ptr(), *(addresses or ())]
        used = (source, target, result)
        call.run(launch, space, space.next_epoch(), operands, kernels, *used)
        device.used_by_copies("async", *used)
        _register_work(result, _Transfer(device))


class _BackgroundGather:
    def __init__(self, tensor: torch.Tensor, split: Split, call_name: bytes) -> None:
        self._output_shape, self._name = split.whole_shape(tensor.shape), call_name
        self._chunks = Extent.split(1, split, self._output_shape, tensor.element_size())

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`."""
        output = tensor.new_empty(self._output_shape) if out is None else out
        pattern = patterns.BACKGROUND_ALL_GATHER
        _start(group, tensor, self._name, pattern, self._chunks, output, output, {})
        return output


class _BackgroundScatter:
    def __init__(
        self, tensor: torch.Tensor, split: Split, rank: int, call_name: bytes, mean: bool
    ) -> None:
        self._output_shape, self._name = split.shape_of(rank, tensor.shape), call_name
        self._chunks = Extent.split(0, split, tensor.shape, tensor.element_size())
        self._mean = mean

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`."""
        numbers = real(tensor)
        more = numbers.shape[tensor.dim() :]
        output = numbers.new_empty((*self._output_shape, *more)) if out is None else real(out)
        partials = numbers.new_empty((group.world_size, *output.shape))
        kernels: dict[str, Kernel] = {
            "reduce": lambda _: add_rows(partials, output, mean=self._mean)
        }
        pattern = patterns.BACKGROUND_REDUCE_SCATTER
        _start(group, numbers, self._name, pattern, self._chunks, partials, output, kernels)
        if out is not None:
            return out
        return torch.view_as_complex(output) if tensor.is_complex() else output
