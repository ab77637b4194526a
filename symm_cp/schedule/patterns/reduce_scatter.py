"""Reduce-scatter: chunk ``rank`` of all ranks' inputs is summed, in rank order, into ``"output"``.

``Compute("reduce", rank, ...)`` reads chunk ``rank`` of every rank's contribution: ``"input"``, of
W chunks. REDUCE_SCATTER runs in the calling thread, BACKGROUND_REDUCE_SCATTER in lane ``"copy"``
while the caller goes on. In direct form that lane does not read the input after its signals; in
staged form lane ``"compute"`` copies the input away first.

Options
    ``in_place``  the inputs are symmetric tensors, which peers read where they lie
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, exchange, subsets
from symm_cp.schedule.steps import Compute, Copy, Region

# Rank 0 of 3, direct, in pieces (lane "compute", or "copy" in the background: there the own chunk
# is copied to the output first, as the caller may reuse its input after the signals).
#
#   copy chunks>slot | signal 1, 2 | wait 1, 2 | reduce


def _direct(draft: Draft, options: Options, lane: str) -> None:
    rank, source, output = draft.rank, draft.source(options), draft.own("output")
    own, theirs = draft.own(source.buffer, rank), draft.shard(rank, options).buffer
    if draft.peers and lane == "copy" and "in_place" not in options:
        draft.add(lane, Copy(own, output))
        own = output
    parts = tuple(
        own if owner == rank else draft.of(owner, theirs, rank) for owner in range(draft.world_size)
    )
    reduce = Compute("reduce", rank, parts, (output,))
    if draft.peers:
        draft.publish_and_reduce(lane, source, reduce, draft.peers)
    else:
        draft.add(lane, reduce)


# Rank 0 of 3, staged: the slot holds the chunks for peers; chunk 0 of all comes to "partials". As
# above, "done" is the signal of the call two before, and in place the copy lane does all.
#
#   compute  wait done 1, 2 | copy own, copy chunks>slot |
#   copy       signal 1, 2 (when they are there) | wait 1, 2 | pull 1, 2 | done 1, 2 | reduce


def _staged(draft: Draft, options: Options) -> None:
    rank, others, in_place = draft.rank, draft.peers, "in_place" in options
    parts = tuple(draft.own("partials", source) for source in range(draft.world_size))
    own, theirs = ("symmetric", "symmetric") if in_place else ("input", "slot")
    keep = Copy(draft.own(own, rank), parts[rank])
    if in_place:
        draft.copy(keep, *draft.signals("ready"))
    else:
        published = (Copy(draft.own("input", peer), draft.own("slot", peer)) for peer in others)
        draft.publish_in_background(keep, *published)
    draft.copy(*draft.waits("ready"))
    draft.copy(*(Copy(Region(peer, theirs, rank), parts[peer]) for peer in others))
    draft.copy(*draft.signals("done"))
    draft.copy(Compute("reduce", rank, parts, (draft.own("output"),)))
    if in_place:
        # The caller may overwrite its tensor after this.
        draft.copy(*draft.waits("done"))


REDUCE_SCATTER, BACKGROUND_REDUCE_SCATTER = exchange(
    "REDUCE_SCATTER",
    _direct,
    subsets("in_place"),
    staged=Form(_staged, subsets("in_place"), one_slot=True),
)
