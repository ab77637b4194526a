"""Two-shot all-reduce of symmetric tensors, in place: reduce one chunk each, then collect the rest.

``Compute("reduce", rank, ...)`` sums chunk ``rank`` of all symmetric tensors, in rank order, into
the slot (which holds just that chunk), from where all ranks copy it. The detour costs a local copy
of 1/W of the tensor, and saves a third exchange ("done") before the call may return: nobody has to
wait for a reader of the slot.

Direct only. Source: torch's ``two_shot_all_reduce_``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern
from symm_cp.schedule.steps import Compute, Copy, Region, Wait

# Rank 0 of 3, direct.
#
#   compute  signal 1, 2 | wait 1, 2 | reduce 0>slot | signal 1, 2 "reduced" | copy 0 |
#            wait 1 | copy 1 | wait 2 | copy 2


def _direct(draft: Draft, options: Options) -> None:
    rank, slot = draft.rank, draft.own("slot")
    if draft.peers:
        parts = tuple(Region(owner, "symmetric", rank) for owner in range(draft.world_size))
        # Publishes what the caller wrote to the tensor; awaits the same of the peers.
        draft.compute(*draft.signals("ready"), *draft.waits("ready"))
        draft.compute(Compute("reduce", rank, parts, (slot,)))
        # Publishes the reduced chunk and says that chunk ``rank`` of the peers has been read.
        draft.compute(*draft.signals("reduced"))
        # Only this rank reads chunk ``rank`` of its tensor, so it may be overwritten now.
        draft.compute(Copy(slot, draft.own("symmetric", rank)))
    for peer in draft.peers:
        # Awaits the peer's reduced chunk, and the end of its reading of that chunk here.
        draft.compute(Wait(peer, "reduced"))
        draft.compute(Copy(Region(peer, "slot"), draft.own("symmetric", peer)))


TWO_SHOT_ALL_REDUCE = Pattern("TWO_SHOT_ALL_REDUCE", "sync", direct=Form(_direct))
