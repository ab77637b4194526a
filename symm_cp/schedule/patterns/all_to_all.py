"""All-to-all: chunk d of every rank's ``"input"`` comes to rank d, as chunk r of its ``"output"``.

ALL_TO_ALL and JOINING_ALL_TO_ALL run in the calling thread, BACKGROUND_ALL_TO_ALL in lane
``"copy"``, which does not read the input after the signals.

Direct only, in pieces. Source: torch's ``all_to_all_single``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import Draft, Options, Pattern, exchange, loop
from symm_cp.schedule.steps import Copy

# Rank 0 of 3, direct. Copies that follow each other may be one pass over memory in which the chunks
# lie side by side: the input here,
#
#   compute  copy own, chunks>slot | signal 1, 2 | wait 1 | copy 1 | wait 2 | copy 2
#
# and the output where the chunks join:
#
#   compute  copy chunks>slot | signal 1, 2 | wait 1 | wait 2 | copy own, 1, 2


def _own(draft: Draft) -> Copy:
    return Copy(draft.own("input", draft.rank), draft.own("output", draft.rank))


def _given(draft: Draft) -> list[Copy]:
    return [Copy(draft.own("input", peer), draft.own("slot", peer)) for peer in draft.peers]


def _taken(draft: Draft, peer: int) -> Copy:
    return Copy(draft.of(peer, "slot", draft.rank), draft.own("output", peer))


def _direct(draft: Draft, options: Options, lane: str) -> None:
    draft.add(lane, _own(draft), *_given(draft), *draft.signals("ready"))
    for peer in draft.peers:
        draft.add(lane, draft.wait(peer, "ready"), _taken(draft, peer))


def _joining(draft: Draft, options: Options, lane: str) -> None:
    draft.add(lane, *_given(draft), *draft.signals("ready"))
    draft.add(lane, *(draft.wait(peer, "ready") for peer in draft.peers))
    draft.add(lane, _own(draft), *(_taken(draft, peer) for peer in draft.peers))


ALL_TO_ALL, BACKGROUND_ALL_TO_ALL = exchange("ALL_TO_ALL", _direct)
JOINING_ALL_TO_ALL = Pattern(
    "JOINING_ALL_TO_ALL", "sync", direct=loop(_joining, "compute", (frozenset(),))
)
