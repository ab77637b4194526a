"""One-shot all-reduce: every rank sums all ranks' inputs, in rank order, into ``"output"``.

For sums of small tensors, where an exchange costs more than reading W times as much, and for two
ranks whose inputs are symmetric, where TWO_SHOT_ALL_REDUCE neither reads nor writes less.
ALL_REDUCE runs in the calling thread, BACKGROUND_ALL_REDUCE in lane ``"copy"``.

Options
    ``in_place``  the inputs are symmetric tensors, which peers read where they lie

Direct only, in pieces. Source: torch's ``one_shot_all_reduce``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Options, exchange, subsets
from symm_cp.schedule.steps import Compute

# Rank 0 of 3, direct (lane "compute", or "copy" in the background). The kernel reads the own input
# and the peers' slots: stores to the own slot leave no copy of it in the caches.
#
#   copy>slot | signal 1, 2 | wait 1, 2 | reduce


def _direct(draft: Draft, options: Options, lane: str) -> None:
    source = draft.source(options)
    parts = tuple(
        source if owner == draft.rank else draft.shard(owner, options)
        for owner in range(draft.world_size)
    )
    reduce = Compute("reduce", draft.rank, parts, (draft.own("output"),))
    if draft.peers:
        draft.publish_and_reduce(lane, source, reduce)
    else:
        draft.add(lane, reduce)


ALL_REDUCE, BACKGROUND_ALL_REDUCE = exchange("ALL_REDUCE", _direct, subsets("in_place"))
