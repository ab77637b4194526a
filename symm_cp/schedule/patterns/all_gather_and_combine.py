"""All-gather and combine: one kernel that reads all shards at once.

``Compute("combine", rank, reads, ("output",))`` reads the shards of all ranks, in rank order. Where
copies have put the shards in their places in the results, the kernel has nothing to do.

Options
    ``in_place``  the shards are symmetric tensors, which peers read where they lie

Source: torch's ``one_shot_all_reduce``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Copy, Signal, Wait

# Rank 0 of 3, staged. The own shard is copied to "gathered", too.
#
#   copy     copy>slot | signal 1, 2 | copy own | wait 1, 2 | pull 1, 2 |
#   compute                                                             | combine


def _staged(draft: Draft, options: Options) -> None:
    rank, others, in_place = draft.rank, draft.peers, "in_place" in options
    source = draft.source(options)
    parts = tuple(draft.own("gathered", owner) for owner in range(draft.world_size))
    keep = Copy(source, parts[rank])
    if others:
        draft.begin_staged(source)
        draft.copy(keep, *draft.waits("ready"))
        for peer in others:
            draft.copy(Copy(draft.shard(peer, options), parts[peer]))
        draft.copy(*draft.release(*others, in_place=in_place))
        if in_place:
            # The caller may overwrite its tensor after this.
            draft.copy(*draft.waits("done"))
        draft.copy(Signal(rank, "ended"))
        draft.compute(Wait(rank, "ended"))
    else:
        draft.compute(keep)
    draft.compute(Compute("combine", rank, parts, (draft.own("output"),)))


ALL_GATHER_AND_COMBINE = Pattern(
    "ALL_GATHER_AND_COMBINE",
    "sync",
    staged=Form(_staged, subsets("in_place"), one_slot=True),
)
