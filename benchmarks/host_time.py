"""The host's time to issue an op on GPUs, measured without a GPU; idle.py lists what is stubbed.

    python benchmarks/host_time.py --json benchmarks/results/host_time.json

One process is a rank of a group whose other ranks do not exist. Each op, and torch's own Python
pipeline where it has one, is called over a driver and kernels that do nothing, in turn with a
`torch.mm` of tiny matrices. Times are CPU time of the calling thread; of many blocks of
calls the tenth percentile is taken, since other processes on the machine only make them longer.
Issued kernels, driver calls and torch's barriers are counted; they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts kernels, is talkative

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

import symm_cp
from benchmarks.idle import IdleDevice, IdleSymmetricMemory, idle, torchs_workspace
from benchmarks.one_rank import Call, gradient, group_of
from symm_cp import native, tuning
from symm_cp.commands.harness import report
from symm_cp.ranks import positive

ROWS, INNER, COLUMNS = 16, 16, 16  # of a rank; rows begin at multiples of 64 bytes
HEADS, KEYS, FEATURES = 2, 16, 16  # of a rank
CALLS = 4  # in a block: the clock costs nothing, and other programs seldom interrupt one

# Operators of torch that launch a kernel on a GPU; the others that ops here use make views.
_KERNELS = """
    mm addmm_ _scaled_mm copy_ fill_ zero_ add add_ mul mul_ div div_ sum mean cat eq masked_fill_
