"""Graphs as `symm-cp explain --json` writes them: collectives with their costs, and a timeline."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph

from symm_cp.inductor import costs
from symm_cp.inductor.decisions import Decision, Report
from symm_cp.inductor.passes import Before
from symm_cp.inductor.timeline import GraphTimeline, timeline_of


def described(
    before: Before, report: Report, graph: Graph, *, joint: bool
) -> dict[str, Any] | None:
    """Returns the description of a graph; None if nothing communicates in it.

    The `joint` graph of forward and backward has no timeline: the two run apart.
    """
    timeline = GraphTimeline("") if joint else timeline_of(graph)
    if not report.decisions and not timeline.communicates:
        return None
    collectives = [_with_costs(each, before, timeline) for each in report.decisions]
    shown = timeline.described() if timeline.communicates else None
    return {"joint": joint, "collectives": collectives, "timeline": shown}


def decision(
    decided: Decision, nbytes: int, ranks: int, exposed_us: float, calls: int = 1
) -> dict[str, Any]:
    """Returns a decision with the predicted time that a rank waits for it in all calls."""
    return {
        **{k: v for k, v in asdict(decided).items() if k != "collective"},
        "name": decided.collective,
        "bytes": nbytes,
        "ranks": ranks,
        "calls": calls,
        "exposed_us": round(0.0 if decided.fused_into else exposed_us * calls, 2),
    }


def _with_costs(decided: Decision, before: Before, timeline: GraphTimeline) -> dict[str, Any]:
    ranks = _resolve_process_group(decided.group).size()  # type: ignore[arg-type]
    names = decided.collective.split(", ")
    given = [before.get(name, ("", 0)) for name in names]
    total = sum(costs.received(op, nbytes, ranks) for op, nbytes in given)
    # A collective that another op replaces, or that only the caller waits for, counts in full.
    exposed = costs.transfer_us(total, ranks)
    if all(name in timeline.hidden_us for name in names):
        exposed -= sum(timeline.hidden_us[name] for name in names)
    return decision(decided, sum(nbytes for _, nbytes in given), ranks, exposed)
