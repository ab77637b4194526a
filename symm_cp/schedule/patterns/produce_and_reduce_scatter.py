"""Produce and reduce-scatter: each peer's chunk is published as soon as it has been produced.

``Compute("produce", p, (), ...)`` runs for each peer p, and for the own rank last: the own chunk
needs no transfer, so producing it hides the transfer of the others. It reads private memory of the
caller's choice. ``Compute("reduce", rank, ...)`` adds the partial sums of all ranks in rank
order, so that the result does not depend on timing.

Options
    ``lanes``     kernels alternate between two lanes, so that the next one fills multiprocessors
                  that the last tiles of the one before leave idle
    ``together``  with two slots: one kernel produces for all ranks, and raises an own
                  flag ``"counted<i>"`` when it has written the chunk of the i-th peer. It compares
                  epochs, which a graph cannot change.

Source: torch's ``_pipelined_produce_and_all2all``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

# Rank 0 of 3, staged. In turn t rank r produces for r+t+1 and pulls from r-t-1, which produced for
# r in the same turn. The wait for it is handed out after this rank's signal of that turn.
#
#   compute  produce 1 | produce 2 | produce 0 |                   reduce
#   signal             | signal 1  | signal 2 |
#   copy                           | wait 2 | pull 2 | wait 1 | pull 1 |
#
# With ``lanes``:
#
#   compute  produce 1    | produce 0 |                          reduce
#   compute2   | produce 2    |


# Rank 0 of 3, together. One kernel does its parts one after the other. It waits for nothing and is
# handed out first, so lane "signal" may wait for it in any queue that they share.
#
#   compute  produce (1 ........ 2 ........ 0) |                   reduce
#   signal   wait 1    | signal 1 | signal 2 |
#   copy                          | wait 2 | pull 2 | wait 1 | pull 1 |


def _staged(draft: Draft, options: Options) -> None:
    rank, others, together = draft.rank, draft.peers, "together" in options
    parts = tuple(draft.own("partials", source) for source in range(draft.world_size))
    draft.compute(*draft.claim_slot())
    if "lanes" in options and len(others) > 1:
        # Both lanes write the slot.
        draft.compute(Signal(rank, "begun"))
        draft.add("compute2", Wait(rank, "begun"))
    if together:
        counted = [(f"counted{i}", draft.own("slot", peer)) for i, peer in enumerate(others)]
        draft.compute(Compute("produce", rank, (), (parts[rank],), raises=tuple(counted)))
    for turn, peer in enumerate(others):
        # Publishes the peer's chunk.
        if together:
            draft.add("signal", Wait(rank, f"counted{turn}"), draft.signal(peer, "partial"))
        else:
            lane = draft.compute_lane(turn, options)
            draft.add(lane, Compute("produce", peer, (), (draft.own("slot", peer),)))
            draft.signal_beside(f"made{turn}", "partial", peer, lane=lane)
        source = (rank - turn - 1) % draft.world_size
        draft.copy(Wait(source, "partial"), Copy(Region(source, "slot", rank), parts[source]))
    if not together:
        lane = draft.compute_lane(len(others), options)
        draft.add(lane, Compute("produce", rank, (), (parts[rank],)))
        if lane == "compute2":
            draft.join_compute2()
    if others:
        draft.end_copies()
    draft.compute(Compute("reduce", rank, parts, (draft.own("output"),)))


PRODUCE_AND_REDUCE_SCATTER = Pattern(
    "PRODUCE_AND_REDUCE_SCATTER",
    "sync",
    staged=Form(
        _staged,
        (*subsets("together"), frozenset({"lanes"})),
        one_slot=True,
        two_slots=("together",),
    ),
)
