"""Builders for machines with copy engines: peers' memory is pulled ahead of its use.

As ``builders``, with two lanes. Lane ``"copy"`` (a stream of its own) moves bytes and talks to the
peers; lane ``"compute"`` (the caller's stream) runs kernels on memory of its own rank only. Between
the two lanes of a rank there are flags to oneself, which a runtime may turn into events:

    ``"begun"``                          what the caller wrote to its symmetric tensor is there
    ``"pulled<i>"``, ``"collected<i>"``  the i-th shard, or partial sum, has come
    ``"consumed<i>"``, ``"added<i>"``    it has been used
    ``"ended"``                          the copy lane has nothing left to do

In any case the runtime starts the copy lane of a call when the caller's stream has come to it: the
input is there by then, and private memory may be used again. No step of another rank depends on it.

Every call signals each peer and waits for each, so that two slots are enough (see ``builders``).

Flags between ranks are those of ``builders``. Here each has one writer lane for all patterns
("reduced": compute, the others: copy), and with one slot each is signalled and awaited equally
often. So a runtime may have the waiter take a flag back, instead of comparing numbers that grow: a
CUDA graph cannot change a number from replay to replay. In place there are always two slots.
"""

from __future__ import annotations

from symm_cp.schedule.builders import _cached, _claim_slot, _signals, _waits, peers
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait, check_place


def _lanes(compute: list[Step], copy: list[Step]) -> dict[str, tuple[Step, ...]]:
    lanes = {"compute": tuple(compute), "copy": tuple(copy)}
    return {name: steps for name, steps in lanes.items() if steps}


def _check(name: str, rank: int, world_size: int, slots: int, in_place: bool = False) -> None:
    check_place(name, rank, world_size, slots)
    if in_place and slots == 1:
        raise ValueError(f"{name}: {in_place=} needs 2 slots, there is 1")


def _publish(source: Region, others: tuple[int, ...], slots: int) -> list[Step]:
    """Copy to the slot unless peers read ``source`` itself; say that it is there."""
    rank = source.rank
    steps: list[Step] = []
    if source.buffer != "symmetric":
        steps += [*_claim_slot(others, slots), Copy(source, Region(rank, "slot"))]
    return steps + _signals(others, "ready")


def _begin(source: Region, others: tuple[int, ...], slots: int) -> tuple[list[Step], list[Step]]:
    """The first steps of lanes compute and copy."""
    if not others:
        return [], []
    publish = _publish(source, others, slots)
    if source.buffer != "symmetric":
        return [], publish
    return [Signal(source.rank, "begun")], [Wait(source.rank, "begun"), *publish]


def _release(peer: int, in_place: bool, slots: int) -> list[Step]:
    """Say that the peer's memory has been read, where somebody waits for that."""
    return [Signal(peer, "done")] if in_place or slots == 1 else []


