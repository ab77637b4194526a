"""All-to-all: chunk d of every rank's ``"input"`` comes to rank d, as chunk r of its ``"output"``.

ALL_TO_ALL runs in the calling thread, BACKGROUND_ALL_TO_ALL in lane ``"copy"``, where the input is
left alone after the signals.

Direct only, in pieces. Source: torch's ``all_to_all_single``.
"""

from __future__ import annotations

from symm_cp.schedule.patterns.pattern import (
    Draft,
    Options,
    Pattern,
    loop_in_background,
    loop_in_caller,
)
from symm_cp.schedule.steps import Copy

# Rank 0 of 3, direct. While a rank copies its own chunk its peers may fall behind or run ahead.
#
#   compute  copy chunks>slot | signal 1, 2 | copy own | wait 1 | copy 1 | wait 2 | copy 2
#
# In the background:
#
#   copy  copy own | copy chunks>slot | signal 1, 2 | wait 1 | copy 1 | wait 2 | copy 2


def _direct(draft: Draft, options: Options, lane: str) -> None:
    rank = draft.rank
    own = Copy(draft.own("input", rank), draft.own("output", rank))
    given = [Copy(draft.own("input", peer), draft.own("slot", peer)) for peer in draft.peers]
    published = [*given, *draft.signals("ready")]
    draft.add(lane, *([own, *published] if lane == "copy" else [*published, own]))
    for peer in draft.peers:
        draft.add(lane, draft.wait(peer, "ready"))
        draft.add(lane, Copy(draft.of(peer, "slot", rank), draft.own("output", peer)))


ALL_TO_ALL = Pattern("ALL_TO_ALL", "sync", direct=loop_in_caller(_direct))
BACKGROUND_ALL_TO_ALL = Pattern(
    "BACKGROUND_ALL_TO_ALL", "async", direct=loop_in_background(_direct)
)
