"""One harness for all benchmarks: starts ranks, and times cases as `symm-cp bench` does.

A benchmark is a function `cases(group)` that yields `Case`s: named variants of one job, the first
of which is the limit (compute alone, or a memcpy of the bytes); see `symm_cp.bench.measure`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.bench import report
from symm_cp.bench.measure import Case, measure

__all__ = ["Case", "main"]


def _rank_main(cases: Callable[[dist.ProcessGroup], Iterable[Case]], backend: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['SYMM_CP_BENCH_STORE']}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    rows = []
    for case in cases(dist.group.WORLD):
        row = measure(case, dist.group.WORLD)
        rows.append(row.as_dict())
        if rank == 0:
            print(report.line(row), flush=True)
    if rank == 0:
        Path(os.environ["SYMM_CP_BENCH_OUT"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _children(
    world_size: int, folder: str, arguments: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    for rank in range(world_size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "SYMM_CP_BENCH_STORE": f"{folder}/store",
            "SYMM_CP_BENCH_OUT": f"{folder}/rows.json",
            "OMP_NUM_THREADS": "1",
        }
        yield subprocess.Popen([sys.executable, *arguments], env=env)


def main(
    cases: Callable[[dist.ProcessGroup], Iterable[Case]],
    description: str,
    *,
    backend: str = "gloo",
    device: str = "cpu",
) -> None:
    """Runs a benchmark as a command: `--ranks N`, `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the date here")
    options = parser.parse_args()
    if "SYMM_CP_BENCH_STORE" in os.environ:
        _rank_main(cases, backend)
        return
    import symm_cp  # noqa: F401 - builds the native part once, before the ranks start

    with tempfile.TemporaryDirectory() as folder:
        ranks = list(_children(options.ranks, folder, sys.argv))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(f"a rank failed: exit codes {codes}")
        rows = json.loads(Path(folder, "rows.json").read_text())
    if options.json is not None:
        head = report.heading(["python", *sys.argv], device)
        report.write_json(options.json, {**head, "ranks": options.ranks}, rows)
