"""Two-shot all-reduce: each rank reduces one chunk, then all collect the others' chunks.

``Compute("reduce", rank, ...)`` sums chunk ``rank`` of all ranks' inputs, in rank order, into the
slot, from where all ranks copy it. TWO_SHOT_ALL_REDUCE runs in the calling thread,
BACKGROUND_TWO_SHOT_ALL_REDUCE in lane ``"copy"``.

Options
    ``in_place``  the inputs are symmetric tensors, which are also the outputs; no third exchange
                  ("done") is needed: a rank overwrites a chunk only after the chunk's owner has
                  signalled that it has reduced it
    ``two_sockets``, ``four_sockets``
                  each socket has the same number of consecutive ranks, at least two. They sum
                  among themselves first, so that each byte crosses the link between two sockets
                  once for each socket, not once for each rank. Partial sums lie in slots, rounded
                  to the dtype. Other world sizes run the plain steps.

Direct only, in pieces. Source: torch's ``two_shot_all_reduce_``; between sockets, the hierarchical
all-reduce of Horovod and NCCL.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Options, exchange, subsets
from symm_cp.schedule.steps import Compute, Copy, Step

# Rank 0 of 3, direct (lane "compute", or "copy" in the background).
#
#   copy 1, 2>slot | signal 1, 2 | wait 1, 2 | reduce 0>slot | signal 1, 2 "reduced" | copy 0 |
#   wait 1 | copy 1 | wait 2 | copy 2

SOCKETS = {"two_sockets": 2, "four_sockets": 4}


def socket_of(rank: int, world_size: int, sockets: int) -> range | None:
    """The ranks on the socket of ``rank``; None for one rank per socket or unequal sockets."""
    each = world_size // sockets
    if each < 2 or world_size % sockets:
        return None
    first = rank // each * each
    return range(first, first + each)


# Rank 0 of 4 on two sockets, direct. Rank 1 is on its socket; rank 2 has its place on the other.
#
#   copy 1, 3>slot | signal 1, 3 | wait 1, 3 | reduce 0>slot | reduce 2>slot |
#   signal 2 "partial" | wait 2 | reduce 0>slot | signal 2 "reduced" | wait 2 | copy 2>slot |
#   signal 1 "relayed" | copy 0 | copy 2 | wait 1 | copy 1 | copy 3


def _by_socket(draft: Draft, lane: str, near: range) -> None:
    rank, each = draft.rank, len(near)
    # The ranks with the same place on each socket as this rank. Each sums a chunk.
    twins = range(rank % each, draft.world_size, each)
    others = tuple(peer for peer in draft.peers if peer in twins)
    on_socket = tuple(peer for peer in draft.peers if peer in near)

    def sum_of(chunk: int, owners: range, own: str) -> Compute:
        parts = tuple(draft.of(r, own if r == rank else "slot", chunk) for r in owners)
        return Compute("reduce", rank, parts, (draft.own("slot", chunk),))

    def take(owner: int) -> list[Step]:
        taken = range(owner % each, draft.world_size, each)
        return [Copy(draft.of(owner, "slot", c), draft.own("output", c)) for c in taken]

    # Twins get no "ready": each rank signals "partial" to them before they read anything.
    first = tuple(peer for peer in draft.peers if peer not in twins)
    copies = (Copy(draft.own("input", chunk), draft.own("slot", chunk)) for chunk in sorted(first))
    draft.add(lane, *copies, *(draft.signal(peer, "ready") for peer in first))
    draft.add(lane, *(draft.wait(peer, "ready") for peer in first))
    draft.add(lane, *(sum_of(chunk, near, "input") for chunk in twins))
    draft.add(lane, *(draft.signal(peer, "partial") for peer in others))
    draft.add(lane, *(draft.wait(peer, "partial") for peer in others))
    draft.add(lane, sum_of(rank, twins, "slot"))
    draft.add(lane, *(draft.signal(peer, "reduced") for peer in others))
    for peer in others:
        # Awaits the peer's sum, and the end of its reads of that chunk here.
        draft.add(lane, draft.wait(peer, "reduced"))
        draft.add(lane, Copy(draft.of(peer, "slot", peer), draft.own("slot", peer)))
    draft.add(lane, *(draft.signal(peer, "relayed") for peer in on_socket), *take(rank))
    for peer in on_socket:
        draft.add(lane, draft.wait(peer, "relayed"), *take(peer))


def _direct(draft: Draft, options: Options, lane: str) -> None:
    for option in options & SOCKETS.keys():
        near = socket_of(draft.rank, draft.world_size, SOCKETS[option])
        if near is not None:
            _by_socket(draft, lane, near)
            return
    rank, in_place = draft.rank, "in_place" in options
    given, taken = ("symmetric", "symmetric") if in_place else ("input", "output")
    theirs = "symmetric" if in_place else "slot"
    ranks = range(draft.world_size)
    parts = tuple(draft.of(owner, given if owner == rank else theirs, rank) for owner in ranks)
    if not draft.peers:
        draft.add(lane, Compute("reduce", rank, parts, (draft.own(taken, rank),)))
        return
    slot = draft.own("slot", rank)
    # Publishes the chunks that peers reduce.
    draft.add(lane, *draft.publish(draft.own(given), draft.peers), *draft.waits("ready"))
    draft.add(lane, Compute("reduce", rank, parts, (slot,)))
    # Publishes the reduced chunk and says that chunk ``rank`` of the peers has been read.
    draft.add(lane, *draft.signals("reduced"))
    # In place, too: only this rank reads chunk ``rank`` of its tensor.
    draft.add(lane, Copy(slot, draft.own(taken, rank)))
    for peer in draft.peers:
        # Awaits the peer's reduced chunk, and the end of its reads of that chunk here.
        draft.add(lane, draft.wait(peer, "reduced"))
        draft.add(lane, Copy(draft.of(peer, "slot", peer), draft.own(taken, peer)))


TWO_SHOT_ALL_REDUCE, BACKGROUND_TWO_SHOT_ALL_REDUCE = exchange(
    "TWO_SHOT_ALL_REDUCE",
    _direct,
    (*subsets("in_place"), *map(frozenset, ((option,) for option in SOCKETS))),
)
