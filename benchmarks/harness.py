"""One harness for all benchmarks: starts ranks, and times cases as `symm-cp bench` does.

A benchmark is a function `cases(group)` that yields `Case`s: named variants of one job, the first
of which is the limit (compute alone, or a memcpy of the bytes); see `symm_cp.bench.measure`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp import native
from symm_cp.bench import report
from symm_cp.bench.measure import Case, measure
from symm_cp.ranks import add_rendezvous, exit_as_rank, is_rank, positive, run_program

__all__ = ["Case", "main"]

Cases = Callable[[dist.ProcessGroup], Iterable[Case]]


def _run_rank(cases: Cases, group: dist.ProcessGroup, rows_file: Path | None) -> int:
    rows = []
    for case in cases(group):
        row = measure(case, group)
        rows.append(row.as_dict())
        if group.rank() == 0:
            print(report.line(row), flush=True)
    if group.rank() == 0 and rows_file is not None:
        rows_file.write_text(json.dumps(rows))
    dist.barrier(group)
    return 0


def main(
    cases: Cases, description: str, *, backend: str | None = None, device: str = "cpu"
) -> None:
    """Runs a benchmark as a command: `--ranks N`, `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=positive, default=2, help="processes, one thread each")
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the date here")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    add_rendezvous(parser)
    args = parser.parse_args()
    if is_rank():
        exit_as_rank(lambda group: _run_rank(cases, group, args.rows), args.rendezvous, backend)
    native.load()  # built once, before the ranks start
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder, "rows.json")
        arguments = [*sys.argv, "--rows", str(rows_file)]
        if code := run_program(sys.argv[0], args.ranks, arguments):
            sys.exit(code)
        rows = json.loads(rows_file.read_text())
    if args.json is not None:
        head = report.heading(["python", *sys.argv], device)
        report.write_json(args.json, {**head, "ranks": args.ranks}, rows)
