"""The programs of pipelines on streams: registered variants, bound to memory and lowered.

Each is made once for the sizes of a call, and cached. `slots`: 1 if the call is captured into a
graph, else 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from symm_cp.cuda.all_reduce import AllReduceVariant
from symm_cp.cuda.stream_program import Launch, lower
from symm_cp.runtime.calls import Sizes
from symm_cp.runtime.lowering import Binding
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets
from symm_cp.tensors.pooled import PooledRows, PooledSums
from symm_cp.tensors.shards import Extent, Parts, Shape, ShardSizes, Split


def _own_parts(sizes: ShardSizes, rank: int) -> Parts:
    return tuple(Extent.even(i, size) for i, size in enumerate(sizes.parts[rank]))


@lru_cache(maxsize=512)
def gather_launch(
    rank: int,
    sizes: ShardSizes,
    slots: int,
    in_place: bool,
    bounded: bool,
    gathered: tuple[Split, Shape, int] | None,
    *,
    lanes: bool = False,
) -> Launch:
    """All-gather and consume; `gathered`: (split, shape, bytes per element) of the caller's place.

    Operands: the parts of the own shard, the staging memory, the caller's place and, if read in
    place, the tensors of all ranks.
    """
    ranks, own = len(sizes.parts), _own_parts(sizes, rank)
    options = {"bounded": True} if bounded else {"keep": True} if gathered is not None else {}
    variant = patterns.ALL_GATHER_AND_CONSUME.staged(in_place=in_place, lanes=lanes, **options)
    pulled = sizes.places_in_turn(len(own), (0, 1)) if bounded else sizes.places_by_rank(len(own))
    if gathered is not None:
        pulled = (Extent.split(len(own) + 1, *gathered), *pulled[1:])
    symmetric = {
        peer: (Extent.even(len(own) + 2, parts[0]),) for peer, parts in enumerate(sizes.parts)
    }
    binding = Binding(
        {"input": own, "gathered": pulled}, {"slot": sizes.slots(), "symmetric": symmetric}
    )
    return lower(variant, rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def together_launch(pooled: PooledRows, slots: int) -> Launch:
    """All-gather and consume together. Operands: the own tensors, the staging memory."""
    own = pooled.input()
    binding = Binding({"input": own, "gathered": pooled.pooled(len(own))}, {"slot": pooled.slots()})
    variant, ranks = patterns.ALL_GATHER_AND_CONSUME.staged(together=True), len(pooled.ranks)
    return lower(variant, pooled.rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def gather_into_launch(
    rank: int,
    sizes: ShardSizes,
    split: Split,
    outputs: tuple[tuple[Shape, int], ...],
    slots: int,
    in_place: bool,
) -> Launch:
    """All-gather and combine; `outputs` are the shape and bytes per element of each result.

    Operands: the parts of the own shard, the results and, if read in place, all ranks' shards.
    """
    own = _own_parts(sizes, rank)
    places = tuple(Extent.split(len(own) + i, split, *output) for i, output in enumerate(outputs))
    shards = len(own) + len(places)
    symmetric = {peer: (Extent.even(shards, parts[0]),) for peer, parts in enumerate(sizes.parts)}
    binding = Binding(
        {"input": own, "gathered": places}, {"slot": sizes.slots(), "symmetric": symmetric}
    )
    variant = patterns.ALL_GATHER_AND_COMBINE.staged(in_place=in_place)
    return lower(variant, rank, len(sizes.parts), binding, slots=slots)


@lru_cache(maxsize=512)
def poll_launch(
    rank: int, sizes: ShardSizes, slots: int, gathered: tuple[Split, Shape, int] | None = None
) -> Launch:
    """All-gather and poll; `gathered` as for `gather_launch`.

    Operands: the own shard, then the staging memory or the caller's place.
    """
    ranks, own = len(sizes.parts), _own_parts(sizes, rank)
    if gathered is not None:
        pulled: Parts = (Extent.split(1, *gathered),)
    else:  # in the order in which they are pulled
        turns = {peer: turn for turn, peer in enumerate(peers(rank, ranks))}
        pulled = sizes.places_in_turn(1, [turns.get(peer, 0) for peer in range(ranks)])
    binding = Binding({"input": own, "gathered": pulled}, {"slot": sizes.slots()})
    variant = patterns.ALL_GATHER_AND_POLL.staged(**({} if gathered is None else {"keep": True}))
    return lower(variant, rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def produce_launch(
    rank: int,
    partials: tuple[int, ...],
    slots: int,
    *,
    together: bool = False,
    lanes: bool = False,
) -> Launch:
    """Produce and reduce-scatter. Operand: the partial sums for this rank (`scratch_rows`)."""
    ranks = len(partials)
    binding = Binding(
        {
            "slot": (Extent.aligned(None, partials),),
            "partials": (Extent.aligned(0, (partials[rank],) * ranks),),
        }
    )
    variant = patterns.PRODUCE_AND_REDUCE_SCATTER.staged(together=together, lanes=lanes)
    return lower(variant, rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def exchange_and_consume_launch(
    rank: int, sizes: Sizes, slots: int
) -> tuple[Launch, tuple[int, ...]]:
    """Exchange and consume; `sizes[source][to]` are bytes. Operand: memory for the received parts.

    Returns also where each rank's part begins there; the last number is the size of all parts.
    """
    arriving = [0 if source == rank else to_each[rank] for source, to_each in enumerate(sizes)]
    binding = Binding(
        {"gathered": (Extent.aligned(0, arriving),)},
        {"slot": {r: (Extent.aligned(None, to_each),) for r, to_each in enumerate(sizes)}},
    )
    variant = patterns.EXCHANGE_AND_CONSUME.staged()
    ranks = len(sizes)
    launch = lower(variant, rank, ranks, binding, slots=slots)
    return launch, part_offsets(arriving)


@lru_cache(maxsize=512)
def all_reduce_launch(
    rank: int, chunks: tuple[int, ...], variant: AllReduceVariant, slots: int
) -> Launch:
    """Produce and all-reduce. Operands: this rank's terms to add (`scratch_rows`), the result."""
    ranks = len(chunks)
    added = sum(chunks) if variant is AllReduceVariant.ONE_SHOT else chunks[rank]
    binding = Binding(
        {
            "slot": (Extent(None, variant.offsets(chunks)[:-1], chunks),),
            "partials": (Extent.aligned(0, (added,) * ranks),),
            "output": (Extent.consecutive(1, chunks),),
        }
    )
    staged = patterns.PRODUCE_AND_ALL_REDUCE.staged(**variant.options)
    return lower(staged, rank, ranks, binding, slots=slots)


