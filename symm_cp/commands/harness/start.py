"""Runs a command that measures on several ranks."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from symm_cp import native
from symm_cp.commands.harness import report
from symm_cp.commands.harness.measure import Case, measure
from symm_cp.ranks import exit_as_rank, is_rank, run_ranks


def run_command(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], object],
    run_rank: Callable[[argparse.Namespace, dist.ProcessGroup], int],
    start: Callable[[argparse.Namespace], int] | None = None,
) -> int:
    """Runs `run_rank` on all ranks, starting them unless this process is one; returns an exit code.

    Before the ranks start, `check` raises `ValueError`, `RuntimeError` or `OSError` for invalid
    arguments, and the native part is built. `start` replaces the default of starting ranks once.
    """
    if is_rank():
        exit_as_rank(lambda group: run_rank(args, group), args.rendezvous)
    try:
        check(args)
        native.load()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"symm-cp {args.command}: {error}", file=sys.stderr)
        return 2
    return start(args) if start else run_ranks(args.command, args.ranks, args.arguments)


def measured_by_ranks(start: Callable[[str], int]) -> tuple[int, list[dict[str, Any]]]:
    """Returns the exit code of `start`, and the rows that rank 0 has written to the path it got."""
    with tempfile.TemporaryDirectory(prefix="symm-cp-") as folder:
        path = Path(folder, "rows.json")
        code = start(str(path))
        return code, json.loads(path.read_text()) if code == 0 else []


def measure_as_rank(
    cases: Iterable[Case],
    group: dist.ProcessGroup,
    seconds: float,
    rows_file: Path | None,
    *,
    only: str = "",
    quiet: bool = False,
) -> None:
    """Measures the cases with `only` in their name; rank 0 prints each row, and writes all."""
    rows = []
    for case in cases:
        if only in case.name:
            row = measure(case, group, seconds)
            rows.append(row.as_dict())
            if group.rank() == 0 and not quiet:
                print(report.line(row), flush=True)
        del case  # before the next one is made
        gc.collect()
    if group.rank() == 0 and rows_file is not None:
        rows_file.write_text(json.dumps(rows))
