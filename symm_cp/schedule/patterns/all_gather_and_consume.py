"""All-gather and consume: a kernel for each rank's shard, its own first, the others on arrival.

``Compute("consume", p, reads=(shard of p,), ...)`` runs for each rank p in the order rank, rank+1,
... It may write any part of ``"output"``: chunk p, or a sum over shards; with ``lanes`` chunk p.

Options
    ``in_place``  the shards are symmetric tensors, which peers read where they lie
    ``keep``      all shards are also copied to the private buffer ``"gathered"``
    ``bounded``   ``"gathered"`` has room for two shards, used in turn; excludes keep
    ``lanes``     kernels alternate between two lanes, so that the next one fills multiprocessors
                  that the last tiles of the one before leave idle; excludes bounded
    ``together``  one kernel consumes the peers' shards, when all have arrived;
                  excludes the others. ``Compute("consume", rank, ...)`` is followed by
                  ``Compute("consume others", rank, reads=(all of them), ...)``

Source: torch's ``_pipelined_all_gather_and_consume``, with point-to-point epochs instead of
barriers.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

# Rank 0 of 3, staged. Each pull is handed out before the kernel that it overlaps.
#
#   copy     copy>slot | signal 1, 2 | wait 1 | pull 1 | wait 2 | pull 2 |
#   compute                          | consume 0       | consume 1       | consume 2 |
#
# With ``lanes``:
#
#   compute                          | consume 0            | consume 2 |
#   compute2                                  | consume 1     |


def _staged(draft: Draft, options: Options) -> None:
    if "together" in options:
        _together(draft)
        return
    rank, others = draft.rank, draft.peers
    in_place, bounded, keep, lanes = (
        name in options for name in ("in_place", "bounded", "keep", "lanes")
    )
    source = draft.source(options)
    own = [Copy(source, draft.own("gathered", rank))] if keep else []
    last = others[-1] if others else rank

    def place(turn: int) -> Region:
        return draft.own("gathered", turn % 2 if bounded else others[turn])

    def pull(turn: int) -> None:
        peer = others[turn]
        if bounded and turn >= 2:
            # The shard that lies there has been consumed.
            draft.copy(Wait(rank, f"consumed{turn - 2}"))
        if peer == last:
            draft.copy(*own)
        # Awaits the peer's shard.
        draft.copy(Wait(peer, "ready"))
        draft.copy(Copy(draft.shard(peer, options), place(turn)))
        draft.copy(Signal(rank, f"pulled{turn}"), *draft.release(peer, in_place=in_place))

    def consume(lane: str, shard: Region, index: int) -> None:
        reads = {shard: None}
        if keep and index == last and not lanes:
            # When the last kernel runs, "gathered" holds all shards.
            reads |= {draft.own("gathered", owner): None for owner in range(draft.world_size)}
        output = draft.own("output", index if lanes else None)
        draft.add(lane, Compute("consume", index, tuple(reads), (output,)))

    if others:
        draft.begin_staged(source)
        pull(0)
    else:
        draft.compute(*own)
    lane = "compute"
    consume(lane, source, rank)
    for turn, peer in enumerate(others):
        if turn + 1 < len(others):
            pull(turn + 1)
        lane = draft.compute_lane(turn + 1, options)
        draft.add(lane, Wait(rank, f"pulled{turn}"))
        consume(lane, place(turn), peer)
        if bounded and turn + 2 < len(others):
            draft.compute(Signal(rank, f"consumed{turn}"))
    if in_place and others:
        # The caller may overwrite its tensor after this.
        draft.copy(*draft.waits("done"), Signal(rank, "ended"))
        draft.compute(Wait(rank, "ended"))
    elif lane == "compute2" and draft.slots > 1:
        # Later calls take this rank's signals as the end of lane "compute", which may write a slot.
        draft.join_compute2()


# Rank 0 of 3, together. The copies are one batch of the driver.
#
#   copy     copy>slot | signal 1, 2 | wait 1, 2 | pull 1, 2 |
#   compute                          | consume 0             | consume others


def _together(draft: Draft) -> None:
    rank, others = draft.rank, draft.peers
    places = [draft.own("gathered", peer) for peer in others]
    if others:
        draft.begin_staged(draft.own("input"))
        draft.copy(*draft.waits("ready"))
        for peer, place in zip(others, places, strict=True):
            draft.copy(Copy(draft.of(peer, "slot"), place))
        draft.copy(Signal(rank, "pulled"))
        draft.copy(*draft.release(*others))
    draft.compute(Compute("consume", rank, (draft.own("input"),), (draft.own("output"),)))
    if others:
        draft.compute(Wait(rank, "pulled"))
        output = (draft.own("output"),)
        draft.compute(Compute("consume others", rank, tuple(places), output))


ALL_GATHER_AND_CONSUME = Pattern(
    "ALL_GATHER_AND_CONSUME",
    "sync",
    staged=Form(
        _staged,
        (
            *subsets("in_place", "keep", "lanes"),
            frozenset({"bounded"}),
            frozenset({"together"}),
            frozenset({"in_place", "bounded"}),
        ),
        one_slot=True,
    ),
)
