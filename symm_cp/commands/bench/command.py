"""`symm-cp bench`: fused ops against unfused ones and against their limit."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from symm_cp.commands.bench import parsers, plots, shapes
from symm_cp.commands.bench.jobs import IN_PLACE, TORCH, Setting
from symm_cp.commands.harness import measure, report
from symm_cp.commands.harness.measure import COMMUNICATION, FUSED, LIMIT, UNFUSED, Case
from symm_cp.commands.harness.paired import unfused_over
from symm_cp.commands.harness.progress import Progress
from symm_cp.commands.harness.start import run_command
from symm_cp.parsing import DTYPES as DTYPE_NAMES
from symm_cp.parsing import STDOUT
from symm_cp.ranks import check_device, run_ranks
from symm_cp.schedule.trace import load_pyplot

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def rivals_wanted(against: str, device: str) -> dict[str, str]:
    """Returns the backends in `--against`, by the names of their variants."""
    return {unfused_over(name): name for name in _names(against) if name in _backends(device)}


def _backends(device: str) -> tuple[str, ...]:
    own = parsers.BACKENDS[device]
    return (own, "symm_cp") if device == "cpu" else (own,)


def variants_wanted(against: str, device: str) -> set[str]:
    """Returns the names of variants; raises `ValueError` for names that the device lacks."""
    names = set(_names(against))
    if unknown := names - set(parsers.AGAINST):
        raise ValueError(
            f"--against {', '.join(sorted(unknown))}: must be one or more of "
            f"{', '.join(parsers.AGAINST)}"
        )
    default, possible = parsers.BACKENDS[device], _backends(device)
    if wrong := names & {*parsers.BACKENDS.values(), "symm_cp"} - {*possible}:
        raise ValueError(
            f"--against {wrong.pop()}: --device {device} communicates by {' or '.join(possible)}"
        )
    if TORCH in names and device == "cpu":
        raise ValueError("--against torch: torch has no kernels for these ops on CPU")
    if {UNFUSED, default} <= names:
        raise ValueError(
            f"--against {UNFUSED},{default}: these are the same, as unfused ops run over {default} "
            f"unless backends are named; give one of them ({', '.join(possible)} may be combined)"
        )
    # Ratios are always to the limit.
    return names - {*possible} | {*rivals_wanted(against, device), LIMIT, FUSED, IN_PLACE}


def wanted(args: argparse.Namespace, ranks: int) -> Iterator[shapes.Wanted]:
    """Yields the jobs that a command line asks for."""
    kinds = shapes.KINDS if args.kind == "all" else (args.kind,)
    tokens = args.tokens or shapes.TOKENS[args.device]
    for kind in kinds:
        if kind == "train" and args.device != "cpu":
            if args.kind == "train":
                raise ValueError("train runs the demo's model, which requires --device cpu")
            continue
        chosen = args.shapes if args.kind != "all" else None
        yield from shapes.wanted(kind, chosen or shapes.DEFAULTS[kind], ranks, tokens)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for invalid arguments, before any rank starts."""
    variants_wanted(args.against, args.device)
    if unknown := set(_names(args.dtype)) - set(DTYPES):
        raise ValueError(
            f"--dtype {', '.join(sorted(unknown))}: must be one or more of {list(DTYPES)}"
        )
    if args.shapes and args.kind == "all":
        raise ValueError("--shapes needs a kind (matmul, attention, ...)")
    check_device(args.device)
    for ranks in args.ranks:
        list(wanted(args, ranks))
    if args.plot is not None:
        load_pyplot()


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp bench`; returns 0 if everything was measured."""
    return run_command(args, check, run_rank, _start)


def _start(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="symm-cp-") as folder:
            path = Path(folder, "rows.json")
            rank_arguments = [*args.arguments, "--ranks", str(ranks), "--rows", str(path)]
            code = run_ranks("bench", ranks, rank_arguments)
            if code != 0:
                return code
            rows += json.loads(path.read_text())
    if args.json is not None:
        command = ["symm-cp", *args.arguments]
        report.write_json(args.json, report.heading(command, args.device), rows)
    if args.csv is not None:
        report.write_csv(args.csv, rows)
    if args.plot is not None:
        for path in plots.draw(args.plot, rows):
            print(path, file=sys.stderr if args.json == STDOUT else sys.stdout)
    return 0


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the rows for the parent command."""
    ranks, rank = group.size(), group.rank()
    names = variants_wanted(args.against, args.device)
    if args.device == "cuda" and ranks > torch.cuda.device_count():
        names -= {UNFUSED, COMMUNICATION, unfused_over("nccl")}
        if rank == 0:
            print("nccl needs a GPU for each rank: skipping unfused variants", file=sys.stderr)
    rivals = _rivals(names, args, group)
    dtypes = _names(args.dtype)
    jobs = [(dtype, job) for dtype in dtypes for job in wanted(args, ranks)]
    progress = Progress(len(jobs)) if rank == 0 else None
    if rank == 0 and args.json != STDOUT:
        print(report.LEGEND)
    rows = []
    for dtype, job in jobs:
        torch.manual_seed(rank)
        case = job.make(Setting(group, DTYPES[dtype], args.device, rivals)).case
        row = _measured(case, names, group, args.seconds)
        del case
        gc.collect()
        notes = {"kind": job.kind, "size": job.size, "unit": job.unit, "ranks": ranks}
        rows.append({**row.as_dict(), **notes, "dtype": dtype})
        if progress is not None:
            progress.close()
            if args.json != STDOUT:
                print(report.line(row), flush=True)
            progress.advance(job.kind)
    if progress is not None:
        progress.close()
    if rank == 0 and args.rows is not None:
        args.rows.write_text(json.dumps(rows))
    return 0


def _rivals(
    names: set[str], args: argparse.Namespace, group: dist.ProcessGroup
) -> tuple[tuple[str, dist.ProcessGroup], ...]:
    """Returns the groups of unfused variants, in the order of `--against`. Collective."""
    chosen, own = rivals_wanted(args.against, args.device), parsers.BACKENDS[args.device]
    groups = {
        variant: group if backend == own else dist.new_group(backend=backend)
        for variant, backend in chosen.items()
        if variant in names
    }
    return tuple(({UNFUSED: group} | groups if UNFUSED in names else groups).items())


def _measured(case: Case, names: set[str], group: dist.ProcessGroup, seconds: float) -> measure.Row:
    case.variants = {name: run for name, run in case.variants.items() if name in names}
    return measure.measure(case, group, seconds)
