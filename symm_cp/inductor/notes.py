"""Notes a process under `symm-cp explain` in a file of its own: graphs, and more at its end."""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import inductor
from symm_cp.cuda import plans
from symm_cp.inductor import passes
from symm_cp.inductor.decisions import Decision, Report, graph_breaks


def write(folder: str, rank: int, **noted: Any) -> None:
    """Adds a note of this process."""
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": rank, **noted}) + "\n")


def described(decision: Decision, nbytes: int, ranks: int, calls: int = 1) -> dict[str, Any]:
    """Returns a decision as `symm-cp explain --json` writes it; `nbytes` are of the inputs."""
    known = {key: fact for key, fact in asdict(decision).items() if key != "collective"}
    return {**known, "name": decision.collective, "bytes": nbytes, "ranks": ranks, "calls": calls}


def write_at_exit(folder: str, rank: int) -> None:
    """Adds what is known when the process ends: graph breaks, and calls that Python makes."""
    rank = rank or int(os.environ.get("RANK", 0))  # there are no groups, but launchers set RANK
    if breaks := graph_breaks():
        write(folder, rank, breaks=breaks)
    if refusals := plans.refusals():
        write(folder, rank, in_python=refusals)


def begin(folder: str) -> None:
    """Notes the graphs of this process from now on; enables the passes if they are not."""
    rank = 0

    def note(before: passes.Before, report: Report, joint: bool) -> None:
        nonlocal rank
        if not report.decisions:
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        collectives = []
        for each in report.decisions:
            nbytes = sum(before.get(name, 0) for name in each.collective.split(", "))
            group = _resolve_process_group(each.group)  # type: ignore[arg-type]
            collectives.append(described(each, nbytes, group.size()))
        write(folder, rank, joint=joint, collectives=collectives)

    passes.listeners.append(note)
    atexit.register(lambda: write_at_exit(folder, rank))
    if not inductor.enabled():
        inductor.enable()
