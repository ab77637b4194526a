"""The command line of all benchmarks; `symm_cp/commands/harness` measures, as for `symm-cp bench`.

A benchmark is a function `cases(group)` that yields `Case`s: named variants of one job, the first
of which is the limit (compute alone, or a memcpy of the bytes):
symm_cp/commands/harness/measure.py.
"""

from __future__ import annotations

import argparse
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
from symm_cp.commands.harness import placement, report
from symm_cp.commands.harness.measure import Case
from symm_cp.commands.harness.start import measure_as_rank, measured_by_ranks
from symm_cp.ranks import add_rendezvous, exit_as_rank, is_rank, positive, run_program

__all__ = ["Case", "main"]

Cases = Callable[..., Iterable[Case]]


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
    parser.add_argument(
        "--tries",
        type=positive,
        default=4,
        help="runs, until two placements of ranks were seen (%(default)s)",
    )
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
    with_mpi = against and "mpi" in rivals.installed(args)
    rows: list[report.Written] = []
    for _ in range(args.tries if args.ranks > 1 else 1):
        code, measured = measured_by_ranks(
            lambda path: _start_ranks(args, [*sys.argv, "--rows", path], with_mpi=with_mpi)
        )
        if code:
            sys.exit(code)
        rows += measured
        if len(placement.placements(rows)) > 1:
            break
    print(placement.described(rows))
    if summary is not None:
        print(summary(rows))
    if args.json is not None:
        head = report.heading(["python", *sys.argv], device)
        report.write_json(args.json, {**head, "ranks": args.ranks}, rows)


def _as_rank(
    cases: Cases, group: dist.ProcessGroup, args: argparse.Namespace, against: bool
) -> int:
    connected = rivals.connect(args, group) if against else {}
    torch.set_num_threads(args.threads)
    found = cases(group, connected) if against else cases(group)
    measure_as_rank(found, group, args.seconds, args.rows, only=args.case)
    dist.barrier(group)
    for rival in connected.values():
        rival.close()
    return 0
