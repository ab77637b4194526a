"""Pipelines on devices with streams: copy engines pull peers' shards ahead of their consumers.

The caller's stream computes; a second stream moves bytes and exchanges signals, without a
multiprocessor; a third stream signals peers when kernels have written data for them; a fourth runs
every second kernel of calls with `lanes`. A call begins at the current point of the caller's
stream, which waits for its end, so memory that the call allocates needs no further care. Background
collectives run in the channel "async", on a stream of their own: the caller's stream copies the
input, and goes on (do not touch a symmetric input until the transfer has been waited for).

While a graph is captured, calls take another workspace (base.py) and read nothing in place.
"""

from __future__ import annotations

import torch

from symm_cp import runtime
from symm_cp.cuda.all_reduce import AllReduceVariant, all_reduce_variant
from symm_cp.cuda.background import BackgroundGather, BackgroundScatter
from symm_cp.cuda.registry import kinds, spans_hosts
from symm_cp.cuda.stream_call import StreamCall, add_rows, staging_for
from symm_cp.cuda.stream_launches import (
    Exchange,
    all_reduce_launch,
    exchange_and_consume_launch,
    exchange_launch,
    exchange_together_launch,
    gather_into_launch,
    gather_launch,
    poll_launch,
    produce_launch,
    together_launch,
)
from symm_cp.group.hosts import apart_of
from symm_cp.group.memory import Group
from symm_cp.runtime.api import BackgroundRuntime, Runtime
from symm_cp.runtime.calls import (
    AllReduceCall,
    Collective,
    CountCall,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    GatherIntoCall,
    PollCall,
    ScatterCall,
    TogetherAndScatterCall,
    TogetherCall,
)
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import padded, part_offsets, scratch, scratch_rows
from symm_cp.tensors.pooled import PooledSums, pooled_rows, row_bytes_of
from symm_cp.tensors.shards import Shards, Split, viewing

# With this many ranks or more, shards without `gathered` are pulled into two places in turn instead
# of one place for each rank. With 3 ranks that would save one place, and cost waits.
_BOUNDED_FROM = 4


