"""Consume and reduce-scatter: each shard's partial sums are added up at the rank that owns it.

``Compute("consume", p, ...)`` runs for each rank p in the order rank, rank+1, ... and writes this
rank's partial sum for rank p. The slot holds the own shard as chunk W, behind the partial sums.

Options
    ``ring``  Without it, the slot has one partial sum for each rank (chunk p), and
              ``Compute("reduce", rank, ...)`` finally adds all in rank order. With it, the slot has
              two (chunks 0 and 1, used in turn) whatever W is, and ``Compute("add", p, ...)`` adds
              each to ``"output"`` as it arrives, in the order rank, rank-1, ... Both orders are
              fixed, so results do not depend on timing.

    ``together``  without ring: the peers' shards are consumed by one kernel, when all
              have arrived: ``Compute("consume others", rank, ...)`` writes the partial sums for all
              peers.

Source: the backward pass of ring attention (Liu et al., 2023), through shared memory.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait


def _publish_shard(draft: Draft, lane: str, late: list[bool]) -> None:
    """Publishes the own shard to the peers that wait for it.

    ``late[turn]``: whether a rank, by that turn, has a partial sum from the peer whose shard it
    then reads. The peer wrote its shard before that sum, so the shard needs no separate signal.
    """
    draft.add(lane, *draft.claim_slot())
    draft.add(lane, Copy(draft.own("input"), draft.own("slot", draft.world_size)))
    for peer in draft.peers:
        turn = (draft.rank - peer - 1) % draft.world_size  # in which the peer reads this shard
        if not late[turn]:
            draft.add(lane, Signal(peer, "ready"))


# Rank 0 of 3, staged, without ring. Sums are pulled after all shards; their waits are handed out
# after all kernels and signals.
#
#   copy     publish | wait 1 | pull 1 | wait 2 | pull 2 |      wait 2, 1 | pull sums |
#   compute                   | c 0             | c 1 | c 2      |                    | reduce
#   signal                                            | signal 1 | signal 2 |


def _staged(draft: Draft, options: Options) -> None:
    if options:
        _staged_ring(draft) if "ring" in options else _together(draft)
        return
    rank, world_size, others = draft.rank, draft.world_size, draft.peers
    parts = tuple(draft.own("partials", source) for source in range(world_size))

    def pull(turn: int) -> None:
        peer = others[turn]
        # Awaits the peer's shard.
        draft.copy(Wait(peer, "ready"))
        draft.copy(Copy(Region(peer, "slot", world_size), draft.own("gathered", peer)))
        draft.copy(Signal(rank, f"pulled{turn}"))

    if others:
        _publish_shard(draft, "copy", [False] * len(others))
        pull(0)
    draft.compute(Compute("consume", rank, (draft.own("input"),), (parts[rank],)))
    for turn, peer in enumerate(others):
        if turn + 1 < len(others):
            pull(turn + 1)
        draft.compute(Wait(rank, f"pulled{turn}"))
        pulled = draft.own("gathered", peer)
        draft.compute(Compute("consume", peer, (pulled,), (draft.own("slot", peer),)))
        # Publishes the peer's partial sum.
        draft.signal_beside(f"made{turn}", "partial", peer)
    for distance in range(1, world_size):
        # Awaits the partial sum for this rank.
        source = (rank - distance) % world_size
        draft.copy(Wait(source, "partial"), Copy(Region(source, "slot", rank), parts[source]))
    if others:
        draft.end_copies()
    draft.compute(Compute("reduce", rank, parts, (draft.own("output"),)))


# Rank 0 of 3, together. The copies of each "pull" are one batch of the driver.
#
#   copy     publish | wait 1, 2 | pull 1, 2 |          wait 1, 2 | pull sums |
#   compute                      | c 0       | c others |                     | reduce
#   signal                                              | signal 1, 2 |


def _together(draft: Draft) -> None:
    rank, world_size, others = draft.rank, draft.world_size, draft.peers
    parts = tuple(draft.own("partials", source) for source in range(world_size))
    if others:
        _publish_shard(draft, "copy", [False] * len(others))
        draft.copy(*draft.waits("ready"))
        for peer in others:
            draft.copy(Copy(draft.of(peer, "slot", world_size), draft.own("gathered", peer)))
        draft.copy(Signal(rank, "pulled"))
    draft.compute(Compute("consume", rank, (draft.own("input"),), (parts[rank],)))
    if others:
        draft.compute(Wait(rank, "pulled"))
        gathered = tuple(draft.own("gathered", peer) for peer in others)
        sums = tuple(draft.own("slot", peer) for peer in others)
        draft.compute(Compute("consume others", rank, gathered, sums))
        # Publishes the peers' partial sums, then awaits the sums for this rank.
        draft.signal_beside("made", "partial", *others)
        draft.copy(*draft.waits("partial"))
        for source in others:
            draft.copy(Copy(Region(source, "slot", rank), parts[source]))
        draft.end_copies()
    draft.compute(Compute("reduce", rank, parts, (draft.own("output"),)))


# Rank 0 of 4, staged, with ring: room for two shards ("gathered" 0 and 1) and two partial sums.
# Behind each "c" lane "signal" signals its partial sum; "get p" waits for the partial sum that rank
# p made for this rank, and pulls it to "partials".
#
#   copy     publish | pull 1 |     | pull 2 |     | get 3 | pull 3 |       get 2 |       get 1
#   compute                   | c 0 |        | c 1 |                | c 2 | add 3 | c 3 | add 2, 1
#
# Turn t makes a sum for the rank t+1 ahead and gets a sum from the rank t+1 behind, which is ready
# after turn t there: so "get" is handed out after this rank's kernel and signal of that turn.


def _staged_ring(draft: Draft) -> None:
    rank, world_size, others = draft.rank, draft.world_size, draft.peers
    turns = len(others)
    late = [2 * turn >= world_size for turn in range(turns)]
    output, partial = draft.own("output"), draft.own("partials", 0)

    def pull(turn: int) -> None:
        peer = others[turn]
        if turn >= 2:
            # The shard that lies there has been consumed.
            draft.copy(Wait(rank, f"consumed{turn - 2}"))
        if not late[turn]:
            draft.copy(Wait(peer, "ready"))
        draft.copy(Copy(Region(peer, "slot", world_size), draft.own("gathered", turn % 2)))
        draft.copy(Signal(rank, f"pulled{turn}"))

    def consume(turn: int) -> None:
        draft.compute(Wait(rank, f"pulled{turn}"))
        if turn >= 2:
            # The partial sum that lies there has been read.
            draft.compute(Wait(others[turn - 2], "taken"))
        places = draft.own("gathered", turn % 2), draft.own("slot", turn % 2)
        draft.compute(Compute("consume", others[turn], places[:1], places[1:]))
        # Publishes the peer's partial sum.
        draft.signal_beside(f"consumed{turn}", "partial", others[turn])

    def source(turn: int) -> int:
        # In this turn the rank turn + 1 behind computed for this rank.
        return (rank - turn - 1) % world_size

    def collect(turn: int) -> None:
        if turn > 0:
            # The partial sum that lies there has been added.
            draft.copy(Wait(rank, f"added{turn - 1}"))
        draft.copy(Wait(source(turn), "partial"))
        draft.copy(Copy(Region(source(turn), "slot", turn % 2), partial))
        draft.copy(Signal(rank, f"collected{turn}"))
        if turn + 2 < turns:
            draft.copy(Signal(source(turn), "taken"))

    def add(turn: int) -> None:
        draft.compute(Wait(rank, f"collected{turn}"))
        draft.compute(Compute("add", source(turn), (partial, output), (output,)))
        if turn + 1 < turns:
            draft.compute(Signal(rank, f"added{turn}"))

    if others:
        _publish_shard(draft, "copy", late)
        pull(0)
    draft.compute(Compute("consume", rank, (draft.own("input"),), (output,)))
    if turns > 1:
        pull(1)
    for turn in range(turns):
        consume(turn)
        if turn > 0:
            add(turn - 1)
        collect(turn)
        if turn + 2 < turns:
            pull(turn + 2)
    if others:
        add(turns - 1)
    draft.copy(*draft.release(*others))


CONSUME_AND_REDUCE_SCATTER = Pattern(
    "CONSUME_AND_REDUCE_SCATTER",
    "sync",
    staged=Form(_staged, (*subsets("ring"), frozenset({"together"})), one_slot=True),
)