@_cached
def gather_and_consume(
    rank: int,
    world_size: int,
    *,
    in_place: bool = False,
    accumulate: bool = False,
    bounded: bool = False,
    keep: bool = False,
    slots: int = 2,
) -> Schedule:
    """Consume one's own shard while the first peer's is pulled, and so on.

    ``Compute("consume", p, ...)`` reads the own shard where it is (``"input"``, or the symmetric
    tensor) and chunk p of the private buffer ``"gathered"`` for each peer p; what it writes is as
    in ``builders.all_gather_and_consume``. With ``bounded``, ``"gathered"`` has room for two
    shards, which the peers' take in turn; with ``keep`` the own shard is copied there, too, and the
    last kernel finds all shards there.

    Raises ``ValueError`` for ``bounded`` with ``keep``.
    """
    name = "gather_and_consume"
    _check(name, rank, world_size, slots, in_place)
    if bounded and keep:
        raise ValueError(f"{name}: {bounded=} and {keep=} exclude each other")
    others = peers(rank, world_size)
    source = Region(rank, "symmetric" if in_place else "input")

    last = others[-1] if others else rank

    def consume(shard: Region, index: int) -> Step:
        target = Region(rank, "output", None if accumulate else index)
        reads = {shard: None}
        if keep and index == last:
            reads |= {Region(rank, "gathered", source): None for source in range(world_size)}
        return Compute("consume", index, tuple(reads), (target,))

    compute, copy = _begin(source, others, slots)
    kept: list[Step] = [Copy(source, Region(rank, "gathered", rank))] if keep else []
    compute += [*([] if others else kept), consume(source, rank)]
    for turn, peer in enumerate(others):
        pulled = Region(rank, "gathered", turn % 2 if bounded else peer)
        if bounded and turn >= 2:
            # The shard that lies there has been consumed.
            copy.append(Wait(rank, f"consumed{turn - 2}"))
        if peer == last:
            copy += kept
        # Awaits the peer's shard.
        copy.append(Wait(peer, "ready"))
        copy.append(Copy(Region(peer, "symmetric" if in_place else "slot"), pulled))
        copy.append(Signal(rank, f"pulled{turn}"))
        copy += _release(peer, in_place, slots)
        compute.append(Wait(rank, f"pulled{turn}"))
        compute.append(consume(pulled, peer))
        if bounded and turn + 2 < len(others):
            compute.append(Signal(rank, f"consumed{turn}"))
    if in_place and others:
        # The caller may overwrite its tensor after this.
        copy += [*_waits(others, "done"), Signal(rank, "ended")]
        compute.append(Wait(rank, "ended"))
    return Schedule(name, rank, world_size, _lanes(compute, copy), slots)


@_cached
def gather_and_combine(
    rank: int, world_size: int, *, in_place: bool = False, slots: int = 2
) -> Schedule:
    """Pull all shards, then run one kernel on them.

    ``Compute("combine", rank, ...)`` reads every chunk of ``"gathered"``, in rank order; also the
    own shard is copied there.
    """
    name = "gather_and_combine"
    _check(name, rank, world_size, slots, in_place)
    others = peers(rank, world_size)
    source = Region(rank, "symmetric" if in_place else "input")
    parts = tuple(Region(rank, "gathered", index) for index in range(world_size))
    combine = Compute("combine", rank, parts, (Region(rank, "output"),))
    compute, copy = _begin(source, others, slots)
    (copy if others else compute).append(Copy(source, parts[rank]))
    copy += _waits(others, "ready")
    for peer in others:
        copy.append(Copy(Region(peer, "symmetric" if in_place else "slot"), parts[peer]))
    for peer in others:
        copy += _release(peer, in_place, slots)
    if in_place:
        copy += _waits(others, "done")
    if others:
        copy.append(Signal(rank, "ended"))
        compute.append(Wait(rank, "ended"))
    compute.append(combine)
    return Schedule(name, rank, world_size, _lanes(compute, copy), slots)


@_cached
def produce_and_scatter(rank: int, world_size: int, *, slots: int = 2) -> Schedule:
    """Produce each peer's chunk in the slot, one's own last; pull and add what is for this rank.

    ``Compute("produce", p, (), (chunk p of the own slot,))``, then ``Compute("produce", rank)``
    into chunk ``rank`` of the private buffer ``"partials"``, where the peers' come to lie as well;
    ``Compute("reduce", rank, ...)`` reads all of them, in rank order.
    """
    name = "produce_and_scatter"
    _check(name, rank, world_size, slots)
    others = peers(rank, world_size)
    parts = tuple(Region(rank, "partials", source) for source in range(world_size))
    compute, copy = _claim_slot(others, slots), list[Step]()
    for turn, peer in enumerate(others):
        compute.append(Compute("produce", peer, (), (Region(rank, "slot", peer),)))
        # Publishes the peer's chunk.
        compute.append(Signal(peer, "reduced"))
        # Whoever is that far behind produced for this rank at the same time.
        source = (rank - turn - 1) % world_size
        copy.append(Wait(source, "reduced"))
        copy.append(Copy(Region(source, "slot", rank), parts[source]))
    compute.append(Compute("produce", rank, (), (parts[rank],)))
    if others:
        copy.append(Signal(rank, "ended"))
        compute.append(Wait(rank, "ended"))
        for peer in others:
            copy += _release(peer, False, slots)
    compute.append(Compute("reduce", rank, parts, (Region(rank, "output"),)))
    return Schedule(name, rank, world_size, _lanes(compute, copy), slots)


