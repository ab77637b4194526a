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


def begin(folder: str) -> None:
    """Notes the graphs of this process from now on; enables the passes unless they are."""
    path = Path(folder) / f"{os.getpid()}.jsonl"

    rank = 0

    def write(**noted: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"rank": rank, **noted}) + "\n")

    def note(before: passes.Before, report: Report) -> None:
        nonlocal rank
        if report.decisions:
            rank = dist.get_rank() if dist.is_initialized() else 0
            write(collectives=[_described(each, before) for each in report.decisions])

    def note_breaks() -> None:  # the groups are gone by then, but launchers leave the rank
        nonlocal rank
        rank = rank or int(os.environ.get("RANK", 0))
        if breaks := graph_breaks():
            write(breaks=breaks)

    passes.listeners.append(note)
    atexit.register(note_breaks)
    if not inductor.enabled():
        inductor.enable()


def _described(decision: Decision, before: passes.Before) -> dict[str, Any]:
    nbytes, received, ranks = 0, 0.0, _resolve_process_group(decision.group).size()  # type: ignore[arg-type]
    for name in decision.collective.split(", "):
        op, own = before.get(name, ("", 0))
        kind = next((kind for kind in _RECEIVED if kind in op), None)
        nbytes += own
        received += _RECEIVED[kind](own, ranks) if kind else (ranks - 1) / ranks * own
    exposed = 0.0
    if not decision.fused_into:
        machine = _machine(ranks)
        exposed = (machine.transfer(received) + machine.signal_seconds) * 1e6
    return {
        **{k: v for k, v in asdict(decision).items() if k != "collective"},
        "name": decision.collective,
        "bytes": nbytes,
        "ranks": ranks,
        "exposed_us": round(exposed, 2),
    }


@cache
def _machine(ranks: int) -> Machine:
    text, _ = tuning.read_file(tuning.machine_path, ranks)
    return tuning.calibrated(text)
