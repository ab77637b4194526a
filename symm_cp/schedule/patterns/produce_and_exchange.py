"""Produce and exchange: a kernel writes what goes to each peer, another takes what each has given.

``Compute("produce", p, (), ...)`` runs for each peer p and writes what goes there. Then ``Compute(
"keep", rank, ...)`` makes what stays, while the rest travels, and ``Compute("consume", p, (what p
gave,), ...)`` runs for each peer as its part arrives; both may write any part of ``"output"``.

An all-to-all around whose ends there is work: matmuls, or copies to where things belong. Source:
torch's ``_pipelined_produce_and_all2all``, DeepSpeed-Ulysses.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

# Rank 0 of 3, direct. "consume" reads the peers' slots.
#
#   compute  produce 1 | signal 1 | produce 2 | signal 2 | keep | wait 1 | consume 1 | wait 2 | ...


def _direct(draft: Draft, options: Options) -> None:
    rank, output = draft.rank, draft.own("output")
    for peer in draft.peers:
        draft.compute(Compute("produce", peer, (), (draft.own("slot", peer),)))
        # Publishes the peer's chunk.
        draft.compute(Signal(peer, "partial"))
    draft.compute(Compute("keep", rank, (), (output,)))
    for peer in draft.peers:
        # Awaits chunk ``rank`` of the peer.
        draft.compute(Wait(peer, "partial"))
        draft.compute(Compute("consume", peer, (Region(peer, "slot", rank),), (output,)))


# Rank 0 of 3, staged. In turn t rank r produces for r+t+1 and pulls from r-t-1, which produced for
# r in the same turn. The wait for it is handed out after this rank's signal of that turn.
#
#   compute  produce 1 | signal 1 | produce 2 | signal 2 | keep | consume 2 | consume 1
#   copy                          | wait 2 | pull 2      | wait 1 | pull 1 |


def _staged(draft: Draft, options: Options) -> None:
    rank, output = draft.rank, draft.own("output")
    sources = [(rank - turn - 1) % draft.world_size for turn in range(len(draft.peers))]
    draft.compute(*draft.claim_slot())
    for turn, (peer, source) in enumerate(zip(draft.peers, sources, strict=True)):
        draft.compute(Compute("produce", peer, (), (draft.own("slot", peer),)))
        # Publishes the peer's chunk.
        draft.compute(Signal(peer, "partial"))
        draft.copy(Wait(source, "partial"))
        draft.copy(Copy(Region(source, "slot", rank), draft.own("gathered", source)))
        draft.copy(Signal(rank, f"pulled{turn}"), *draft.release(source))
    draft.compute(Compute("keep", rank, (), (output,)))
    for turn, source in enumerate(sources):
        draft.compute(Wait(rank, f"pulled{turn}"))
        draft.compute(Compute("consume", source, (draft.own("gathered", source),), (output,)))


PRODUCE_AND_EXCHANGE = Pattern(
    "PRODUCE_AND_EXCHANGE",
    "sync",
    direct=Form(_direct),
    staged=Form(_staged, one_slot=True),
)
