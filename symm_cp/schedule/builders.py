"""One builder function per communication pattern.

A builder is a pure function ``(rank, world_size, *, options) -> Schedule``; results are cached.
W stands for the world size, and a rank visits its peers in the order rank+1, rank+2, ... (mod W),
so that at no time all ranks read from the same one.

Why two slots need no further synchronisation
    Every builder here keeps one promise: *in each call each rank signals each peer, and waits for
    each peer's signal of this call, before it ends.* Now take rank r, which writes its slot in
    call c and again in call c+2. A peer p that reads it does so in call c. In call c+1, thus after
    that reading, p signals r, whatever the op of that call is, and r waits for it before call c+1
    ends. So when r comes to call c+2, p is done reading. The ready-signal of one call does the
    work of the done-signal of the call before: one signal a peer a call is the whole cost.
    A new builder on the same workspace must keep the promise, or ``check`` of its mixes fails:
    a rank that skips a peer's shard (causal attention, say) still waits for its signal.

Flags
    ``"ready"``    what the peer wants to read is written. Signalled once to each peer in each call
                   of every builder, and awaited with no lag.
    ``"reduced"``  two-shot all-reduce: this rank's chunk is reduced, and what it needed of the
                   peer's memory has been read. In a gather, consume and reduce-scatter: what came
                   of the peer's shard is ready for it.
    ``"taken"``    a rank has read what was computed for it, so that its place may be used again in
                   the same call.
    ``"done"``     this rank has read the peer's memory. Needed in two cases only. *In place*: the
                   caller may overwrite the symmetric tensor once the call has returned, so the
                   call waits for the done-signals at its end. *One slot*: the next call overwrites
                   what this one reads, so every builder signals ``"done"`` and the next writer
                   waits for it with ``lag=1``. It is not signalled otherwise.

On CPU a consumer reads a peer's memory where it lies. No step here says how large anything is:
uneven shards are the runtime's business, and a step on empty memory is still a step, because its
neighbours (the signals) must happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ParamSpec, cast

from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait, check_place

P = ParamSpec("P")


def _cached(builder: Callable[P, Schedule]) -> Callable[P, Schedule]:
    # lru_cache alone would hide the builder's signature from type checkers.
    return cast(Callable[P, Schedule], lru_cache(maxsize=None)(builder))


def peers(rank: int, world_size: int) -> tuple[int, ...]:
    """The other ranks in the order in which ``rank`` visits them."""
    return tuple((rank + distance) % world_size for distance in range(1, world_size))


def all_ranks(
    builder: Callable[..., Schedule], world_size: int, **options: bool | int
) -> tuple[Schedule, ...]:
    """The schedules of ``builder`` for ranks 0 to ``world_size`` - 1."""
    return tuple(builder(rank, world_size, **options) for rank in range(world_size))


def _signals(ranks: Iterable[int], flag: str) -> list[Step]:
    return [Signal(rank, flag) for rank in ranks]


def _waits(ranks: Iterable[int], flag: str) -> list[Step]:
    return [Wait(rank, flag) for rank in ranks]


def _claim_slot(ranks: Iterable[int], slots: int) -> list[Step]:
    # With one slot the peers may still be reading what the call before left in it. All of them:
    # that call may have been another op, in which any peer read any chunk.
    return [Wait(rank, "done", lag=1) for rank in ranks] if slots == 1 else []


def _refuse_staged_in_place(name: str, in_place: bool, staged: bool) -> None:
    if in_place and staged:
        raise ValueError(
            f"{name}: {in_place=} and {staged=} exclude each other: in place, peers read the "
            "symmetric tensor itself and nothing is staged; give at most one of them"
        )


@_cached
def all_gather_and_consume(
    rank: int,
    world_size: int,
    *,
    in_place: bool = False,
    gather: bool = False,
    accumulate: bool = False,
    slots: int = 2,
) -> Schedule:
    """Consume one's own shard first, then each peer's as soon as it is ready.

    ``Compute("consume", p, reads=(shard of p,), writes=...)`` runs once for each rank p, in the
    order rank, rank+1, ... It writes chunk p of ``"output"``, or with ``accumulate`` all of it
    (a sum over shards, such as a weight gradient; the first call of the kernel, for index
    ``rank``, starts the sum). With ``gather`` the shards are also copied to the private buffer
    ``"gathered"``. ``in_place``: the shards are the symmetric tensors themselves.

    Lane ``"compute"``. Source: torch's ``_pipelined_all_gather_and_consume``, with point-to-point
    epochs in the place of barriers (DESIGN, "Schedules").
    """
    name = "all_gather_and_consume"
    check_place(name, rank, world_size, slots)
    others = peers(rank, world_size)
    source = Region(rank, "symmetric" if in_place else "input")

    def consume(shard: Region) -> list[Step]:
        index = shard.rank
        target = Region(rank, "output", None if accumulate else index)
        kept: list[Step] = [Copy(shard, Region(rank, "gathered", index))] if gather else []
        return [*kept, Compute("consume", index, (shard,), (target,))]

    steps: list[Step] = []
    if others and not in_place:
        steps += [*_claim_slot(others, slots), Copy(source, Region(rank, "slot"))]
    # Publishes the shard: the copy just made or, in place, what the caller wrote before the call.
    steps += _signals(others, "ready")
    steps += consume(source)
    for peer in others:
        # Awaits the peer's shard.
        steps.append(Wait(peer, "ready"))
        steps += consume(Region(peer, "symmetric" if in_place else "slot"))
        if in_place or slots == 1:
            # Publishes no write: says that the reading of the peer's shard is over.
            steps.append(Signal(peer, "done"))
    if in_place:
        # Awaits the end of all reading here: the caller may overwrite the tensor after this.
        steps += _waits(others, "done")
    return Schedule(name, rank, world_size, {"compute": tuple(steps)}, slots)


@_cached
def produce_and_reduce_scatter(rank: int, world_size: int, *, slots: int = 2) -> Schedule:
    """Produce each peer's chunk and signal it at once, one's own last; then reduce one's own.

    ``Compute("produce", p, reads=(), writes=(chunk p of the own slot,))`` for each peer p, and
    ``Compute("produce", rank, ...)`` into ``"output"``. What ``produce`` reads is the caller's
    business: it is private. ``Compute("reduce", rank, reads, (output,))`` reads one partial sum
    per rank, in rank order so that the result does not depend on timing; the own one lies in
    ``"output"`` itself.

    Lane ``"compute"``. Source: torch's ``_pipelined_produce_and_all2all``, with the own chunk last
    (it needs no transfer, so it hides the others').
    """
    name = "produce_and_reduce_scatter"
    check_place(name, rank, world_size, slots)
    others = peers(rank, world_size)
    output = Region(rank, "output")
    steps = _claim_slot(others, slots)
    for peer in others:
        steps.append(Compute("produce", peer, (), (Region(rank, "slot", peer),)))
        # Publishes the peer's chunk.
        steps.append(Signal(peer, "ready"))
    steps.append(Compute("produce", rank, (), (output,)))
    # Awaits chunk ``rank`` of every peer.
    steps += _waits(others, "ready")
    partials = tuple(
        output if source == rank else Region(source, "slot", rank) for source in range(world_size)
    )
    steps.append(Compute("reduce", rank, partials, (output,)))
    if slots == 1:
        steps += _signals(others, "done")
    return Schedule(name, rank, world_size, {"compute": tuple(steps)}, slots)


@_cached
def consume_and_reduce_scatter(
    rank: int, world_size: int, *, ring: bool = False, slots: int = 2
) -> Schedule:
    """Consume every rank's shard; what comes of it is summed at the rank that the shard is from.

    ``Compute("consume", p, reads=(shard of p,), writes=...)`` runs for each rank p in the order of
    ``all_gather_and_consume`` and writes a partial sum for rank p: for the own shard into
    ``"output"``, for a peer's into the own slot. The shard lies in chunk ``"shard"`` of the slot
    (number W), so that gathering and scattering share a slot.

    Without ``ring`` the slot has one partial sum for each rank (chunk p), and at the end
    ``Compute("reduce", rank, reads, (output,))`` adds them in rank order. With ``ring`` the slot
    has two (chunks 0 and 1, used in turn) whatever W is; ``Compute("add", p, (partial, output),
    (output,))`` adds each as it comes, in the order rank, rank-1, ... Both orders are fixed, so
    results do not depend on timing.

    Lane ``"compute"``. Source: the backward pass of ring attention (Liu et al., 2023), by way of
    shared memory.
    """
    name = "consume_and_reduce_scatter"
    check_place(name, rank, world_size, slots)
    others = peers(rank, world_size)
    # In a ring, who comes so late has sent its partial sum before, and its shard before that.
    late = [ring and 2 * turn >= world_size - 1 for turn in range(len(others))]
    shard, output = world_size, Region(rank, "output")
    steps: list[Step] = []
    if others:
        own = Region(rank, "slot", shard)
        steps += [*_claim_slot(others, slots), Copy(Region(rank, "input"), own)]
    # Publishes the shard to those that wait for it: this rank's place is their turn.
    turns = {peer: (rank - peer - 1) % world_size for peer in others}
    steps += _signals((peer for peer in others if not late[turns[peer]]), "ready")
    steps.append(Compute("consume", rank, (Region(rank, "input"),), (output,)))
    for turn, peer in enumerate(others):
        partial = Region(rank, "slot", turn % 2 if ring else peer)
        if not late[turn]:
            # Awaits the peer's shard.
            steps.append(Wait(peer, "ready"))
        if ring and turn >= 2:
            # The partial sum that lies there has been taken.
            steps.append(Wait(others[turn - 2], "taken"))
        steps.append(Compute("consume", peer, (Region(peer, "slot", shard),), (partial,)))
        # Publishes the peer's partial sum.
        steps.append(Signal(peer, "reduced"))
        if ring:
            # In this turn the rank as far behind computed for this one.
            source = (rank - turn - 1) % world_size
            steps.append(Wait(source, "reduced"))
            theirs = Region(source, "slot", turn % 2)
            steps.append(Compute("add", source, (theirs, output), (output,)))
            if turn + 2 < len(others):
                steps.append(Signal(source, "taken"))
    if not ring:
        # Awaits what the peers computed for this rank.
        steps += _waits(others, "reduced")
        parts = tuple(
            output if source == rank else Region(source, "slot", rank)
            for source in range(world_size)
        )
        steps.append(Compute("reduce", rank, parts, (output,)))
    if slots == 1:
        steps += _signals(others, "done")
    return Schedule(name, rank, world_size, {"compute": tuple(steps)}, slots)


@_cached
def all_gather(
    rank: int, world_size: int, *, in_place: bool = False, staged: bool = False, slots: int = 2
) -> Schedule:
    """Copy every rank's shard into chunk 0, ..., W-1 of ``"output"``, in the background.

    The shard is ``"input"``; with ``staged`` the private ``"staging"`` (the caller's copy of its
    input, so that it may overwrite the input at once); ``in_place`` the symmetric tensor.

    Lane ``"copy"``. Source: DeepEP V2's batched copies with the call number as epoch (DESIGN).
    """
    name = "all_gather"
    check_place(name, rank, world_size, slots)
    _refuse_staged_in_place(name, in_place, staged)
    others = peers(rank, world_size)
    source = Region(rank, "symmetric" if in_place else "staging" if staged else "input")
    steps: list[Step] = []
    if others and not in_place:
        steps += [*_claim_slot(others, slots), Copy(source, Region(rank, "slot"))]
    # Publishes the shard.
    steps += _signals(others, "ready")
    # From the slot, so that all steps after the signals leave the input alone: the caller may have
    # carried out those before them itself, and have it back.
    own = Region(rank, "slot") if others and not in_place else source
    steps.append(Copy(own, Region(rank, "output", rank)))
    for peer in others:
        # Awaits the peer's shard.
        steps.append(Wait(peer, "ready"))
        shard = Region(peer, "symmetric" if in_place else "slot")
        steps.append(Copy(shard, Region(rank, "output", peer)))
        if in_place or slots == 1:
            # The reading of the peer's shard is over.
            steps.append(Signal(peer, "done"))
    if in_place:
        # Awaits the end of all reading here.
        steps += _waits(others, "done")
    return Schedule(name, rank, world_size, {"copy": tuple(steps)}, slots)


def _publish_and_reduce(
    others: tuple[int, ...], source: Region, parts: tuple[Region, ...], slots: int
) -> tuple[Step, ...]:
    """Publish ``source``, wait for all peers, reduce ``parts`` (in rank order) to the output."""
    rank = source.rank
    in_place = source.buffer == "symmetric"
    steps: list[Step] = []
    if not in_place:
        steps += [*_claim_slot(others, slots), Copy(source, Region(rank, "slot"))]
    # Publishes what this rank contributes; then awaits what the peers do.
    steps += _signals(others, "ready")
    steps += _waits(others, "ready")
    steps.append(Compute("reduce", rank, parts, (Region(rank, "output"),)))
    if in_place or slots == 1:
        # The reading of all peers' memory is over.
        steps += _signals(others, "done")
    if in_place:
        # Awaits the end of all reading here.
        steps += _waits(others, "done")
    return tuple(steps)


@_cached
def reduce_scatter(
    rank: int, world_size: int, *, in_place: bool = False, staged: bool = False, slots: int = 2
) -> Schedule:
    """Sum chunk ``rank`` of all ranks into ``"output"``, in the background.

    Every rank contributes ``"input"``, or ``"staging"``, or in place the symmetric tensor, of W
    chunks (see ``all_gather``). One ``Compute("reduce", rank, ...)`` reads chunk ``rank`` of all,
    in rank order. Also the own contribution is read from the slot: there all have one layout.

    Lane ``"copy"``.
    """
    name = "reduce_scatter"
    check_place(name, rank, world_size, slots)
    _refuse_staged_in_place(name, in_place, staged)
    source = Region(rank, "symmetric" if in_place else "staging" if staged else "input")
    buffer = "symmetric" if in_place else "slot"
    parts = tuple(Region(peer, buffer, rank) for peer in range(world_size))
    steps = _publish_and_reduce(peers(rank, world_size), source, parts, slots)
    return Schedule(name, rank, world_size, {"copy": steps}, slots)


@_cached
def one_shot_all_reduce(
    rank: int, world_size: int, *, in_place: bool = True, slots: int = 2
) -> Schedule:
    """Sum all of every rank's buffer into ``"output"``: one exchange, W times the reading.

    Every rank contributes its symmetric tensor, or ``"input"`` with ``in_place=False``. One
    ``Compute("reduce", rank, ...)`` reads all of all ranks' memory, in rank order. For small
    tensors, where the exchange costs more than the reading.

    Lane ``"compute"``. Source: torch's ``one_shot_all_reduce``.
    """
    name = "one_shot_all_reduce"
    check_place(name, rank, world_size, slots)
    source = Region(rank, "symmetric" if in_place else "input")
    buffer = "symmetric" if in_place else "slot"
    parts = tuple(Region(peer, buffer) for peer in range(world_size))
    steps = _publish_and_reduce(peers(rank, world_size), source, parts, slots)
    return Schedule(name, rank, world_size, {"compute": steps}, slots)


@_cached
def two_shot_all_reduce(rank: int, world_size: int, *, slots: int = 2) -> Schedule:
    """Sum all ranks' symmetric tensors in place: reduce one chunk each, then collect the others.

    ``Compute("reduce", rank, ...)`` sums chunk ``rank`` of all symmetric tensors, in rank order,
    into the slot (which holds just that chunk), from where all ranks copy it.

    By way of the slot rather than of the symmetric tensor, because nobody needs to wait for a
    reader of the slot: that costs a local copy of 1/W of the tensor and saves a third exchange
    ("done") before the call may return.

    Lane ``"compute"``. Source: torch's ``two_shot_all_reduce_``.
    """
    name = "two_shot_all_reduce"
    check_place(name, rank, world_size, slots)
    others = peers(rank, world_size)
    steps: list[Step] = []
    if others:
        parts = tuple(Region(peer, "symmetric", rank) for peer in range(world_size))
        # Publishes what the caller wrote to the tensor; awaits the same of the peers. With one
        # slot it also says that the peers have read it out: they are in this call, not the last.
        steps += _signals(others, "ready")
        steps += _waits(others, "ready")
        steps.append(Compute("reduce", rank, parts, (Region(rank, "slot"),)))
        # Publishes the reduced chunk and says that chunk ``rank`` of the peers has been read.
        steps += _signals(others, "reduced")
        # Only this rank reads chunk ``rank`` of its tensor, so it may be overwritten now.
        steps.append(Copy(Region(rank, "slot"), Region(rank, "symmetric", rank)))
    for peer in others:
        # Awaits the peer's reduced chunk, and the end of its reading of that chunk here.
        steps.append(Wait(peer, "reduced"))
        steps.append(Copy(Region(peer, "slot"), Region(rank, "symmetric", peer)))
        if slots == 1:
            # The reading of the peer's slot is over; the next call may be another op.
            steps.append(Signal(peer, "done"))
    return Schedule(name, rank, world_size, {"compute": tuple(steps)}, slots)


@_cached
def all_to_all(rank: int, world_size: int, *, in_place: bool = False, slots: int = 2) -> Schedule:
    """Copy chunk ``rank`` of every rank p into chunk p of ``"output"``.

    Chunk p of a rank's ``"input"`` (``in_place``: of its symmetric tensor) is for rank p. Each
    chunk is signalled as soon as it lies in the slot, so that the peer can start.

    Lane ``"compute"``.
    """
    name = "all_to_all"
    check_place(name, rank, world_size, slots)
    others = peers(rank, world_size)
    buffer = "symmetric" if in_place else "input"
    steps: list[Step] = []
    if not in_place:
        steps += _claim_slot(others, slots)
    for peer in others:
        if not in_place:
            steps.append(Copy(Region(rank, "input", peer), Region(rank, "slot", peer)))
        # Publishes the chunk for that peer.
        steps.append(Signal(peer, "ready"))
    steps.append(Copy(Region(rank, buffer, rank), Region(rank, "output", rank)))
    for peer in others:
        # Awaits the peer's chunk for this rank.
        steps.append(Wait(peer, "ready"))
        chunk = Region(peer, "symmetric" if in_place else "slot", rank)
        steps.append(Copy(chunk, Region(rank, "output", peer)))
        if in_place or slots == 1:
            # The reading of the peer's memory is over.
            steps.append(Signal(peer, "done"))
    if in_place:
        # Awaits the end of all reading here.
        steps += _waits(others, "done")
    return Schedule(name, rank, world_size, {"compute": tuple(steps)}, slots)
