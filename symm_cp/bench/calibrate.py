"""`symm-cp calibrate`: measures what kernels, copies and calls cost on this machine.

All ranks measure at once, so the figures include contention for memory bandwidth and, with fewer
cores than ranks, for cores. Transfers between ranks are measured as ops use them: one rank writes
the memory just before another one reads it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp import native, trusted
from symm_cp.bench.report import keep, processor
from symm_cp.demo.progress import Progress
from symm_cp.ranks import (
    add_rendezvous,
    exit_as_rank,
    is_rank,
    positive,
    quick_barrier,
    run_ranks,
)
from symm_cp.results import new_result
from symm_cp.schedule.machine import Curve, Machine, from_toml, machine, to_toml
from symm_cp.tuning import machine_path

HELP = "measure what kernels, copies and calls cost here, for predictions (trace, tune)"

#: A measured point of a curve: its size (bytes or operations) and seconds.
Point: TypeAlias = tuple[float, float]

_COPIES = tuple(1 << n for n in range(12, 27, 2))  # 4 KiB to 64 MiB
# The memory of large results is used again (symm_cp/results.py), unless SYMM_CP_KEEP_MIB is less
# than they take: from 32 MiB on the C library returns freed memory at once.
_FRESH = (*_COPIES[:-1], (1 << 25) - (1 << 20), 1 << 25, 1 << 26)
_CUBES = (32, 64, 128, 256, 512, 1024)
_FEW_ROWS, _WEIGHTS = 32, (256, 512, 1024, 2048, 4096)
_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
_HEADS, _HEAD_DIM = 4, 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MIN_REPETITIONS, _MAX_REPETITIONS = 5, 50
_BRIEF_SECONDS = 0.01  # for each point
_MIN_SECONDS = 1e-9  # a curve must not contain zeros


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp calibrate`."""
    parser.add_argument(
        "--ranks", type=positive, default=2, help="processes that measure at once (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.15, help="approximate time for each point (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="file to write (default: where trace and tune look for it)"
    )
    add_rendezvous(parser)


def find(name: str | None, ranks: int) -> Machine | None:
    """Returns the machine of a name or file; without one, this machine as calibrated for `ranks`.

    Returns None if it was never calibrated for them. Raises `ValueError` for an unknown name, and
    for a file that describes no machine or that another user could change.
    """
    if name is not None:
        return machine(name)
    path = machine_path(ranks)
    try:
        return from_toml(trusted.read(path).decode(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{error}; or give --machine") from error


def find_or_measure(name: str | None, group: dist.ProcessGroup) -> Machine:
    """As `find`, identically on all ranks; measures briefly if never calibrated. Collective.

    A brief measurement is not saved, so ops behave as before. It has no curves of kernels: it is
    for work whose kernel is timed separately.
    """
    from_rank_0: list[Machine | None] = [None]
    if group.rank() == 0:
        from_rank_0 = [find(name, group.size())]
    dist.broadcast_object_list(from_rank_0, dist.get_global_rank(group, 0), group)
    if (calibrated := from_rank_0[0]) is not None:
        return calibrated
    if group.rank() == 0:
        print(
            f"not calibrated for {group.size()} ranks: measured briefly, for this command only "
            f"(symm-cp calibrate --ranks {group.size()} measures accurately and saves the result)",
            flush=True,
        )
    return measure(group, None, _BRIEF_SECONDS, kernels=False)


class _Meter:
    """Times things on all ranks at once."""

    def __init__(self, group: dist.ProcessGroup, progress: Progress | None, seconds: float) -> None:
        self.group, self.progress, self._budget = group, progress, seconds
        self.rank, self.ranks = group.rank(), group.size()
        self.barrier = quick_barrier(group)
        self._matrix, self._product = torch.randn(512, 512), torch.empty(512, 512)

    def seconds(
        self,
        run: Callable[[], object],
        before: Callable[[], object] = lambda: None,
        *,
        cold: bool = False,
    ) -> float:
        """Returns the median time of `run` on the slowest rank; `before` is not timed.

        With `cold`, a matmul first evicts everything else from a core's own caches, as the work
        between two ops does.
        """
        spent = max(self._once(run, before, cold) for _ in range(2))
        own = [self._once(run, before, cold) for _ in range(self._repetitions(spent))]
        times = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return max(_MIN_SECONDS, statistics.median(times.tolist()))

    def _once(self, run: Callable[[], object], before: Callable[[], object], cold: bool) -> float:
        before()
        if cold:
            torch.mm(self._matrix, self._matrix, out=self._product)
        self.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _repetitions(self, spent: float) -> int:
        """Returns how many repetitions fit into the time, identically on all ranks."""
        slowest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        fitting = int(self._budget / max(1e-9, float(slowest)))
        return max(_MIN_REPETITIONS, min(_MAX_REPETITIONS, fitting))

    def curve(self, name: str, points: Iterable[Point]) -> Curve:
        """Returns the curve through measured points."""
        sizes, seconds = zip(*points, strict=True)
        if self.progress is not None:
            self.progress.advance(name)
        return Curve(tuple(sizes), tuple(seconds))


class _Slots:
    """Two slots of symmetric memory, used in turn, as those of a workspace."""

    def __init__(self, meter: _Meter, nbytes: int) -> None:
        self._own = [symm_mem.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
        handles = [symm_mem.rendezvous(slot, meter.group) for slot in self._own]
        neighbour = (meter.rank + 1) % meter.ranks
        self._peers = [handle.get_buffer(neighbour, (nbytes,), torch.uint8) for handle in handles]
        self._current = 0

    def own(self, nbytes: int) -> torch.Tensor:
        """Returns the beginning of this rank's slot."""
        return self._own[self._current][:nbytes]

    def peer(self, nbytes: int) -> torch.Tensor:
        """Returns the beginning of the next rank's slot."""
        return self._peers[self._current][:nbytes]

    def write(self, nbytes: int) -> None:
        """Changes to the other slot, and writes its beginning."""
        self._current = 1 - self._current
        self.own(nbytes).zero_()


def _moves(meter: _Meter) -> dict[str, Curve]:
    """Measures copies, transfers, reads of a peer's memory, and fresh memory, by bytes."""
    slots = _Slots(meter, _COPIES[-1])
    plain = torch.zeros(_COPIES[-1], dtype=torch.uint8)

    def copy(nbytes: int) -> float:
        """Into memory that the peer has just read."""

        def read() -> None:
            slots.write(nbytes)
            meter.barrier()
            slots.peer(nbytes).clone()

        return meter.seconds(lambda: slots.own(nbytes).copy_(plain[:nbytes]), read, cold=True)

    def transfer(nbytes: int) -> float:
        """Out of memory that the peer has just written."""
        write = partial(slots.write, nbytes)
        return meter.seconds(lambda: plain[:nbytes].copy_(slots.peer(nbytes)), write, cold=True)

    def remote(nbytes: int) -> float:
        """How much longer it takes to read a peer's memory than one's own, both just written."""

        def total(slot: Callable[[int], torch.Tensor]) -> float:
            write = partial(slots.write, nbytes)
            return meter.seconds(lambda: slot(nbytes).view(torch.float32).sum(), write, cold=True)

        return max(_MIN_SECONDS, total(slots.peer) - total(slots.own))

    def fresh(nbytes: int) -> float:
        """How much longer it takes to allocate and write memory than to write it again."""

        def make() -> torch.Tensor:
            return new_result(plain, (nbytes,)).fill_(1)

        first = meter.seconds(make)
        return max(_MIN_SECONDS, first - meter.seconds(lambda: plain[:nbytes].fill_(1)))

    kinds = {"copy": (copy, _COPIES), "transfer": (transfer, _COPIES),
             "remote": (remote, _COPIES), "fresh": (fresh, _FRESH)}  # fmt: skip
    return {
        kind: meter.curve(kind, [(float(size), run(size)) for size in sizes])
        for kind, (run, sizes) in kinds.items()
    }


def _reduce(meter: _Meter, call: float) -> Curve:
    """Measures reductions by the bytes that a rank reads, without the `call` seconds of any op."""
    name = str(meter.group.group_name)
    slots = _Slots(meter, meter.ranks * _COPIES[-2])
    points = []
    for nbytes in _COPIES[:-1]:
        out = torch.empty(nbytes // 4)

        def run(nbytes: int = nbytes, out: torch.Tensor = out) -> None:
            full = slots.own(meter.ranks * nbytes).view(torch.float32)
            torch.ops.symm_mem.reduce_scatter_out.default(full, name, False, out)

        write = partial(slots.write, meter.ranks * nbytes)
        reduction = meter.seconds(run, write, cold=True) - call
        points.append((float(meter.ranks * nbytes), max(_MIN_SECONDS, reduction)))
    return meter.curve("reduce", points)


def _matmul(meter: _Meter, rows: int, size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
    return meter.seconds(partial(torch.mm, a, b, out=torch.empty_like(a)))


def _matmuls(meter: _Meter, name: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Measures matmuls by operations, and the time to load the weight by its bytes.

    The load shows in matmuls of few rows; it is subtracted from the others.
    """
    largest = _CUBES[-1]
    rate = 2.0 * largest**3 / _matmul(meter, largest, largest, dtype)
    loads = []
    for size in _WEIGHTS:
        operations = 2.0 * _FEW_ROWS * size * size / rate
        load = _matmul(meter, _FEW_ROWS, size, dtype) - operations
        loads.append((float(size * size * dtype.itemsize), max(_MIN_SECONDS, load)))
    weight = meter.curve(f"weight, {name}", loads)
    cubes = []
    for size in _CUBES:
        seconds = _matmul(meter, size, size, dtype)
        # At least half: what is subtracted was measured with some noise.
        operations = max(seconds / 2, seconds - weight(size * size * dtype.itemsize))
        cubes.append((2.0 * size**3, operations))
    return {
        f"weight.{name}": weight,
        f"matmul.{name}": meter.curve(f"matmul, {name}", cubes),
    }


def _kernels(meter: _Meter) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for name, dtype in _DTYPES.items():
        curves |= _matmuls(meter, name, dtype)
        points = []
        for tokens in _TOKENS:
            q, k, v = (torch.randn(1, _HEADS, tokens, _HEAD_DIM).to(dtype) for _ in range(3))
            seconds = meter.seconds(partial(F.scaled_dot_product_attention, q, k, v))
            points.append((4.0 * _HEADS * tokens * tokens * _HEAD_DIM, seconds))
        curves[f"attention.{name}"] = meter.curve(f"attention, {name}", points)
    return curves


def _one_matmul(meter: _Meter) -> dict[str, Curve]:
    size = _CUBES[len(_CUBES) // 2]
    points = [(2.0 * size**3, _matmul(meter, size, size, torch.float32))]
    return {"matmul.float32": meter.curve("matmul, float32", points)}


def _calls(meter: _Meter) -> dict[str, float]:
    """Measures ops on tiny tensors."""
    group = meter.group
    name = str(group.group_name)
    tiny, weight = torch.ones(8, 8), torch.ones(8, 8)
    full = torch.ones(8 * meter.ranks, 8)
    out = torch.empty(8, 8)
    q, heads = torch.ones(1, 1, 8, 8), torch.ones(1, meter.ranks, 8, 8)
    ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor.default
    calls: dict[str, Callable[[], object]] = {
        "all_gather_matmul": lambda: symm_cp.all_gather_matmul(tiny, weight, group=group),
        "matmul_reduce_scatter": lambda: symm_cp.matmul_reduce_scatter(full, weight, group=group),
        "all_gather_attention": lambda: symm_cp.all_gather_attention(q, q, q, group=group),
        "ulysses_attention": lambda: symm_cp.all_gather_attention(
            heads, heads, heads, group=group, method="ulysses"
        ),
        "reduce_scatter_out": lambda: ops.reduce_scatter_out.default(full, name, False, out),
        "all_gather": lambda: wait(ops._low_contention_all_gather.default(tiny, name)),
        "reduce_scatter": lambda: wait(
            ops._low_contention_reduce_scatter.default(full, "sum", name)
        ),
    }
    seconds = {op: meter.seconds(run, cold=True) for op, run in calls.items()}
    if meter.progress is not None:
        meter.progress.advance("calls")
    return seconds


def measure(
    group: dist.ProcessGroup,
    progress: Progress | None = None,
    seconds: float = 0.15,
    *,
    kernels: bool = True,
) -> Machine:
    """Returns this machine as measured, identically on all ranks. Collective; takes about 10 s.

    Without `kernels` it takes 2 s, and the machine is for work whose kernel is timed separately.
    """
    meter = _Meter(group, progress, seconds)
    with torch.no_grad():
        calls = _calls(meter)
        curves = _kernels(meter) if kernels else _one_matmul(meter)
        curves |= _moves(meter)
        curves["reduce"] = _reduce(meter, calls["reduce_scatter_out"])
    fastest = max(size / seconds for size, seconds in _points(curves["matmul.float32"]))
    rate = max(size / seconds for size, seconds in _points(curves["copy"]))
    memory = float(_memory_bytes())
    return Machine(
        processor(), fastest, memory, 2 * rate, rate, gpus=meter.ranks,
        matmul_reached=1.0, attention_reached=1.0, link_reached=1.0,
        kernel_seconds=0.0, signal_seconds=_signal(meter), calls=calls, curves=curves,
    )  # fmt: skip


def _points(curve: Curve) -> Iterable[Point]:
    return zip(curve.sizes, curve.seconds, strict=True)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _signal(meter: _Meter) -> float:
    """Measures a barrier; between two ranks it is a signal each way."""
    barriers = 200

    def run() -> None:
        for _ in range(barriers):
            meter.barrier()

    return meter.seconds(run) / barriers


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp calibrate`; returns 0 if the file was written."""
    if is_rank():
        exit_as_rank(lambda group: run_rank(args, group), args.rendezvous)
    try:
        native.load()
    except native.BuildError as error:
        print(f"symm-cp calibrate: {error}", file=sys.stderr)
        return 2
    return run_ranks("calibrate", args.ranks, args.arguments)


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the file."""
    progress = Progress(12) if group.rank() == 0 else None
    measured = measure(group, progress, args.seconds)
    if progress is not None:
        progress.close()
        path = keep(args.out, partial(machine_path, group.size()), to_toml(measured))
        print(f"{measured.name}, {measured.gpus} ranks: {path}")
    return 0