@_cached
def consume_and_scatter(rank: int, world_size: int, *, slots: int = 2) -> Schedule:
    """Consume every rank's shard; pull and add what the others made of one's own.

    As ``builders.consume_and_reduce_scatter``: chunk W of the slot holds the shard, chunk p what
    is for rank p. Shards are pulled to ``"gathered"``, partial sums to ``"partials"``.
    """
    name = "consume_and_scatter"
    _check(name, rank, world_size, slots)
    others = peers(rank, world_size)
    parts = tuple(Region(rank, "partials", source) for source in range(world_size))
    compute: list[Step] = [Compute("consume", rank, (Region(rank, "input"),), (parts[rank],))]
    copy: list[Step] = []
    if others:
        own = Region(rank, "slot", world_size)
        copy += [*_claim_slot(others, slots), Copy(Region(rank, "input"), own)]
        copy += _signals(others, "ready")
    for turn, peer in enumerate(others):
        pulled = Region(rank, "gathered", peer)
        copy.append(Wait(peer, "ready"))
        copy.append(Copy(Region(peer, "slot", world_size), pulled))
        copy.append(Signal(rank, f"pulled{turn}"))
        compute.append(Wait(rank, f"pulled{turn}"))
        compute.append(Compute("consume", peer, (pulled,), (Region(rank, "slot", peer),)))
        # Publishes the peer's partial sum.
        compute.append(Signal(peer, "reduced"))
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        copy.append(Wait(source, "reduced"))
        copy.append(Copy(Region(source, "slot", rank), parts[source]))
    if others:
        copy.append(Signal(rank, "ended"))
        compute.append(Wait(rank, "ended"))
        for peer in others:
            copy += _release(peer, False, slots)
    compute.append(Compute("reduce", rank, parts, (Region(rank, "output"),)))
    return Schedule(name, rank, world_size, _lanes(compute, copy), slots)


@_cached
def consume_and_pass_on(rank: int, world_size: int, *, slots: int = 2) -> Schedule:
    """``consume_and_scatter`` with room for two shards and two partial sums, whatever W is.

    Chunks 0 and 1 of ``"gathered"`` and of the slot are used in turn. Each partial sum is pulled
    to ``"partials"`` and added as it comes: ``Compute("add", p, (partials, output), (output,))``.
    """
    name = "consume_and_pass_on"
    _check(name, rank, world_size, slots)
    others = peers(rank, world_size)
    turns = len(others)
    # Who comes so late has sent its partial sum before, and its shard before that.
    late = [2 * turn >= world_size for turn in range(turns)]
    # This rank's place among the peers of each.
    turn_at = {peer: (rank - peer - 1) % world_size for peer in others}
    output, partial = Region(rank, "output"), Region(rank, "partials", 0)
    compute: list[Step] = [Compute("consume", rank, (Region(rank, "input"),), (output,))]
    copy: list[Step] = []
    if others:
        own = Region(rank, "slot", world_size)
        copy += [*_claim_slot(others, slots), Copy(Region(rank, "input"), own)]
        copy += _signals((peer for peer in others if not late[turn_at[peer]]), "ready")

    def collect(turn: int) -> None:
        # In this turn the rank as far behind computed for this one.
        source = (rank - turn - 1) % world_size
        if turn > 0:
            copy.append(Wait(rank, f"added{turn - 1}"))
        copy.append(Wait(source, "reduced"))
        copy.append(Copy(Region(source, "slot", turn % 2), partial))
        copy.append(Signal(rank, f"collected{turn}"))
        compute.append(Wait(rank, f"collected{turn}"))
        compute.append(Compute("add", source, (partial, output), (output,)))
        if turn + 1 < turns:
            compute.append(Signal(rank, f"added{turn}"))
        if turn + 2 < turns:
            copy.append(Signal(source, "taken"))

    for turn, peer in enumerate(others):
        pulled, given = Region(rank, "gathered", turn % 2), Region(rank, "slot", turn % 2)
        if turn >= 2:
            # The shard that lies there has been consumed.
            copy.append(Wait(rank, f"consumed{turn - 2}"))
        if not late[turn]:
            copy.append(Wait(peer, "ready"))
        copy.append(Copy(Region(peer, "slot", world_size), pulled))
        copy.append(Signal(rank, f"pulled{turn}"))
        compute.append(Wait(rank, f"pulled{turn}"))
        if turn >= 2:
            # The partial sum that lies there has been read.
            compute.append(Wait(others[turn - 2], "taken"))
        compute.append(Compute("consume", peer, (pulled,), (given,)))
        if turn + 2 < turns:
            compute.append(Signal(rank, f"consumed{turn}"))
        # Publishes the peer's partial sum.
        compute.append(Signal(peer, "reduced"))
        if turn > 0:
            collect(turn - 1)
    if others:
        collect(turns - 1)
        for peer in others:
            copy += _release(peer, False, slots)
    return Schedule(name, rank, world_size, _lanes(compute, copy), slots)


