"""Notes graphs and graph breaks of a process under `symm-cp explain`, in a file of its own."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.fx import Graph

from symm_cp import inductor
from symm_cp.inductor import graphs, passes
from symm_cp.inductor.decisions import Report, graph_breaks


def write(folder: str, rank: int, **noted: Any) -> None:
    """Adds a note of this process."""
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": rank, **noted}) + "\n")


def begin(folder: str) -> None:
    """Notes the graphs of this process from now on; enables the passes if they are not."""
    rank = 0

    def note(before: passes.Before, report: Report, graph: Graph, joint: bool) -> None:
        nonlocal rank
        described = graphs.described(before, report, graph, joint=joint)
        if described is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            write(folder, rank, **described)

    def note_breaks() -> None:  # at exit there are no groups, but launchers set RANK
        nonlocal rank
        rank = rank or int(os.environ.get("RANK", 0))
        if breaks := graph_breaks():
            write(folder, rank, breaks=breaks)

    passes.listeners.append(note)
    atexit.register(note_breaks)
    if not inductor.enabled():
        inductor.enable()