"""
KERNELS = frozenset(f"aten::{name}" for name in _KERNELS.split())


@dataclass(frozen=True)
class Case:
    """An op; torch's pipeline for it, if any; and the microseconds that it may take.

    `complete` is called with each result, and not timed.
    """

    name: str
    run: Call
    torchs: Call | None = None
    target: float | None = None
    complete: Callable[[Any], object] | None = None


@dataclass
class Row:
    """Costs of a case: microseconds, multiples of a `torch.mm`, and issued kernels and calls."""

    case: str
    ranks: int
    us: float
    mms: float
    kernels: int
    driver_calls: int
    target_us: float | None
    #: The time if Python makes the call, as for the first calls of a kind.
    python_us: float | None = None
    torch_us: float | None = None
    torch_kernels: int | None = None
    torch_barriers: int | None = None

    def line(self) -> str:
        """Returns the row as text."""
        cells = [
            f"{self.case:32} {self.ranks:2} ranks {self.us:7.1f} us {self.mms:5.0f} mm",
            f"{self.kernels:3} kernels {self.driver_calls:3} driver calls",
            f"by Python {self.python_us:7.1f} us",
        ]
        if self.torch_us is not None:
            issued = f"{self.torch_kernels} kernels, {self.torch_barriers} barriers"
            cells.append(f"torch {self.torch_us:7.1f} us ({issued})")
        if self.target_us is not None:
            verdict = "met" if self.us <= self.target_us else "MISSED"
            cells.append(f"target {self.target_us:.0f} us {verdict}")
        return "  ".join(cells)


def matmul_cases(group: dist.ProcessGroup) -> Iterator[Case]:
    ranks, name = group.size(), group.group_name
    x, weight = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    whole = torch.randn(ranks * ROWS, INNER)
    yield Case(
        "all-gather-matmul",
        lambda: symm_cp.all_gather_matmul(x, weight, group=group),
        lambda: torch_symm_mem._fused_all_gather_matmul(x, [weight], 0, name, return_A=False),
        60,
    )
    yield Case(
        "the same, with the gathered",
        lambda: symm_cp.all_gather_matmul(x, weight, group=group, return_gathered=True),
        lambda: torch_symm_mem._fused_all_gather_matmul(x, [weight], 0, name, return_A=True),
    )
    columns = torch.randn(ranks * INNER, COLUMNS)
    yield Case(
        "the same, of columns",
        lambda: symm_cp.all_gather_matmul(x, columns, gather_dim=1, group=group),
        lambda: torch_symm_mem._fused_all_gather_matmul(x, [columns], 1, name, return_A=False),
    )
    yield Case(
        "matmul-reduce-scatter",
        lambda: symm_cp.matmul_reduce_scatter(whole, weight, group=group),
        lambda: torch_symm_mem._fused_matmul_reduce_scatter(whole, weight, "sum", 0, name),
        60,
    )
    trained = [t.clone().requires_grad_() for t in (x, weight)]
    yield backward("all-gather-matmul, backward", symm_cp.all_gather_matmul, trained, group)
    trained = [t.clone().requires_grad_() for t in (whole, weight)]
    yield backward("matmul-reduce-scatter, backward", symm_cp.matmul_reduce_scatter, trained, group)


def scaled_cases(group: dist.ProcessGroup) -> Iterator[Case]:
    ranks, name = group.size(), group.group_name
    one, types = torch.ones(()), torch.float8_e4m3fn
    x, whole = (torch.randn(rows, INNER).to(types) for rows in (ROWS, ranks * ROWS))
    weight = torch.randn(COLUMNS, INNER).to(types).t()
    gather = torch_symm_mem._fused_all_gather_scaled_matmul
    scatter = torch_symm_mem._fused_scaled_matmul_reduce_scatter
    to = torch.bfloat16
    yield Case(
        "scaled all-gather-matmul",
        lambda: symm_cp.scaled_all_gather_matmul(x, weight, one, one, group=group, out_dtype=to),
        lambda: gather(x, [weight], one, [one], 0, name, [None], [None], [to], [False]),
    )
    yield Case(
        "scaled matmul-reduce-scatter",
        lambda: symm_cp.scaled_matmul_reduce_scatter(
            whole, weight, one, one, group=group, out_dtype=to
        ),
        lambda: scatter(
            whole, weight, one, one, "sum", 0, 0, name, [len(whole), COLUMNS], None, None, to
        ),
    )


def attention_cases(group: dist.ProcessGroup) -> Iterator[Case]:
    ranks, name, ops = group.size(), group.group_name, torch.ops.symm_mem
    # Laid out as in models: positions before heads.
    q, k, v = (torch.randn(1, KEYS, HEADS, FEATURES).transpose(1, 2) for _ in range(3))
    attend = ops.fused_all_gather_attention
    yield Case("attention", lambda: attend(q, k, v, name), target=90)
    order = [rank for i in range(ranks) for rank in (i, 2 * ranks - 1 - i)]
    yield Case(
        "attention, causal head-tail",
        lambda: attend(q, k, v, name, is_causal=True, chunk_order=order),
    )
    trained = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*trained, name)[0]
    yield Case("attention, backward", gradient(out, trained), target=200)
    yield Case("all-gather of keys and values", lambda: ops.all_gather_kv(k, v, 2, name))


def collective_cases(group: dist.ProcessGroup) -> Iterator[Case]:
    name, ops = group.group_name, torch.ops.symm_mem
    wait = torch.ops._c10d_functional.wait_tensor
    x, whole = (torch.randn(rows, INNER) for rows in (ROWS, group.size() * ROWS))
    yield Case(
        "low-contention all-gather",
        lambda: ops._low_contention_all_gather(x, name),
        lambda: torch_symm_mem._low_contention_all_gather(x, name),
        15,
        wait,
    )
    yield Case(
        "low-contention reduce-scatter",
        lambda: ops._low_contention_reduce_scatter(whole, "sum", name),
        lambda: torch_symm_mem._low_contention_reduce_scatter(whole, "sum", name),
        15,
        wait,
    )


def backward(
    name: str, op: Callable[..., Any], inputs: list[torch.Tensor], group: dist.ProcessGroup
) -> Case:
    return Case(name, gradient(op(*inputs, group=group), inputs))


def measured(
    calls: dict[str, Call], complete: Callable[[Any], object], seconds: float
) -> dict[str, float]:
    """Microseconds of each call: the tenth percentile over blocks, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):  # the second call of a kind is recorded
            complete(call())
    gc.collect()
    gc.disable()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end or len(times["run"]) < 5:
            for name, call in calls.items():
                begin = time.thread_time_ns()
                results = [call() for _ in range(CALLS)]
                times[name].append((time.thread_time_ns() - begin) / CALLS / 1e3)
                for result in results:
                    complete(result)
    finally:
        gc.enable()
    return {name: sorted(found)[len(found) // 10] for name, found in times.items()}


def kernels_of(call: Call, complete: Callable[[Any], object]) -> int:
    """How many of torch's operators that launch kernels a call uses."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        result = call()
    complete(result)
    return sum(event.name in KERNELS for event in profile.function_events or ())


def row_of(
    case: Case, ranks: int, device: IdleDevice, torchs: IdleSymmetricMemory, seconds: float
) -> Row:
    """Measures a case, and counts what it issues."""
    matrix = torch.randn(ROWS, INNER)
    out = torch.empty_like(matrix[:, :ROWS])
    calls: dict[str, Call] = {"run": case.run, "mm": lambda: torch.mm(matrix, matrix, out=out)}
    if case.torchs is not None:
        calls["torch"] = case.torchs
    complete = case.complete or (lambda _: None)
    native.load().symm_cp_plans_record_at(-1)
    by_python = measured({"run": case.run}, complete, seconds / 4)["run"]
    native.load().symm_cp_plans_record_at(1)
    us = measured(calls, complete, seconds)
    device.kernels.count = 0
    device.driver_calls()
    kernels = kernels_of(case.run, complete)
    issued = kernels + device.kernels.count, device.driver_calls()
    row = Row(case.name, ranks, us["run"], us["run"] / us["mm"], *issued, case.target)
    row.python_us = by_python
    if case.torchs is not None:
        torchs.barriers = 0
        row.torch_us, row.torch_kernels = us["torch"], kernels_of(case.torchs, complete)
        row.torch_barriers = torchs.barriers
    return row


def rows(ranks: int, device: IdleDevice, seconds: float) -> Iterator[Row]:
    """Measures all cases for a number of ranks."""
    group = group_of(ranks)
    with torchs_workspace(ranks) as torchs:
        for cases in (matmul_cases, scaled_cases, attention_cases, collective_cases):
            for case in cases(group):
                yield row_of(case, ranks, device, torchs, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for a case (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the date here")
    args = parser.parse_args()
    native.load()
    torch.set_num_threads(1)
    found = []
    with idle() as device, tuning.forced("shards"):
        for ranks in args.ranks:
            for row in rows(ranks, device, args.seconds):
                print(row.line(), flush=True)
                found.append(asdict(row))
    if args.json is not None:
        report.write_json(args.json, report.heading(["python", *sys.argv], "cpu"), found)


if __name__ == "__main__":
    main()
