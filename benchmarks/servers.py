"""Predictions for servers with several sockets, and how well the model predicts this machine.

    python benchmarks/servers.py --ranks 2 --threads 1 --json benchmarks/results/servers_2x1.json

This machine's cores, memory and matmuls are measured first, on all ranks at once. Then ops are
compared with the predictions of `symm_cp.schedule.servers` from those figures. At the end it prints
the predictions for servers, from their vendors' figures alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.commands.harness.measure import Row
from symm_cp.commands.harness.report import Written
from symm_cp.schedule.servers import SERVERS, Server, Spread, all_reduce, decode, gather_matmul

MIB = 1 << 20
CACHED, LARGE, CUBE = MIB // 4, 64 * MIB, 1024
ROWS, INNER, COLUMNS = 512, 1024, 1024
LAYERS, HIDDEN = 4, 4096  # each layer has two matmuls of HIDDEN x HIDDEN here
LLAMA = 8e9, 32, 4096  # parameters, layers, hidden


def _seconds(group: dist.ProcessGroup, run: Callable[[], object]) -> float:
    """The median time of a run while all ranks do the same; the slowest rank's."""
    times = []
    for _ in range(15):
        dist.barrier(group)
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times[3:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _this_machine(group: dist.ProcessGroup) -> Server:
    cores, ranks, threads = len(os.sched_getaffinity(0)), group.size(), torch.get_num_threads()
    busy = min(threads, max(1, cores // ranks))
    torch.set_num_threads(busy)  # more threads than cores wait for each other

    def copy(nbytes: int) -> float:
        x, out = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
        times = max(1, MIB // nbytes)
        return _seconds(group, lambda: [out.copy_(x) for _ in range(times)]) / times

    a, b = torch.randn(CUBE, CUBE), torch.randn(CUBE, CUBE)
    flops = 2.0 * CUBE**3 / _seconds(group, lambda: torch.mm(a, b))
    signal = _seconds(group, lambda: [dist.barrier(group) for _ in range(100)]) / 100
    server = Server(
        "this machine",
        sockets=1,
        cores=cores,
        core_flops=flops / busy,
        core_rate=2 * CACHED / copy(CACHED) / busy,
        memory_rate=2 * LARGE / copy(LARGE) * ranks,
        reached=1.0,
        signal_seconds=signal / 2,
        call_seconds=signal / 2,
    )
    torch.set_num_threads(threads)
    return server


def _matmul(group: dist.ProcessGroup) -> Callable[[], object]:
    x, weight = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    if group.size() == 1:
        return partial(torch.mm, x, weight)
    return partial(symm_cp.all_gather_matmul, x, weight, group=group)


def _decode(group: dist.ProcessGroup) -> Callable[[], object]:
    weights = [torch.randn(HIDDEN // group.size(), HIDDEN) for _ in range(2 * LAYERS)]
    x, y = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN)

    def run() -> None:
        for weight in weights:
            F.linear(x, weight)
            if group.size() > 1:
                dist.all_reduce(y, dist.ReduceOp.MAX, group=group)

    return run


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases, each with the model's prediction from this machine's figures."""
    spread = Spread(_this_machine(group), group.size(), torch.get_num_threads())

    def case(name: str, run: Callable[[], object], seconds: float) -> Case:
        def error(row: Row) -> dict[str, object]:
            return {"predicted_ms": seconds * 1e3, "error": seconds / row.median("op") - 1}

        return Case(f"{name}, {spread.ranks} x {spread.threads} threads", {"op": run}, after=error)

    for size in (8 * MIB, 32 * MIB) if group.size() > 1 else ():
        x = torch.zeros(size // 4)
        seconds = all_reduce(spread, size)
        yield case(
            f"all-reduce, {size // MIB} MiB", partial(dist.all_reduce, x, group=group), seconds
        )
    if spread.busy < spread.threads:
        return  # torch's matmuls take all threads, and these wait for each other
    shape = f"{ROWS} rows a rank, {INNER} x {COLUMNS}"
    seconds = gather_matmul(spread, ROWS, INNER, COLUMNS, item=4)
    yield case(f"all-gather-matmul, {shape}", _matmul(group), seconds)
    parameters = 2.0 * LAYERS * HIDDEN**2
    seconds = decode(spread, parameters, LAYERS, HIDDEN, item=4)
    yield case(f"decoding, {2 * LAYERS} matrices of {HIDDEN}", _decode(group), seconds)


def _of_servers(rows: Sequence[Written]) -> str:
    lines = [f"{row['case']}: predicted / measured - 1 = {row['error']:+.0%}" for row in rows]
    lines.append(f"\n{'32 threads a rank':<18}{'ranks':>6}{'all-reduce 8, 32 MiB':>22}")
    lines[-1] += f"{'all-gather-matmul / unfused':>29}{'tokens/s, 8e9 in bf16':>23}"
    for server in SERVERS.values():
        for ranks in (1, 2, 4):
            spread = Spread(server, ranks, 32)
            tokens = f"{1 / decode(spread, *LLAMA):.0f}"
            reductions = matmul = ""
            if ranks > 1:
                times = (all_reduce(spread, size * MIB) * 1e3 for size in (8, 32))
                reductions = ", ".join(f"{each:.2f}" for each in times) + " ms"
                ways = (
                    gather_matmul(spread, 2048 // ranks, 4096, 4096, fused=f) for f in (True, False)
                )
                fused, unfused = ways
                matmul = f"{fused * 1e3:.2f} ms, {fused / unfused:.2f}"
            lines.append(f"{server.name:<18}{ranks:>6}{reductions:>22}{matmul:>29}{tokens:>23}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(cases, __doc__, backend="symm_cp", summary=_of_servers)
