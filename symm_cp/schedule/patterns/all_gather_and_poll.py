"""All-gather and poll: one kernel consumes all shards and polls for those in flight.

``Compute("consume", rank, ...)`` starts with the own shard where it is (``"input"``). It reads
chunk p of the private buffer ``"gathered"`` only after it has seen the own flag of that pull:
``"arrived<i>"`` for the i-th peer.

Options
    ``keep``  the own shard is also copied to chunk ``rank`` of ``"gathered"``

In a kernel of several programs, a program may read shard p having seen no flag but p's. That is
enough: one lane raises the flags, each behind its pull.

Staged only, and only with two slots: the kernel compares epochs, which a graph cannot change.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

# Rank 0 of 3, staged. The whole copy lane is handed out before the kernel: later steps might run
# only once the kernel has ended. The kernel starts only when the peers have been signalled: it may
# fill all multiprocessors, and copies within a device may need one.
#
#   copy     copy>slot | signal 1, 2 | wait 1 | pull 1 | wait 2 | pull 2 |
#   compute                          | consume (0 ........ 1 ........ 2) |


def _staged(draft: Draft, options: Options) -> None:
    rank, source = draft.rank, draft.own("input")
    awaits: list[tuple[str, Region]] = []
    own = [Copy(source, draft.own("gathered", rank))] if "keep" in options else []
    if draft.peers:
        draft.begin_staged(source)
        draft.copy(*own, Signal(rank, "offered"))
    else:
        draft.compute(*own)
    for turn, peer in enumerate(draft.peers):
        flag, pulled = f"arrived{turn}", draft.own("gathered", peer)
        # Awaits the peer's shard.
        draft.copy(Wait(peer, "ready"), Copy(Region(peer, "slot"), pulled), Signal(rank, flag))
        awaits.append((flag, pulled))
    if draft.peers:
        draft.compute(Wait(rank, "offered"))
    draft.compute(Compute("consume", rank, (source,), (draft.own("output"),), tuple(awaits)))


ALL_GATHER_AND_POLL = Pattern("ALL_GATHER_AND_POLL", "sync", staged=Form(_staged, subsets("keep")))
