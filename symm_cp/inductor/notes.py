"""In the processes of `symm-cp explain`: notes graphs, and breaks, in a file of the process."""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import inductor, tuning
from symm_cp.inductor import passes
from symm_cp.inductor.decisions import Decision, Report, graph_breaks
from symm_cp.schedule.machine import Machine

#: Bytes that a rank receives, by kind of collective: of its own input, on so many ranks.
_RECEIVED = {
    "all_gather": lambda nbytes, ranks: (ranks - 1) * nbytes,
    "all_reduce": lambda nbytes, ranks: 2 * (ranks - 1) / ranks * nbytes,
}


def write(folder: str, rank: int, **noted: Any) -> None:
    """Adds a note of this process."""
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": rank, **noted}) + "\n")


def begin(folder: str) -> None:
    """Notes the graphs of this process from now on; enables the passes unless they are."""
    rank = 0

    def note(before: passes.Before, report: Report) -> None:
        nonlocal rank
        if report.decisions:
            rank = dist.get_rank() if dist.is_initialized() else 0
            noted = [_described(each, before) for each in report.decisions]
            write(folder, rank, collectives=noted)

    def note_breaks() -> None:  # the groups are gone by then, but launchers leave the rank
        nonlocal rank
        rank = rank or int(os.environ.get("RANK", 0))
        if breaks := graph_breaks():
            write(folder, rank, breaks=breaks)

    passes.listeners.append(note)
    atexit.register(note_breaks)
    if not inductor.enabled():
        inductor.enable()


def received(collective: str, nbytes: int, ranks: int) -> float:
    """Returns the bytes that a rank receives in a collective, where its input has `nbytes`."""
    kind = next((kind for kind in _RECEIVED if kind in collective), None)
    return _RECEIVED[kind](nbytes, ranks) if kind else (ranks - 1) / ranks * nbytes


def described(
    decision: Decision, nbytes: int, ranks: int, received: float, calls: int = 1
) -> dict[str, Any]:
    """Returns a decision with its cost: the predicted time of what is not fused, in all calls."""
    exposed = 0.0
    if not decision.fused_into:
        machine = _machine(ranks)
        exposed = (machine.transfer(received) + machine.signal_seconds) * 1e6 * calls
    return {
        **{k: v for k, v in asdict(decision).items() if k != "collective"},
        "name": decision.collective,
        "bytes": nbytes,
        "ranks": ranks,
        "calls": calls,
        "exposed_us": round(exposed, 2),
    }


def _described(decision: Decision, before: passes.Before) -> dict[str, Any]:
    ranks = _resolve_process_group(decision.group).size()  # type: ignore[arg-type]
    given = [before.get(name, ("", 0)) for name in decision.collective.split(", ")]
    total = sum(received(op, nbytes, ranks) for op, nbytes in given)
    return described(decision, sum(nbytes for _, nbytes in given), ranks, total)


@cache
def _machine(ranks: int) -> Machine:
    text, _ = tuning.read_file(tuning.machine_path, ranks)
    return tuning.calibrated(text)
