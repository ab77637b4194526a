"""Two-shot all-reduce: each rank reduces one chunk, then all collect the others' chunks.

``Compute("reduce", rank, ...)`` sums chunk ``rank`` of all ranks' inputs, in rank order, into the
slot, from where all ranks copy it. TWO_SHOT_ALL_REDUCE runs in the calling thread,
BACKGROUND_TWO_SHOT_ALL_REDUCE in lane ``"copy"``.

Options
    ``in_place``  the inputs are symmetric tensors, which are also the outputs; no third exchange
                  ("done") is needed: a rank overwrites a chunk only after the chunk's owner has
                  signalled that it has reduced it

Direct only, in pieces. Source: torch's ``two_shot_all_reduce_``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Options, exchange, subsets
from symm_cp.schedule.steps import Compute, Copy

# Rank 0 of 3, direct (lane "compute", or "copy" in the background).
#
#   copy 1, 2>slot | signal 1, 2 | wait 1, 2 | reduce 0>slot | signal 1, 2 "reduced" | copy 0 |
#   wait 1 | copy 1 | wait 2 | copy 2


def _direct(draft: Draft, options: Options, lane: str) -> None:
    rank, in_place = draft.rank, "in_place" in options
    given, taken = ("symmetric", "symmetric") if in_place else ("input", "output")
    theirs = "symmetric" if in_place else "slot"
    ranks = range(draft.world_size)
    parts = tuple(draft.of(owner, given if owner == rank else theirs, rank) for owner in ranks)
    if not draft.peers:
        draft.add(lane, Compute("reduce", rank, parts, (draft.own(taken, rank),)))
        return
    slot = draft.own("slot", rank)
    # Publishes the chunks that peers reduce.
    draft.add(lane, *draft.publish(draft.own(given), draft.peers), *draft.waits("ready"))
    draft.add(lane, Compute("reduce", rank, parts, (slot,)))
    # Publishes the reduced chunk and says that chunk ``rank`` of the peers has been read.
    draft.add(lane, *draft.signals("reduced"))
    # In place, too: only this rank reads chunk ``rank`` of its tensor.
    draft.add(lane, Copy(slot, draft.own(taken, rank)))
    for peer in draft.peers:
        # Awaits the peer's reduced chunk, and the end of its reads of that chunk here.
        draft.add(lane, draft.wait(peer, "reduced"))
        draft.add(lane, Copy(draft.of(peer, "slot", peer), draft.own(taken, peer)))


TWO_SHOT_ALL_REDUCE, BACKGROUND_TWO_SHOT_ALL_REDUCE = exchange(
    "TWO_SHOT_ALL_REDUCE", _direct, subsets("in_place")
)
