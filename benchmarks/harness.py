"""One harness for all benchmarks: starts ranks, checks results first, times variants in turn.

A benchmark is a function `cases(group)` that yields `Case`s: named variants of one job, the first
of which is the limit (compute alone, or a memcpy of the bytes). All variants run in turn in each
repetition, so that drift of the machine's speed hits them alike; a repetition's time is that of the
slowest rank; reported are medians and the medians of the ratios to the limit within a repetition.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass
class Case:
    """Variants of one job by name, the limit first; `check` raises when one computes wrongly."""

    name: str
    variants: dict[str, Callable[[], object]]
    check: Callable[[], None] = lambda: None
    repetitions: int = 15
    inner: int = 1  # calls in one timing, for short ones
    barrier: Callable[[], None] | None = None
    # `predict` gives from the medians, in milliseconds, what the simulator says of `predicts`.
    # Called before and after a timing; with `host` only before, so that what is timed is how long
    # the host takes to hand the work out.
    predict: Callable[[dict[str, float]], float] | None = None
    predicts: str = ""
    synchronize: Callable[[], object] = lambda: None
    host: bool = False
    notes: dict[str, object] = field(default_factory=dict)


def _time(case: Case, run: Callable[[], object], barrier: Callable[[], None]) -> float:
    case.synchronize()
    barrier()
    start = time.perf_counter()
    for _ in range(case.inner):
        run()
    if not case.host:
        case.synchronize()
    return (time.perf_counter() - start) / case.inner


def _measure(case: Case, group: dist.ProcessGroup) -> dict[str, object]:
    case.check()
    barrier = case.barrier or (lambda: dist.barrier(group))
    names = list(case.variants)
    for name in names:  # warm up: workspaces, packed weights, page faults
        _time(case, case.variants[name], barrier)
    own = []
    for repetition in range(case.repetitions):
        # Another one goes first each time: what runs before leaves its data in the caches.
        first = repetition % len(names)
        order = [*names[first:], *names[:first]]
        taken = {name: _time(case, case.variants[name], barrier) for name in order}
        own.append([taken[name] for name in names])
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    limit = times[:, :1]
    medians = {n: statistics.median(times[:, i].tolist()) * 1e3 for i, n in enumerate(names)}
    notes = dict(case.notes)
    if case.predict is not None:
        predicted = case.predict(medians)
        notes |= {"predicted_ms": predicted, "error": predicted / medians[case.predicts] - 1}
    return {
        "case": case.name,
        **notes,
        "ms": medians,
        "ratio": {
            n: statistics.median((times / limit)[:, i].tolist()) for i, n in enumerate(names)
        },
    }


def _rank_main(cases: Callable[[dist.ProcessGroup], Iterable[Case]], backend: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['SYMM_CP_BENCH_STORE']}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    rows = []
    for case in cases(dist.group.WORLD):
        rows.append(_measure(case, dist.group.WORLD))
        if rank == 0:
            print(_line(rows[-1]), flush=True)
    if rank == 0:
        Path(os.environ["SYMM_CP_BENCH_OUT"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _line(row: dict[str, object]) -> str:
    ms, ratio = row["ms"], row["ratio"]
    assert isinstance(ms, dict) and isinstance(ratio, dict)
    cells = [f"{name} {_duration(ms[name])} ({ratio[name]:.3f})" for name in ms]
    predicted, error = row.get("predicted_ms"), row.get("error")
    if isinstance(predicted, float) and isinstance(error, float):
        cells.append(f"predicted {_duration(predicted)} ({error:+.1%})")
    return f"{row['case']:<44} " + "  ".join(cells)


def _duration(ms: float) -> str:
    return f"{ms * 1e3:.2f} us" if ms < 1 else f"{ms:.2f} ms"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


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
    machine: str | None = None,
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
        report = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": machine or f"{_processor()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "ranks": options.ranks,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
