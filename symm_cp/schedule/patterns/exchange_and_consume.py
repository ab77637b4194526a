"""Exchange and consume: parts for all ranks travel while a kernel works on local data.

``Compute("give", p, (), ...)`` runs for each peer p and writes its part. Then ``Compute("consume",
rank, ...)`` runs while the parts travel, and ``Compute("take", p, (part from p,), ...)`` for each
peer as its part arrives; both may write any part of ``"output"``.

An all-to-all with work at both ends and in between. A pipeline over groups of heads is one call a
step: group i+1 is given, group i is consumed, and the results of group i-1 travel back in the same
messages (``runtime/round_trips.py``). Source: torch's ``_pipelined_produce_and_all2all``,
DeepSpeed-Ulysses.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

# Rank 0 of 3, direct. "take" reads the peers' slots.
#
#   compute  give 1 | signal 1 | give 2 | signal 2 | consume | wait 1 | take 1 | wait 2 | take 2


def _direct(draft: Draft, options: Options) -> None:
    rank, output = draft.rank, draft.own("output")
    for peer in draft.peers:
        draft.compute(Compute("give", peer, (), (draft.own("slot", peer),)))
        # Publishes the peer's chunk.
        draft.compute(Signal(peer, "partial"))
    draft.compute(Compute("consume", rank, (), (output,)))
    for peer in draft.peers:
        # Awaits chunk ``rank`` of the peer.
        draft.compute(Wait(peer, "partial"))
        draft.compute(Compute("take", peer, (Region(peer, "slot", rank),), (output,)))


# Rank 0 of 3, staged. In turn t rank r gives to r+t+1 and pulls from r-t-1, which gave to r in the
# same turn. The wait for it is handed out after this rank's signal of that turn.
#
#   compute  give 1 | give 2   | consume                            | take 2 | take 1
#   signal          | signal 1 | signal 2 |
#   copy                       | wait 2 | pull 2 | wait 1 | pull 1 |


def _staged(draft: Draft, options: Options) -> None:
    rank, output = draft.rank, draft.own("output")
    sources = [(rank - turn - 1) % draft.world_size for turn in range(len(draft.peers))]
    draft.compute(*draft.claim_slot())
    for turn, (peer, source) in enumerate(zip(draft.peers, sources, strict=True)):
        draft.compute(Compute("give", peer, (), (draft.own("slot", peer),)))
        # Publishes the peer's chunk.
        draft.signal_beside(f"made{turn}", "partial", peer)
        draft.copy(Wait(source, "partial"))
        draft.copy(Copy(Region(source, "slot", rank), draft.own("gathered", source)))
        draft.copy(Signal(rank, f"pulled{turn}"), *draft.release(source))
    draft.compute(Compute("consume", rank, (), (output,)))
    for turn, source in enumerate(sources):
        draft.compute(Wait(rank, f"pulled{turn}"))
        draft.compute(Compute("take", source, (draft.own("gathered", source),), (output,)))


EXCHANGE_AND_CONSUME = Pattern(
    "EXCHANGE_AND_CONSUME",
    "sync",
    direct=Form(_direct),
    staged=Form(_staged, one_slot=True),
)
