"""One harness for all benchmarks: starts ranks, and times cases as `symm-cp bench` does.

A benchmark is a function `cases(group)` that yields `Case`s: named variants of one job, the first
of which is the limit (compute alone, or a memcpy of the bytes):
symm_cp/commands/harness/measure.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import rivals
from symm_cp import native
from symm_cp.commands.harness import report
from symm_cp.commands.harness.measure import Case, measure
from symm_cp.ranks import add_rendezvous, exit_as_rank, is_rank, positive, run_program

__all__ = ["Case", "main"]

Cases = Callable[..., Iterable[Case]]


def _run_rank(cases: Iterable[Case], group: dist.ProcessGroup, args: argparse.Namespace) -> None:
    rows = []
    torch.set_num_threads(args.threads)
    for case in cases:
        if args.case not in case.name:
            continue
        row = measure(case, group, args.seconds)
        rows.append(row.as_dict())
        if group.rank() == 0:
            print(report.line(row), flush=True)
    if group.rank() == 0 and args.rows is not None:
        args.rows.write_text(json.dumps(rows))
    dist.barrier(group)


def _start_ranks(args: argparse.Namespace, arguments: list[str], *, with_mpi: bool) -> int:
    if not with_mpi:
        return run_program(sys.argv[0], args.ranks, arguments)
    launcher, environment = rivals.mpi_launch(args, args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, sys.executable, *arguments, "--rendezvous", folder]
        return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def main(
    cases: Cases,
    description: str,
    *,
    backend: str | None = None,
    device: str = "cpu",
    against: bool = False,
    summary: Callable[[list[report.Written]], str] | None = None,
) -> None:
    """Runs a benchmark as a command: `--ranks N`, `--json FILE`.

    With `against` there is `--against`, and `cases` takes the rivals by name after the group.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of a process (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for a case (%(default)s)")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the date here")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    if against:
        rivals.add_arguments(parser)
    add_rendezvous(parser)
    args = parser.parse_args()
    if args.rendezvous is not None:
        rivals.take_rank_from_mpi()
    if is_rank():
        exit_as_rank(lambda group: _as_rank(cases, group, args, against), args.rendezvous, backend)
    native.load()  # built once, before the ranks start
    if against:
        rivals.say_what_is_missing(args)
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder, "rows.json")
        arguments = [*sys.argv, "--rows", str(rows_file)]
        with_mpi = against and "mpi" in rivals.installed(args)
        if code := _start_ranks(args, arguments, with_mpi=with_mpi):
            sys.exit(code)
        rows = json.loads(rows_file.read_text())
    if summary is not None:
        print(summary(rows))
    if args.json is not None:
        head = report.heading(["python", *sys.argv], device)
        report.write_json(args.json, {**head, "ranks": args.ranks}, rows)


def _as_rank(
    cases: Cases, group: dist.ProcessGroup, args: argparse.Namespace, against: bool
) -> int:
    connected = rivals.connect(args, group) if against else {}
    _run_rank(cases(group, connected) if against else cases(group), group, args)
    for rival in connected.values():
        rival.close()
    return 0
