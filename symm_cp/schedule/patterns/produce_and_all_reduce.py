"""Produce and all-reduce: all ranks' contributions are summed, in rank order, in each ``"output"``.

In two shots: each rank sums all ranks' contributions to one chunk, then all collect the others'
chunks. ``Compute("produce", p, (), ...)`` runs for each peer's chunk, and for the own chunk last:
producing it hides the transfer of the others. It reads private memory of the caller's choice. All
ranks copy a chunk's sum from one rank, so their results are bitwise equal.

Options
    ``whole``     ``Compute("produce", rank, (), ...)`` runs once, for all chunks
    ``one_shot``  like ``whole``; then every rank sums all chunks itself: it waits once, and reads
                  more than in two shots if there are more than two ranks

Source: torch's ``_pipelined_produce_and_all2all``, and its ``two_shot_all_reduce_``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Form, Options, Pattern
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait

_COMBINATIONS = (frozenset[str](), frozenset({"whole"}), frozenset({"one_shot"}))

# Bytes that a rank would read in one shot, from which on two shots are faster if it has more than
# one peer (as in csrc/exchange/exchange.h). A smaller number synchronises twice for small results;
# a larger one reads each contribution W - 1 times where once would do. Results are computed in
# slots, so that two ranks gain nothing by two shots.
_TWO_SHOTS_FROM = 192 << 10


def in_one_shot(nbytes: int, ranks: int) -> bool:
    """Whether every rank sums all of a result that ranks produce as a whole."""
    return ranks <= 2 or nbytes * (ranks - 1) < _TWO_SHOTS_FROM


def _produce_alone(draft: Draft) -> None:
    draft.compute(Compute("produce", draft.rank, (), (draft.own("output"),)))


def _contributions(draft: Draft, options: Options) -> tuple[Region, ...]:
    """The terms of this rank's sum, in rank order."""
    chunk = None if "one_shot" in options else draft.rank
    return tuple(Region(source, "slot", chunk) for source in range(draft.world_size))


# Rank 0 of 3, staged. "get p" waits for rank p, then pulls its contribution to chunk 0. As in
# produce_and_reduce_scatter, rank r produces for r+t+1 in turn t and pulls from r-t-1. Copies read
# the own slot in lane "copy", from where later calls may write to it.
#
#   compute  produce 1 | produce 2 | produce 0 |     | sum 0 |
#   signal             | signal 1  | signal 2 |              | signal 1, 2 |
#   copy                           | get 2     | get 1       | pull sums 1, 2, 0
#
# With ``whole`` or ``one_shot``:
#
#   compute  produce |                           sum ...
#   signal           | signal 1, 2 |
#   copy                           | get 0, 2, 1 |


def _staged(draft: Draft, options: Options) -> None:
    rank, others, world_size = draft.rank, draft.peers, draft.world_size
    if not others:
        _produce_alone(draft)
        return
    parts = tuple(draft.own("partials", source) for source in range(world_size))
    contributions = _contributions(draft, options)
    draft.compute(*draft.claim_slot())
    if options:
        draft.compute(Compute("produce", rank, (), (draft.own("slot"),)))
        draft.signal_beside("published", "partial", *others)
        draft.copy(Wait(rank, "published"), Copy(contributions[rank], parts[rank]))
    for turn, peer in enumerate(others):
        if not options:
            draft.compute(Compute("produce", peer, (), (draft.own("slot", peer),)))
            # Publishes the contribution to the peer's chunk.
            draft.signal_beside(f"made{turn}", "partial", peer)
        source = (rank - turn - 1) % world_size
        draft.copy(Wait(source, "partial"), Copy(contributions[source], parts[source]))
    if not options:
        draft.compute(Compute("produce", rank, (), (parts[rank],)))
    draft.copy(Signal(rank, "collected"))
    draft.compute(Wait(rank, "collected"))
    if "one_shot" in options:
        draft.compute(Compute("reduce", rank, parts, (draft.own("output"),)))
    else:
        _exchange_sums(draft, parts)
    draft.copy(*draft.release(*others))


def _exchange_sums(draft: Draft, parts: tuple[Region, ...]) -> None:
    rank, summed = draft.rank, draft.own("slot", draft.rank)
    draft.compute(Compute("reduce", rank, parts, (summed,)))
    # Publishes the sum.
    draft.signal_beside("summed", "reduced", *draft.peers)
    for peer in draft.peers:
        draft.copy(draft.wait(peer, "reduced"))
        draft.copy(Copy(Region(peer, "slot", peer), draft.own("output", peer)))
    draft.copy(Wait(rank, "summed"), Copy(summed, draft.own("output", rank)))
    # Peers take this rank's signals of the next call as the end of its reads in this call.
    draft.copy(Signal(rank, "ended"))
    draft.compute(Wait(rank, "ended"))


PRODUCE_AND_ALL_REDUCE = Pattern(
    "PRODUCE_AND_ALL_REDUCE",
    "sync",
    staged=Form(_staged, _COMBINATIONS, one_slot=True),
)