class StreamRuntime(BackgroundRuntime):
    """The runtime for devices with streams."""

    def _gather(self, call: GatherCall) -> None:
        """Pulls peers' shards to `gathered` if that is given, else to staging memory."""
        gathered, split = call.gathered, call.split
        ranks, rank = call.group.world_size, call.group.rank
        here, shards = StreamCall.of(call), call.shards.packed()
        target = None
        addresses = here.in_place(call.shards.own, some_empty=shards.sizes.some_empty)
        if gathered is not None and split is not None:
            target = (split, tuple(gathered.shape), gathered.element_size())
        equal = len(set(shards.shapes)) == 1
        bounded = gathered is None and equal and ranks >= _BOUNDED_FROM and not call.lanes
        in_place = addresses is not None
        launch = gather_launch(
            rank, shards.sizes, here.slots, in_place, bounded, target, lanes=call.lanes
        )
        order = peers(rank, ranks)
        # If `gathered` holds the first part, staging memory holds the others, also this rank's.
        needs_staging = len(shards.own) > 1 if gathered is not None else ranks > 1
        staging = staging_for(shards, (2 if bounded else ranks) if needs_staging else 0)
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

        operands = [*shards.own, staging, 0 if gathered is None else gathered, *(addresses or ())]
        with here.workspace(0 if in_place else shards.nbytes):
            here.run(launch, operands, {"consume": run_consume})

    def _gather_into(self, call: GatherIntoCall) -> None:
        """Copies the parts to their final places, without a kernel."""
        group, outputs, split = call.group, call.outputs, call.split
        here = StreamCall.of(call)
        shapes = split.shard_shapes(*call.shard)
        shards = Shards(call.shard, group.world_size, shapes).packed()
        places = tuple((tuple(output.shape), output.element_size()) for output in outputs)
        addresses = here.in_place(call.shard, some_empty=shards.sizes.some_empty)
        in_place = addresses is not None
        launch = gather_into_launch(group.rank, shards.sizes, split, places, here.slots, in_place)
        with here.workspace(0 if in_place else shards.nbytes):
            operands = [*shards.own, *outputs, *(addresses or ())]
            here.run(launch, operands, {"combine": lambda _: None})

    def _poll(self, call: PollCall) -> None:
        rank, ranks = call.group.rank, call.group.world_size
        shard, gathered = call.shard, call.gathered
        here = StreamCall.of(call)
        here.by_epoch()
        shards = Shards([shard], ranks).packed()
        if gathered is not None:
            split = Split.equal(shard.shape[0], ranks)
            target = split, tuple(gathered.shape), gathered.element_size()
            launch = poll_launch(rank, shards.sizes, here.slots, target)
            staging, pulled = gathered, gathered.unflatten(0, (ranks, -1))
        else:
            launch = poll_launch(rank, shards.sizes, here.slots)
            staging = staging_for(shards, ranks - 1)
            by_peer = staging[: (ranks - 1) * shards.nbytes].view(ranks - 1, shards.nbytes)
            pulled = by_peer[:, : shard.nbytes].view(shard.dtype).unflatten(1, shard.shape)
        with here.workspace(shards.nbytes):
            words = here.words()
            kernels = {"consume": lambda _: call.kernel(pulled, *words)}
            here.run(launch, [*shards.own, staging], kernels)

    def _count(self, call: CountCall) -> None:
        rank, ranks, out = call.group.rank, call.group.world_size, call.out
        here, nbytes = StreamCall.of(call), (out.nbytes,) * ranks
        here.by_epoch()
        launch = produce_launch(rank, nbytes, here.slots, together=True)
        sums, offsets = scratch_rows(out, ranks), part_offsets(nbytes)
        with here.workspace(offsets[-1]):
            pitch = padded(out.nbytes) // out.element_size()
            slot = here.viewing_slot()(0, (ranks, pitch), out.dtype)
            partials = slot[:, : out.numel()].unflatten(1, out.shape)
            words = here.words()
            kernels = {
                "produce": lambda _: call.kernel(partials, sums[rank], *words),
                "reduce": lambda _: add_rows(sums, out, mean=call.mean),
            }
            here.run(launch, [sums], kernels, out)

    def _gather_together(self, call: TogetherCall) -> None:
        """The peers' rows are pulled by one batch of copies."""
        shard, here = call.shard, StreamCall.of(call)
        pooled = pooled_rows(call.group.rank, call.layout, row_bytes_of(shard))
        launch = together_launch(pooled, here.slots)
        staging = scratch(shard[0], max(1, pooled.offsets[-1]))

        def run_consume_others(_: int) -> None:
            call.consume_others(pooled.views(viewing(staging), shard))

        with here.workspace(pooled.slot_offsets[-1]):
            kernels = {"consume": lambda _: call.consume(), "consume others": run_consume_others}
            here.run(launch, [*shard, staging], kernels)

    def _gather_and_scatter_together(self, call: TogetherAndScatterCall) -> None:
        """Peers pull their parts of the slot, which one kernel writes."""
        rank, shard, out = call.group.rank, call.shard, call.out
        here = StreamCall.of(call)
        rows = pooled_rows(rank, call.layout, row_bytes_of(shard))
        rows_of_sums = pooled_rows(rank, call.layout, row_bytes_of(shard, out.dtype))
        pooled = PooledSums(rows, rows_of_sums)
        launch = exchange_together_launch(pooled, here.slots)
        staging = scratch(shard[0], max(1, rows.offsets[-1]))
        sums = scratch_rows(out, call.group.world_size)
        with here.workspace(pooled.slot_bytes):
            in_slot, in_staging = here.viewing_slot(), viewing(staging)

            def run_consume_others(_: int) -> None:
                grads = rows_of_sums.views(in_slot, shard, out.dtype)
                call.consume_others(rows.views(in_staging, shard), grads)

            kernels = {
                "consume": lambda _: call.consume(sums[rank]),
                "consume others": run_consume_others,
                "reduce": lambda _: add_rows(sums, out),
            }
            here.run(launch, [*shard, staging, sums], kernels, out)

    def _scatter(self, call: ScatterCall) -> None:
        """Pulls peers' partial sums while this rank produces; one kernel adds all in rank order."""
        rank, out = call.group.rank, call.out
        here = StreamCall.of(call)
        launch = produce_launch(rank, call.nbytes, here.slots, lanes=call.lanes)
        sums, offsets = scratch_rows(out, call.group.world_size), part_offsets(call.nbytes)
        with here.workspace(offsets[-1]):
            in_slot = here.viewing_slot()

            def run_produce(target: int) -> None:
                if target == rank:
                    call.produce(target, sums[rank])
                else:
                    partial = in_slot(offsets[target], call.partials[target], out.dtype)
                    call.produce(target, partial)

            kernels = {
                "produce": run_produce,
                "reduce": lambda _: add_rows(sums, out, mean=call.mean),
            }
            here.run(launch, [sums], kernels, out)

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Pulls contributions to this rank's part while this rank still produces.

        One kernel adds them, and the peers' sums are pulled as they complete.
        """
        out, split = call.out, call.split
        rank, ranks = call.group.rank, call.group.world_size
        here = StreamCall.of(call)
        variant, chunks = all_reduce_variant(out, split, ranks)
        launch = all_reduce_launch(rank, chunks, variant, here.slots)
        offsets, one_shot = variant.offsets(chunks), variant is AllReduceVariant.ONE_SHOT
        if split is not None:
            own = split.of(rank, out)
        else:
            own = out.view(-1)[: None if one_shot else chunks[rank] // out.element_size()]
        sums = scratch_rows(own, ranks)
        with here.workspace(offsets[-1]):
            in_slot = here.viewing_slot()

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
                if not one_shot:  # peers read it from the slot
                    total = in_slot(offsets[rank], tuple(own.shape), out.dtype)
                add_rows(sums, total, mean=call.mean)

            here.run(launch, [sums, out], {"produce": run_produce, "reduce": run_reduce})

    def _exchange(self, call: ExchangeCall) -> None:
        """Pulls the peers' parts while this rank still gives or consumes."""
        rank, sizes = call.group.rank, call.sizes
        here = StreamCall.of(call)
        launch, places = exchange_and_consume_launch(rank, sizes, here.slots)
        offsets = part_offsets(sizes[rank])
        like = torch.empty(0, dtype=torch.uint8, device=call.device)
        staging = scratch(like, max(1, places[-1]))
        with here.workspace(max(part_offsets(each)[-1] for each in sizes)):
            in_slot, view_at = here.viewing_slot(), viewing(staging)

            def run_give(to: int) -> None:
                call.give(to, in_slot(offsets[to], (sizes[rank][to],), torch.uint8))

            def run_take(source: int) -> None:
                call.take(source, view_at(places[source], (sizes[source][rank],), torch.uint8))

            kernels = {"give": run_give, "consume": lambda _: call.consume(), "take": run_take}
            here.run(launch, [staging], kernels)

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        """Holds all shards and partial sums for this rank; with `ring`, two shards and one sum."""
        out, ring = call.out, call.ring
        rank, ranks = call.group.rank, call.group.world_size
        here, shards = StreamCall.of(call), call.shards.packed()
        exchange = Exchange(shards.sizes, call.nbytes, ring)
        launch = exchange_launch(rank, exchange, here.slots)
        staging = staging_for(shards, min(2, ranks) if ring else ranks)
        sums = scratch_rows(out, 1 if ring else ranks)
        order = peers(rank, ranks)
        with here.workspace(exchange.offsets[-1] + shards.nbytes):
            in_slot, view_at = here.viewing_slot(), viewing(staging)

            def run_consume(source: int) -> None:
                if source == rank:
                    call.consume(list(call.shards.own), rank, out if ring else sums[rank])
                    return
                place = order.index(source) % 2 if ring else source
                partial = in_slot(exchange.offsets[place], call.partials[source], out.dtype)
                parts = shards.views(source, view_at, place * shards.nbytes)
                call.consume(parts, source, partial)

            kernels = {
                "consume": run_consume,
                "add": lambda _: out.add_(sums[0]),
                "reduce": lambda _: add_rows(sums, out),
            }
            here.run(launch, [*shards.own, staging, sums], kernels, out)

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `BackgroundRuntime`."""
        return BackgroundGather(tensor, split, call_name)

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """See `BackgroundRuntime`."""
        return BackgroundScatter(tensor, split, group.rank, call_name, mean)


_streams = StreamRuntime()


def _choose(device: torch.device, group: Group) -> Runtime:
    together = spans_hosts(group, device) or apart_of(group, device) is None
    return _streams if together else runtime.FOR_RANKS_APART


runtime.serve(kinds, _choose)
