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

from symm_cp import native
from symm_cp.bench import measure, plots, report, shapes
from symm_cp.bench.jobs import IN_PLACE, TORCH, Setting
from symm_cp.bench.measure import COMMUNICATION, FUSED, LIMIT, UNFUSED, Case
from symm_cp.demo.progress import Progress
from symm_cp.ranks import (
    add_rendezvous,
    check_device,
    counts,
    exit_as_rank,
    is_rank,
    positive,
    run_ranks,
)
from symm_cp.schedule.trace import load_pyplot

HELP = "time fused ops against unfused ones and against their limit"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_AGAINST = (LIMIT, UNFUSED, COMMUNICATION, TORCH, "gloo", "nccl")


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp bench`."""
    add = parser.add_argument
    add("kind", nargs="?", choices=(*shapes.KINDS, "all"), default="all", help="(%(default)s)")
    add("--ranks", type=counts, default=[2], help="a list (1,2,4) or doubling numbers (1..16); (2)")
    add(
        "--shapes",
        help="models (llama3-8b, llama3-70b, qwen3-32b) or, for each rank, ROWSxINNERxCOLUMNS of "
        "matmuls, TOKENSxHEADSxHEAD_DIM of attention, bytes (4KiB) of collectives",
    )
    add("--tokens", type=positive, help="tokens of all ranks, for models (512; CUDA: 8192)")
    add("--dtype", default="float32", help=f"one or more of {', '.join(DTYPES)} (%(default)s)")
    add("--device", choices=sorted(_BACKENDS), default="cpu", help="(%(default)s)")
    add(
        "--against",
        default="limit,unfused,communication",
        help=f"one or more of {', '.join(_AGAINST)}",
    )
    add("--seconds", type=float, default=4.0, help="approximate time for each case (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all results to this file")
    add("--csv", type=Path, metavar="FILE", help="write a line for each variant to this file")
    add(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="write plots (PNG) to this folder; needs matplotlib",
    )
    add("--rows", type=Path, help=argparse.SUPPRESS)
    add_rendezvous(parser)


def variants_wanted(against: str, device: str) -> set[str]:
    """Returns the names of variants; raises `ValueError` for one that does not exist there."""
    names = set(_names(against))
    if unknown := names - set(_AGAINST):
        raise ValueError(
            f"--against {', '.join(sorted(unknown))}: must be one or more of {', '.join(_AGAINST)}"
        )
    backend = _BACKENDS[device]
    if wrong := names & set(_BACKENDS.values()) - {backend}:
        raise ValueError(f"--against {wrong.pop()}: --device {device} communicates by {backend}")
    if TORCH in names and device == "cpu":
        raise ValueError("--against torch: torch has no kernels for these ops on CPU")
    if backend in names:
        names = names - {backend} | {UNFUSED}
    # Ratios are always to the limit.
    return names | {LIMIT, FUSED, IN_PLACE}


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
    """Raises `ValueError` for wrong arguments, before any rank is started."""
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
    if is_rank():
        exit_as_rank(lambda group: run_rank(args, group), args.rendezvous)
    try:
        check(args)
        native.load()
    except (ValueError, RuntimeError) as error:
        print(f"symm-cp bench: {error}", file=sys.stderr)
        return 2
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
            print(path)
    return 0


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the rows for the command that started it."""
    ranks, rank = group.size(), group.rank()
    names = variants_wanted(args.against, args.device)
    if args.device == "cuda" and ranks > torch.cuda.device_count():
        names -= {UNFUSED, COMMUNICATION}
        if rank == 0:
            print("nccl needs a GPU for each rank: skipping unfused variants", file=sys.stderr)
    dtypes = _names(args.dtype)
    jobs = [(dtype, job) for dtype in dtypes for job in wanted(args, ranks)]
    progress = Progress(len(jobs)) if rank == 0 else None
    rows = []
    for dtype, job in jobs:
        torch.manual_seed(rank)
        case = job.make(Setting(group, DTYPES[dtype], args.device)).case
        row = _measured(case, names, group, args.seconds)
        del case
        gc.collect()
        notes = {"kind": job.kind, "size": job.size, "unit": job.unit, "ranks": ranks}
        rows.append({**row.as_dict(), **notes, "dtype": dtype})
        if progress is not None:
            progress.close()
            print(f"{report.line(row)}", flush=True)
            progress.advance(job.kind)
    if progress is not None:
        progress.close()
    if rank == 0 and args.rows is not None:
        args.rows.write_text(json.dumps(rows))
    return 0


def _measured(case: Case, names: set[str], group: dist.ProcessGroup, seconds: float) -> measure.Row:
    case.variants = {name: run for name, run in case.variants.items() if name in names}
    return measure.measure(case, group, seconds)
