"""Pipelines on devices with streams: copy engines pull peers' shards ahead of their consumers.

The caller's stream computes; a second stream moves bytes and exchanges signals, without a
multiprocessor. A call begins where the caller's stream is, and that stream waits for its end, so
memory that it allocates needs no further care. Background collectives run in the channel "async",
on a stream of their own: the caller's stream copies its input away, and goes on (leave a symmetric
input alone until the transfer was waited for).

While a graph is captured, calls take another workspace (base.py) and read nothing in place.

With `SYMM_CP_DEBUG=1` ranks compare their calls before any data moves. On CPU each call carries a
record of itself (csrc/channel/channel.h). Streams compare nothing but flags: ranks that disagree
would wait for each other, or mix their bytes. In debug mode they compare their calls through the
group's store, which takes a round trip for each call.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._C._distributed_c10d import Work, _register_work

from symm_cp import env, runtime
from symm_cp.cuda import kernels
from symm_cp.cuda.base import Device, DeviceWorkspace, Signals
from symm_cp.cuda.in_place import found_in_place
from symm_cp.cuda.registry import device_for, kind_for, kinds, spans_hosts
from symm_cp.cuda.stream_launches import (
    CallMode,
    Exchange,
    all_reduce_launch,
    background_launch,
    combine_launch,
    exchange_and_consume_launch,
    exchange_launch,
    exchange_together_launch,
    gather_launch,
    poll_launch,
    produce_launch,
    together_launch,
)
from symm_cp.cuda.stream_program import Launch
from symm_cp.cuda.workspaces import give_up, hold, workspace
from symm_cp.group.hosts import hosts_of
from symm_cp.group.liveness import generation, wait_limit
from symm_cp.group.memory import Group, StateKey, reported
from symm_cp.native import wire
from symm_cp.runtime.all_reduce import AllReduceVariant, all_reduce_variant
from symm_cp.runtime.api import (
    AllReduceCall,
    BackgroundRuntime,
    Collective,
    CombineCall,
    ConsumeHere,
    ConsumeOthers,
    ConsumeOthersAndProduce,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    Poll,
    Runtime,
    ScatterCall,
)
from symm_cp.runtime.hosts import HostsRuntime
from symm_cp.runtime.program import Kernel
from symm_cp.schedule import patterns
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets, scratch, scratch_rows
from symm_cp.tensors.dtypes import real, wide
from symm_cp.tensors.pooled import PooledSums, pooled_rows, row_bytes_of
from symm_cp.tensors.shards import Extent, Shards, Split, ViewAt, viewing


class _Compared:
    """The calls that a group's ranks have compared: all ranks number them alike.

    Of each number either all ranks were there, or one gave up waiting for a rank, which then passes
    over that number. Which it was is decided once, by the first rank that says so.
    """

    def __init__(self) -> None:
        self.number, self.met = 1, 0

    def agree(self, group: Group, call_name: bytes, limit: datetime.timedelta) -> None:
        """Raises `RuntimeError` on every rank unless all ranks make this call now."""
        store, begin = group.store(), f"symm_cp/{generation(group)}/call"

        def key(number: int, what: object) -> str:
            return f"{begin}/{number}/{what}"

        while store.check([key(self.number, "end")]):  # without this rank
            self.number += 1
        number = self.number
        self.number += 1
        store.set(key(number, group.rank), call_name)
        end, missing = _MET, None
        for rank in range(group.world_size):
            try:
                store.wait([key(number, rank)], limit)
            except RuntimeError as error:
                end, missing = f"rank {group.rank} gave up", error
                break
        end = store.compare_set(key(number, "end"), "", end).decode()
        if end != _MET:
            raise reported(
                RuntimeError(
                    f"symm_cp: {call_name.decode()}: rank {rank} has not made its call number "
                    f"{number} of group {group.name!r} within {limit.total_seconds():g} s"
                    if missing is not None
                    else f"symm_cp: {call_name.decode()}: {end} waiting for call number {number} "
                    f"of group {group.name!r}"
                )
            ) from missing
        calls = [store.get(key(number, rank)).decode() for rank in range(group.world_size)]
        # Every rank has come to this call: nobody needs the keys of those before.
        for before in range(self.met, number):
            store.delete_key(key(before, group.rank))
            if group.rank == 0:
                store.delete_key(key(before, "end"))
        self.met = number
        if len(set(calls)) > 1:
            by_rank = ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            raise reported(RuntimeError(f"symm_cp: ranks disagree: {by_rank}"))


_MET = "met"
_COMPARED: StateKey[_Compared] = StateKey("compared calls")


def agree(group: Group, call_name: bytes) -> None:
    """Raises `RuntimeError` on every rank unless all ranks make this call now; only in debug mode.

    Also when a rank makes no call within the time-out.
    """
    if env.debug() and group.world_size > 1:
        group.state(_COMPARED, _Compared).agree(group, call_name, wait_limit(group))


def add_rows(rows: torch.Tensor, out: torch.Tensor, *, mean: bool = False) -> None:
    """Writes `rows[0] + rows[1] + ...` to `out`, added in that order, in float32 for 16-bit types.

    `rows` is (W, ...) for `out` of shape (...); each row is contiguous.
    """
    if out.numel() == 0:
        return
    kind = kind_for(rows.device)
    if kind is not None and kind.triton:
        kernels.add_rows(rows, out, mean=mean)
        return
    total = rows[0].to(wide(rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    if mean:
        total /= rows.shape[0]
    out.copy_(total)


# Number of ranks from which on shards without `gathered` are pulled into two places in turn instead
# of one place for each rank. With 3 ranks that would save one place, and cost waits.
_BOUNDED_FROM = 4


class _Call:
    """A call of a group on a device; every pipeline begins with one."""

    def __init__(self, group: Group, device: torch.device, call_name: bytes) -> None:
        self.group, self.name = group, call_name
        self.device = device_for(group, device)
        self.mode = CallMode.of(self.device, group)

    @classmethod
    def of(cls, shards: Shards, group: Group, call_name: bytes) -> _Call:
        """A call on the device of the shards."""
        return cls(group, shards.own[0].device, call_name)

    def in_place(
        self, shard: Sequence[torch.Tensor], *, some_empty: bool = False
    ) -> tuple[int, ...] | None:
        """Where the peers' shards are, if they are read there (`read_in_place`).

        Where a rank's shard is empty, and so has no address, none is read in place.
        """
        agree(self.group, self.name)
        found, route = None, b" through a slot"
        if len(shard) == 1 and not self.mode.capturing and not some_empty:
            found = found_in_place(shard[0], self.group)
        if found is not None:
            route = b" of symmetric tensor number %d" % found.number
        agree(self.group, self.name + route)
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

        A call without an error needs nothing more: the caller's stream waits for
        the other one, or in the background `_start` sees to it. After an error that stream may run
        on for long, while the caller frees the memory that it uses.
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


class StreamRuntime(BackgroundRuntime):
    """The runtime for devices with streams."""

    def _gather(self, call: GatherCall) -> None:
        """Pulls peers' shards to `gathered` if that is given, else to staging memory."""
        group, gathered, split = call.group, call.gathered, call.split
        ranks, rank = group.world_size, group.rank
        here, shards, target = _Call.of(call.shards, group, call.name), call.shards.packed(), None
        addresses = here.in_place(call.shards.own, some_empty=shards.sizes.some_empty)
        if gathered is not None and split is not None:
            target = (split, tuple(gathered.shape), gathered.element_size())
        bounded = gathered is None and shards.sizes.equal and ranks >= _BOUNDED_FROM
        in_place = addresses is not None
        launch = gather_launch(rank, shards.sizes, here.mode, in_place, bounded, target)
        order = peers(rank, ranks)
        # If `gathered` takes the first part, staging memory takes the others, this rank's too.
        needs_staging = len(shards.own) > 1 if gathered is not None else ranks > 1
        staging = _staging(shards, (2 if bounded else ranks) if needs_staging else 0)
        in_gathered = split.parts(gathered) if gathered is not None and split is not None else ()
        # Equal shards that take turns lie in the same two places.
        staged: dict[int, list[torch.Tensor]] = {}

        def run_consume(source: int) -> None:
            if source == rank:
                call.consume(list(shards.own), rank)
                return
            place = order.index(source) % 2 if bounded else source
            parts = staged.get(place) or [shards.own[0]]
            if needs_staging and place not in staged:
                parts = shards.views(source, viewing(staging), place * shards.nbytes)
                staged[place] = parts
            if in_gathered:
                parts[0] = in_gathered[source]
            call.consume(parts, source)

        operands = [*(t.data_ptr() for t in shards.own), staging.data_ptr()]
        operands += [0 if gathered is None else gathered.data_ptr(), *(addresses or ())]
        with here.workspace(0 if in_place else shards.nbytes) as (space, epoch):
            kernels: dict[str, Kernel] = {"consume": run_consume}
            used = [*shards.own, staging, *(() if gathered is None else (gathered,))]
            here.run(launch, space, epoch, operands, kernels, *used)

    def _combine(self, call: CombineCall) -> None:
        """Pulls all shards, this rank's as well."""
        ranks, shards = call.group.world_size, call.shards.packed()
        here = _Call.of(shards, call.group, call.name)
        addresses = here.in_place(call.shards.own, some_empty=shards.sizes.some_empty)
        launch = combine_launch(call.group.rank, shards.sizes, here.mode, addresses is not None)
        staging = _staging(shards, ranks)

        def run_combine(_: int) -> None:
            view_at = viewing(staging)
            call.combine([shards.views(r, view_at, r * shards.nbytes)[0] for r in range(ranks)])

        operands = [shards.own[0].data_ptr(), staging.data_ptr(), *(addresses or ())]
        with here.workspace(0 if addresses is not None else shards.nbytes) as (space, epoch):
            kernels: dict[str, Kernel] = {"combine": run_combine}
            here.run(launch, space, epoch, operands, kernels, *shards.own, staging)

    def all_gather_and_poll(
        self, group: Group, shard: Sequence[torch.Tensor], kernel: Poll, call_name: bytes
    ) -> None:
        """See `Runtime`."""
        agree(group, call_name)
        ranks = group.world_size
        here = _Call(group, shard[0].device, call_name)
        assert not here.mode.capturing, "numbers cannot change in a graph"
        shards = Shards(shard, ranks).packed()
        launch = poll_launch(group.rank, shards.sizes, here.mode)
        staging = _staging(shards, ranks - 1)
        by_peer = staging[: (ranks - 1) * shards.nbytes].view(ranks - 1, shards.nbytes)
        parts = zip(shards.sizes.offsets, shards.sizes.parts[0], shards.own, strict=False)
        pulled = [
            by_peer[:, offset : offset + size].view(t.dtype).unflatten(1, t.shape)
            for offset, size, t in parts
        ]
        with here.workspace(shards.nbytes) as (space, epoch):
            words, step = space.flags("arrived"), wire.FLAG_BYTES // 4
            kernels: dict[str, Kernel] = {"consume": lambda _: kernel(pulled, words, step, epoch)}
            used = [*shards.own, staging]
            here.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used)

    def all_gather_and_consume_together(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: ConsumeHere,
        consume_others: ConsumeOthers,
        call_name: bytes,
        layout: SequenceLayout,
    ) -> None:
        """See `Runtime`. The peers' rows are pulled by one batch of copies."""
        agree(group, call_name)
        here = _Call(group, shard[0].device, call_name)
        pooled = pooled_rows(group.rank, layout, row_bytes_of(shard))
        launch = together_launch(pooled, here.mode)
        staging = scratch(shard[0], max(1, pooled.offsets[-1]))
        with here.workspace(pooled.slot_offsets[-1]) as (space, epoch):
            kernels: dict[str, Kernel] = {
                "consume": lambda _: consume(),
                "consume others": lambda _: consume_others(pooled.views(viewing(staging), shard)),
            }
            used = [*shard, staging]
            here.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used)

    def consume_and_reduce_scatter_together(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: Callable[[torch.Tensor], None],
        consume_others: ConsumeOthersAndProduce,
        out: torch.Tensor,
        call_name: bytes,
        layout: SequenceLayout,
    ) -> None:
        """See `Runtime`. Peers pull their parts of what one kernel wrote to the slot."""
        agree(group, call_name)
        rank, here = group.rank, _Call(group, out.device, call_name)
        rows = pooled_rows(rank, layout, row_bytes_of(shard))
        sums_rows = pooled_rows(rank, layout, row_bytes_of(shard, out.dtype))
        pooled = PooledSums(rows, sums_rows)
        launch = exchange_together_launch(pooled, here.mode)
        staging = scratch(shard[0], max(1, rows.offsets[-1]))
        sums = scratch_rows(out, group.world_size)
        with here.workspace(pooled.slot_bytes) as (space, epoch):
            in_slot, in_staging = _viewing_slot(space, epoch), viewing(staging)

            def run_consume_others(_: int) -> None:
                grads = sums_rows.views(in_slot, shard, out.dtype)
                consume_others(rows.views(in_staging, shard), grads)

            kernels: dict[str, Kernel] = {
                "consume": lambda _: consume(sums[rank]),
                "consume others": run_consume_others,
                "reduce": lambda _: add_rows(sums, out),
            }
            used = [*shard, staging, sums]
            here.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used, out)

    def _scatter(self, call: ScatterCall) -> None:
        """Pulls peers' partial sums while this rank produces; one kernel adds all in rank order."""
        group, out = call.group, call.out
        agree(group, call.name)
        rank, here = group.rank, _Call(group, out.device, call.name)
        launch = produce_launch(rank, call.nbytes, here.mode)
        sums, offsets = scratch_rows(out, group.world_size), part_offsets(call.nbytes)
        with here.workspace(offsets[-1]) as (space, epoch):
            in_slot = _viewing_slot(space, epoch)

            def run_produce(target: int) -> None:
                if target == rank:
                    call.produce(target, sums[rank])
                else:
                    partial = in_slot(offsets[target], call.partials[target], out.dtype)
                    call.produce(target, partial)

            kernels: dict[str, Kernel] = {
                "produce": run_produce,
                "reduce": lambda _: add_rows(sums, out, mean=call.mean),
            }
            here.run(launch, space, epoch, [sums.data_ptr()], kernels, sums, out)

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Pulls contributions to this rank's part while this rank still produces.

        One kernel adds them, and the peers' sums are pulled as they are done.
        """
        group, out, split = call.group, call.out, call.split
        agree(group, call.name)
        rank, ranks = group.rank, group.world_size
        here = _Call(group, out.device, call.name)
        variant, chunks = all_reduce_variant(out, split, ranks)
        launch = all_reduce_launch(rank, chunks, variant, here.mode)
        offsets, one_shot = variant.offsets(chunks), variant is AllReduceVariant.ONE_SHOT
        if split is not None:
            own = split.of(rank, out)
        else:
            own = out.view(-1)[: None if one_shot else chunks[rank] // out.element_size()]
        sums = scratch_rows(own, ranks)
        with here.workspace(offsets[-1]) as (space, epoch):
            in_slot = _viewing_slot(space, epoch)

            def run_produce(target: int) -> None:
                if ranks == 1:
                    call.produce(target, out)
                elif split is None:
                    call.produce(target, in_slot(0, tuple(out.shape), out.dtype))
                elif target == rank:
                    call.produce(target, sums[rank])
                else:
                    shape = tuple(split.shape_of(target, out.shape))
                    call.produce(target, in_slot(offsets[target], shape, out.dtype))

            def run_reduce(_: int) -> None:
                total = own
                if not one_shot:  # where the peers read it
                    total = in_slot(offsets[rank], tuple(own.shape), out.dtype)
                add_rows(sums, total, mean=call.mean)

            kernels: dict[str, Kernel] = {"produce": run_produce, "reduce": run_reduce}
            operands = [sums.data_ptr(), out.data_ptr()]
            here.run(launch, space, epoch, operands, kernels, sums, out)

    def _exchange(self, call: ExchangeCall) -> None:
        """Pulls the peers' parts while this rank still gives or consumes."""
        group, sizes, device = call.group, call.sizes, call.device
        agree(group, call.name)
        rank, here = group.rank, _Call(group, device, call.name)
        launch, places = exchange_and_consume_launch(rank, sizes, here.mode)
        offsets = part_offsets(sizes[rank])
        like = torch.empty(0, dtype=torch.uint8, device=device)
        staging = scratch(like, max(1, places[-1]))
        with here.workspace(max(part_offsets(each)[-1] for each in sizes)) as (space, epoch):
            in_slot, view_at = _viewing_slot(space, epoch), viewing(staging)

            def run_give(to: int) -> None:
                call.give(to, in_slot(offsets[to], (sizes[rank][to],), torch.uint8))

            def run_take(source: int) -> None:
                call.take(source, view_at(places[source], (sizes[source][rank],), torch.uint8))

            kernels: dict[str, Kernel] = {
                "give": run_give,
                "consume": lambda _: call.consume(),
                "take": run_take,
            }
            here.run(launch, space, epoch, [staging.data_ptr()], kernels, staging)

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        """Without `ring`, holds all shards and all partial sums for this rank.

        With it: two shards and one partial sum.
        """
        group, out, ring = call.group, call.out, call.ring
        agree(group, call.name)
        rank, ranks = group.rank, group.world_size
        here, shards = _Call(group, out.device, call.name), call.shards.packed()
        exchange = Exchange(shards.sizes, call.nbytes, ring)
        launch = exchange_launch(rank, exchange, here.mode)
        staging = _staging(shards, min(2, ranks) if ring else ranks)
        sums = scratch_rows(out, 1 if ring else ranks)
        order = peers(rank, ranks)
        with here.workspace(exchange.offsets[-1] + shards.nbytes) as (space, epoch):
            in_slot, view_at = _viewing_slot(space, epoch), viewing(staging)

            def run_consume(source: int) -> None:
                if source == rank:
                    call.consume(list(call.shards.own), rank, out if ring else sums[rank])
                    return
                place = order.index(source) % 2 if ring else source
                partial = in_slot(exchange.offsets[place], call.partials[source], out.dtype)
                parts = shards.views(source, view_at, place * shards.nbytes)
                call.consume(parts, source, partial)

            kernels: dict[str, Kernel] = {
                "consume": run_consume,
                "add": lambda _: out.add_(sums[0]),
                "reduce": lambda _: add_rows(sums, out),
            }
            used = [*shards.own, staging, sums]
            here.run(launch, space, epoch, [t.data_ptr() for t in used], kernels, *used, out)

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `BackgroundRuntime`."""
        return _BackgroundGather(tensor, split, call_name)

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `BackgroundRuntime`."""
        return _BackgroundScatter(tensor, split, group.rank, call_name, mean)

    def give_up(self, group: Group, error: BaseException) -> None:
        """See `Runtime`. Peers that wait for this rank's streams abort."""
        give_up(group, error)


_streams = StreamRuntime()
_streams_over_hosts = HostsRuntime(_streams)


def _choose(device: torch.device, group: Group) -> Runtime:
    alone = spans_hosts(group, device) or hosts_of(group, device) is None
    return _streams if alone else _streams_over_hosts


runtime.serve(kinds, _choose)


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
    """Runs a background pattern with the operands `tensor` and `target`; callers await `result`."""
    call = _Call(group, tensor.device, call_name)
    device = call.device
    source = tensor.contiguous()
    scatter = pattern is patterns.BACKGROUND_REDUCE_SCATTER
    with group.lock, device.guard():
        # torch's kernels reset "done": a rank that reads in place and waits for this call's signal
        # would take the signal for the slot.
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
