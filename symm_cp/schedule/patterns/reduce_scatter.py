"""Reduce-scatter: chunk ``rank`` of all ranks' inputs is summed, in rank order, into ``"output"``.

``Compute("reduce", rank, ...)`` reads chunk ``rank`` of every rank's contribution: ``"input"``, of
W chunks. REDUCE_SCATTER runs in the calling thread, BACKGROUND_REDUCE_SCATTER in lane ``"copy"``
while the caller goes on. In direct form that lane does not read the input after its signals; in
staged form lane ``"compute"`` copies the input to ``"partials"`` first.

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


# Rank 0 of 3, staged: the slot holds the input; chunk 0 of all slots comes to "partials", which
# holds the input before. In place the copy lane does all, and the call ends with "done".
#
#   compute  copy input>partials |
#   copy       copy partials>slot | signal 1, 2 | wait 1, 2 | copy own, pull 1, 2 | reduce


def _staged(draft: Draft, options: Options) -> None:
    rank, others, in_place = draft.rank, draft.peers, "in_place" in options
    parts = tuple(draft.own("partials", source) for source in range(draft.world_size))
    if in_place:
        draft.copy(*draft.signals("ready"))
    else:
        draft.publish_in_background(draft.own("partials"))
    draft.copy(*draft.waits("ready"))
    for owner in (rank, *others) if others or in_place else ():
        chunk = Region(owner, draft.shard(owner, options).buffer, rank)
        draft.copy(Copy(chunk, parts[owner]))
    draft.copy(*draft.release(*others, in_place=in_place))
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