@_cached
def background_gather(
    rank: int, world_size: int, *, in_place: bool = False, slots: int = 2
) -> Schedule:
    """Pull every rank's shard into chunk 0, ..., W-1 of ``"output"``, in the background.

    All waits come before all pulls, so that a runtime may batch either. After the signals the input
    is left alone: the caller may have it back. Lane ``"copy"`` alone.
    """
    name = "background_gather"
    _check(name, rank, world_size, slots, in_place)
    others = peers(rank, world_size)
    source = Region(rank, "symmetric" if in_place else "input")
    own: list[Step] = [Copy(source, Region(rank, "output", rank))]
    publish = _publish(source, others, slots) if others else []
    steps = [*publish, *_waits(others, "ready"), *own] if in_place else [*own, *publish]
    if not in_place:
        steps += _waits(others, "ready")
    for peer in others:
        shard = Region(peer, "symmetric" if in_place else "slot")
        steps.append(Copy(shard, Region(rank, "output", peer)))
    for peer in others:
        steps += _release(peer, in_place, slots)
    if in_place:
        # The caller may overwrite its tensor after this.
        steps += _waits(others, "done")
    return Schedule(name, rank, world_size, {"copy": tuple(steps)}, slots)


@_cached
def background_scatter(
    rank: int, world_size: int, *, in_place: bool = False, slots: int = 2
) -> Schedule:
    """Pull chunk ``rank`` of all ranks to ``"partials"``, then ``Compute("reduce", rank, ...)``.

    In the background: lane ``"copy"`` alone. Every rank contributes ``"input"``, or in place its
    symmetric tensor, of W chunks; the slot holds the chunks that are for peers. The input is left
    alone after the signals.
    """
    name = "background_scatter"
    _check(name, rank, world_size, slots, in_place)
    others = peers(rank, world_size)
    parts = tuple(Region(rank, "partials", source) for source in range(world_size))
    own, theirs = ("symmetric",) * 2 if in_place else ("input", "slot")
    steps: list[Step] = [Copy(Region(rank, own, rank), parts[rank])]
    if not in_place:
        steps += _claim_slot(others, slots)
        steps += [Copy(Region(rank, own, peer), Region(rank, "slot", peer)) for peer in others]
    steps += _signals(others, "ready")
    steps += _waits(others, "ready")
    steps += [Copy(Region(peer, theirs, rank), parts[peer]) for peer in others]
    for peer in others:
        steps += _release(peer, in_place, slots)
    steps.append(Compute("reduce", rank, parts, (Region(rank, "output"),)))
    if in_place:
        steps += _waits(others, "done")
    return Schedule(name, rank, world_size, {"copy": tuple(steps)}, slots)
