"""`symm-cp bench`: fused ops against what they replace and against what limits them."""

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

from symm_cp import launch, native
from symm_cp.bench import measure, plots, report, shapes
from symm_cp.bench.jobs import IN_PLACE, TORCH, Job, Setting
from symm_cp.bench.measure import COMMUNICATION, FUSED, LIMIT, UNFUSED, Case
from symm_cp.demo.progress import Progress
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
    add("--ranks", type=launch.counts, default=[2], help="some (1,2,4) or doubling (1..16); (2)")
    add(
        "--shapes",
        help="models (llama3-8b, llama3-70b, qwen3-32b, spread over the ranks), ROWSxINNERxCOLUMNS "
        "for matmuls, TOKENSxHEADSxHEAD_DIM for attention, sizes (4KiB) for collectives; of a rank",
    )
    add("--tokens", type=launch.positive, help="of all ranks, for models (512; CUDA: 8192)")
    add("--dtype", default="float32", help=f"some of {', '.join(DTYPES)} (%(default)s)")
    add("--device", choices=sorted(_BACKENDS), default="cpu", help="(%(default)s)")
    add("--against", default="limit,unfused,communication", help=f"some of {', '.join(_AGAINST)}")
    add("--seconds", type=float, default=4.0, help="for each case, about (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--csv", type=Path, metavar="FILE", help="write a line for each variant there")
    add("--plot", type=Path, metavar="FOLDER", help="write plots (PNG) there; needs matplotlib")
    add("--rows", type=Path, help=argparse.SUPPRESS)
    launch.add_rendezvous(parser)


def variants_wanted(against: str, device: str) -> set[str]:
    """Returns the names of variants; raises `ValueError` for what is not there."""
    names = set(_names(against))
    if unknown := names - set(_AGAINST):
        raise ValueError(
            f"--against {', '.join(sorted(unknown))}: must be some of {', '.join(_AGAINST)}"
        )
    backend = _BACKENDS[device]
    if wrong := names & set(_BACKENDS.values()) - {backend}:
        raise ValueError(f"--against {wrong.pop()}: --device {device} communicates by {backend}")
    if TORCH in names and device == "cpu":
        raise ValueError("--against torch: torch has no kernels for these ops on CPU")
    if backend in names:
        names = names - {backend} | {UNFUSED}
    # Ratios are to the limit, whatever else is shown.
    return names | {LIMIT, FUSED, IN_PLACE}


def wanted(given: argparse.Namespace, ranks: int) -> Iterator[shapes.Wanted]:
    """Yields the jobs that a command line asks for."""
    kinds = shapes.KINDS if given.kind == "all" else (given.kind,)
    tokens = given.tokens or shapes.TOKENS[given.device]
    for kind in kinds:
        if kind == "train" and given.device != "cpu":
            if given.kind == "train":
                raise ValueError("train runs the demo's model, which is for --device cpu")
            continue
        chosen = given.shapes if given.kind != "all" else None
        yield from shapes.wanted(kind, chosen or shapes.DEFAULTS[kind], ranks, tokens)


def check(given: argparse.Namespace) -> None:
    """Raises `ValueError` for arguments that do not fit, before anything is started."""
    variants_wanted(given.against, given.device)
    if unknown := set(_names(given.dtype)) - set(DTYPES):
        raise ValueError(f"--dtype {', '.join(sorted(unknown))}: must be some of {list(DTYPES)}")
    if given.shapes and given.kind == "all":
        raise ValueError("--shapes needs a kind: they are shapes of matmul, attention, ...")
    launch.check_device(given.device)
    for ranks in given.ranks:
        list(wanted(given, ranks))
    if given.plot is not None:
        load_pyplot()


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp bench`; returns 0 when all was measured."""
    if launch.is_rank():
        launch.leave(launch.as_rank(lambda group: _rank(given, group), given.rendezvous))
    try:
        check(given)
        native.load()
    except (ValueError, RuntimeError) as error:
        print(f"symm-cp bench: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory(prefix="symm-cp-") as folder:
            path = Path(folder, "rows.json")
            own = [*given.arguments, "--ranks", str(ranks), "--rows", str(path)]
            code = launch.run_ranks("bench", ranks, own)
            if code != 0:
                return code
            rows += json.loads(path.read_text())
    if given.json is not None:
        command = ["symm-cp", *given.arguments]
        report.write_json(given.json, report.heading(command, given.device), rows)
    if given.csv is not None:
        report.write_csv(given.csv, rows)
    if given.plot is not None:
        for path in plots.draw(given.plot, rows):
            print(path)
    return 0


def _rank(given: argparse.Namespace, group: dist.ProcessGroup) -> int:
    ranks, rank = group.size(), group.rank()
    names = variants_wanted(given.against, given.device)
    if given.device == "cuda" and ranks > torch.cuda.device_count():
        names -= {UNFUSED, COMMUNICATION}
        if rank == 0:
            print("nccl needs a GPU for each rank: nothing unfused is measured", file=sys.stderr)
    dtypes = _names(given.dtype)
    todo = [(dtype, job) for dtype in dtypes for job in wanted(given, ranks)]
    progress = Progress(len(todo)) if rank == 0 else None
    rows = []
    for dtype, job in todo:
        torch.manual_seed(rank)
        made = job.make(Setting(group, DTYPES[dtype], given.device))
        case = made.case if isinstance(made, Job) else made
        row = _measured(case, names, group, given.seconds)
        del made, case
        gc.collect()
        notes = {"kind": job.kind, "size": job.size, "unit": job.unit, "ranks": ranks}
        rows.append({**row.as_dict(), **notes, "dtype": dtype})
        if progress is not None:
            progress.close()
            print(f"{report.line(row)}", flush=True)
            progress.advance(job.kind)
    if progress is not None:
        progress.close()
    if rank == 0 and given.rows is not None:
        given.rows.write_text(json.dumps(rows))
    return 0


def _measured(case: Case, names: set[str], group: dist.ProcessGroup, seconds: float) -> measure.Row:
    case.variants = {name: run for name, run in case.variants.items() if name in names}
    return measure.measure(case, group, seconds)