@dataclass(frozen=True)
class Exchange:
    """A slot that holds partial sums (one for each rank, or two in a ring), followed by a shard.

    `partials` are the sizes in bytes of the partial sums for the ranks.
    """

    shard: ShardSizes
    partials: tuple[int, ...]
    ring: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of the partial sums and, last, of the shard."""
        return part_offsets((max(self.partials),) * 2 if self.ring else self.partials)

    def slots(self, rank: int) -> dict[int, Parts]:
        """Each rank's slot, as rank `rank` reads it. The shard is chunk W."""
        ranks = len(self.partials)
        # In a ring, chunk 0 or 1 of a peer's slot is read as a partial sum for this rank.
        sizes = (self.partials[rank],) * ranks if self.ring else self.partials
        starts = self.offsets[:2] if self.ring else self.offsets[:-1]
        starts = (*starts, *(0,) * (ranks - len(starts)))[:ranks]
        return {
            peer: tuple(
                Extent(None, (*starts, *part.offsets), (*sizes, *part.nbytes)) for part in parts
            )
            for peer, parts in self.shard.slots(self.offsets[-1]).items()
        }


@lru_cache(maxsize=512)
def exchange_launch(rank: int, exchange: Exchange, slots: int) -> Launch:
    """Consume and reduce-scatter.

    Operands: the parts of the own shard, the staging memory, the partial sums for this rank.
    """
    ranks, own = len(exchange.partials), _own_parts(exchange.shard, rank)
    staging = len(own)
    if exchange.ring:
        pulled = exchange.shard.places_in_turn(staging, (0, 1))
    else:
        pulled = exchange.shard.places_by_rank(staging)
    partials = Extent.aligned(staging + 1, (exchange.partials[rank],) * ranks)
    binding = Binding(
        {"input": own, "gathered": pulled, "partials": (partials,)},
        {"slot": exchange.slots(rank)},
    )
    variant = patterns.CONSUME_AND_REDUCE_SCATTER.staged(ring=exchange.ring)
    return lower(variant, rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def exchange_together_launch(pooled: PooledSums, slots: int) -> Launch:
    """Consume and reduce-scatter together.

    Operands: the own tensors, the staging memory, the gradients of this rank's rows.
    """
    own = pooled.shard.input()
    buffers = {
        "input": own,
        "gathered": pooled.shard.pooled(len(own)),
        "partials": pooled.partials(len(own) + 1),
    }
    binding = Binding(buffers, {"slot": pooled.slots()})
    variant = patterns.CONSUME_AND_REDUCE_SCATTER.staged(together=True)
    rank, ranks = pooled.shard.rank, len(pooled.shard.ranks)
    return lower(variant, rank, ranks, binding, slots=slots)


@lru_cache(maxsize=512)
def background_launch(
    pattern: patterns.Pattern, rank: int, chunks: Extent, slots: int, in_place: bool
) -> Launch:
    """`chunks` divide the whole tensor: the result of a gather, the input of a scatter.

    Operands: the input, the output or the partial sums and, if read in place, all ranks' inputs.
    """
    ranks, sizes = len(chunks.nbytes), dict(enumerate(chunks.nbytes))
    if pattern is patterns.BACKGROUND_REDUCE_SCATTER:
        # "partials" holds the input, then a chunk of each rank, all with room for the largest. So
        # more bytes than a smaller chunk's are copied to the slot and from there.
        room = (max(chunks.nbytes),) * ranks
        binding = Binding(
            {
                "input": (replace(chunks, operand=0),),
                "partials": (Extent.even(1, room[0], ranks),),
                "symmetric": (replace(chunks, operand=2),),
                "slot": (replace(chunks, operand=None, nbytes=room),),
            }
        )
    else:
        binding = Binding(
            {"input": (Extent.even(0, sizes[rank]),), "output": (replace(chunks, operand=1),)},
            {
                "symmetric": {peer: (Extent.even(2, size),) for peer, size in sizes.items()},
                "slot": {peer: (Extent.even(None, size),) for peer, size in sizes.items()},
            },
        )
    variant = pattern.staged(in_place=in_place)
    return lower(variant, rank, ranks, binding, slots=slots)
