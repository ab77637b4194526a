"""Relay: a chain of ranks, each of which takes the output of the previous one, piece by piece.

``Compute("step", p, reads=(chunk p of the slot of the rank before,), ...)`` runs for each piece p,
and writes chunk p of the own slot for the rank after. The first rank reads nothing, the last one
writes no slot. So rank r works on piece p while rank r + 1 works on piece p - 1: with P pieces and
W ranks the last rank begins W - 1 steps late, and no rank does any work twice.

Options
    ``reverse``  the chain goes from the last rank to the first

Direct only: flags of streams have no pieces.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern, subsets
from symm_cp.schedule.steps import Compute, Region, Signal, Wait

# Rank 1 of 3, direct, two pieces. Rank 1 signals to rank 0 only that it has reached this call.
#
#   compute  signal 0 | wait 0 (piece 0) | step 0 | signal 2 (piece 0) |
#            wait 0 (piece 1) | step 1 | signal 2 (piece 1) | wait 2


def _direct(draft: Draft, options: Options) -> None:
    rank, towards = draft.rank, -1 if "reverse" in options else 1
    before, after = rank - towards, rank + towards
    for peer in draft.peers:
        if peer != after:
            draft.compute(Signal(peer, "ready"))
    for piece in range(draft.pieces):
        reads, writes = [], [draft.own("output")]
        if before in draft.peers:
            # Awaits the piece of the rank before.
            draft.compute(Wait(before, "ready", piece=piece))
            reads.append(Region(before, "slot", piece))
        if after in draft.peers:
            writes.append(draft.own("slot", piece))
        draft.compute(Compute("step", piece, tuple(reads), tuple(writes)))
        if after in draft.peers:
            # Publishes the piece.
            draft.compute(Signal(after, "ready", piece))
    for peer in draft.peers:
        if peer != before:
            # As in every call: the peer has read the slot of the last call. For ranks further up
            # the chain the pieces prove that already, but a rank that fails a call needs a direct
            # signal from each peer that has reached the call.
            draft.compute(Wait(peer, "ready"))


RELAY = Pattern("RELAY", "sync", direct=Form(_direct, subsets("reverse"), chained=True))
