"""`symm-cp bench`: fused ops against unfused ones and against their limit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from symm_cp.commands.bench import DEFAULTS, plots, shapes
from symm_cp.commands.bench.jobs import Setting, unfused_groups
from symm_cp.commands.harness import report
from symm_cp.commands.harness.measure import Case
from symm_cp.commands.harness.start import measure_as_rank, measured_by_ranks, run_command
from symm_cp.parsing import STDOUT
from symm_cp.ranks import run_ranks
from symm_cp.schedule.trace import load_pyplot

_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float32", "float64")}


def _wanted(args: argparse.Namespace, ranks: int) -> Iterator[shapes.Job]:
    """Yields the jobs that a command line asks for."""
    for kind in DEFAULTS if args.kind == "all" else (args.kind,):
        yield from shapes.wanted(kind, args.shapes or DEFAULTS[kind], ranks, args.tokens)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for invalid arguments, before any rank starts."""
    if unknown := set(args.dtype.split(",")) - set(_DTYPES):
        raise ValueError(
            f"--dtype {', '.join(sorted(unknown))}: must be one or more of {list(_DTYPES)}"
        )
    if args.shapes and args.kind == "all":
        raise ValueError("--shapes needs a kind (matmul, attention, ...)")
    for ranks in args.ranks:
        list(_wanted(args, ranks))
    if args.plot is not None:
        load_pyplot()


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp bench`; returns 0 if everything was measured."""
    return run_command(args, check, run_rank, _start)


def _start(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        arguments = [*args.arguments, "--ranks", str(ranks)]
        code, measured = measured_by_ranks(
            lambda path, ranks=ranks, arguments=arguments: run_ranks(  # type: ignore[misc]
                "bench", ranks, [*arguments, "--rows", path]
            )
        )
        if code != 0:
            return code
        rows += measured
    head = report.heading(["symm-cp", *args.arguments])
    if args.json is not None:
        report.write_json(args.json, head, rows)
    if args.plot is not None:
        for path in plots.draw(args.plot, rows, head):
            print(path, file=sys.stderr if args.json == STDOUT else sys.stdout)
    return 0


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the rows for the parent command."""
    unfused = unfused_groups(group)

    def cases() -> Iterator[Case]:
        for dtype in args.dtype.split(","):
            for make in _wanted(args, group.size()):
                torch.manual_seed(group.rank())
                yield make(Setting(group, unfused, _DTYPES[dtype]))

    if group.rank() == 0 and args.json != STDOUT:
        print(report.LEGEND)
    measure_as_rank(cases(), group, args.seconds, args.rows, quiet=args.json == STDOUT)
    return 0
