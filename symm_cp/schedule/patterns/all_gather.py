"""All-gather: every rank's shard is copied to chunk 0, ..., W-1 of ``"output"``.

ALL_GATHER runs in the calling thread, BACKGROUND_ALL_GATHER in lane ``"copy"``. In direct form that
lane does not read the input after the signals, so the caller may reuse it. In staged form lane
``"compute"`` copies the input to the output before the caller goes on.

Options
    ``in_place``  the shards are symmetric tensors, which peers read where they lie

Source: DeepEP V2's batched copies with the call number as epoch.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, exchange, subsets
from symm_cp.schedule.steps import Copy

# Rank 0 of 3, direct, in pieces (lane "compute", or "copy" in the background). The own shard is
# copied first: the caller may carry out the steps up to the signals itself, and reuse its input.
#
#   copy  copy own, copy>slot | signal 1, 2 | wait 1 | copy 1 | wait 2 | copy 2


def _direct(draft: Draft, options: Options, lane: str) -> None:
    in_place, source = "in_place" in options, draft.source(options)
    draft.add(lane, Copy(source, draft.own("output", draft.rank)))
    if draft.peers:
        # Publishes the shard.
        draft.add(lane, *draft.publish(source))
    for peer in draft.peers:
        # Awaits the peer's shard.
        draft.add(lane, draft.wait(peer, "ready"))
        shard = draft.shard(peer, options)
        draft.add(lane, Copy(shard, draft.own("output", peer)))
        draft.add(lane, *draft.release(peer, in_place=in_place))
    if in_place:
        # Awaits the end of all peers' reads here.
        draft.add(lane, *draft.waits("done"))


# Rank 0 of 3, staged. All waits come before all pulls, so that a runtime may batch either. In place
# the copy lane does all, and the call ends with "done".
#
#   compute  copy own |
#   copy              | copy own>slot | signal 1, 2 | wait 1, 2 | pull 1, 2


def _staged(draft: Draft, options: Options) -> None:
    others, in_place = draft.peers, "in_place" in options
    source = draft.source(options)
    own = draft.own("output", draft.rank)
    if in_place:
        draft.copy(*draft.signals("ready"), *draft.waits("ready"), Copy(source, own))
    else:
        draft.publish_in_background(own)
        draft.copy(*draft.waits("ready"))
    for peer in others:
        shard = draft.shard(peer, options)
        draft.copy(Copy(shard, draft.own("output", peer)))
    draft.copy(*draft.release(*others, in_place=in_place))
    if in_place:
        # The caller may overwrite its tensor after this.
        draft.copy(*draft.waits("done"))


ALL_GATHER, BACKGROUND_ALL_GATHER = exchange(
    "ALL_GATHER",
    _direct,
    subsets("in_place"),
    staged=Form(_staged, subsets("in_place"), one_slot=True),
)
