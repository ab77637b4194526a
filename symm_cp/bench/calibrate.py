"""`symm-cp calibrate`: measures what kernels, copies and calls cost on this machine.

All ranks measure at once, so what they take from each other (the memory's bandwidth, and cores
where there are fewer than ranks) is in the figures. Memory that travels between ranks is measured
as it is used: written by one rank just before the other reads it.
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

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp import launch, native, trusted
from symm_cp.bench.measure import quick_barrier
from symm_cp.bench.report import keep, processor
from symm_cp.demo.progress import Progress
from symm_cp.ops.common import new_result
from symm_cp.schedule.machine import Curve, Machine, from_toml, machine, to_toml
from symm_cp.tuning import machine_path

HELP = "measure what kernels, copies and calls cost here, for predictions (trace, tune)"

_COPIES = tuple(1 << n for n in range(12, 27, 2))  # 4 KiB to 64 MiB
# From 32 MiB on the C library gives memory back at once, and every use is a first one.
_FRESH = (*_COPIES[:-1], (1 << 25) - (1 << 20), 1 << 25, 1 << 26)
_CUBES = (32, 64, 128, 256, 512, 1024)
_FEW_ROWS, _WEIGHTS = 32, (256, 512, 1024, 2048, 4096)
_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
_HEADS, _HEAD_DIM = 4, 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPETITIONS = (5, 50)
_BRIEFLY = 0.01  # seconds for each point
_LEAST = 1e-9  # a curve has no zeros


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp calibrate`."""
    parser.add_argument(
        "--ranks", type=launch.positive, default=2, help="that measure at once (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.15, help="for each point, about (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="the machine's file (default: where trace and tune look for it)"
    )
    launch.add_rendezvous(parser)


def find(given: str | None, ranks: int) -> Machine | None:
    """Returns the machine of that name or file, by default what was calibrated for these ranks.

    None where it was never calibrated for them. Raises `ValueError` for a name or file that is none
    of a machine, or that another user could change.
    """
    if given is not None:
        return machine(given)
    path = machine_path(ranks)
    try:
        return from_toml(trusted.read(path).decode(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{error}; or give --machine") from error


def find_or_measure(given: str | None, group: dist.ProcessGroup) -> Machine:
    """As `find`, identically on all ranks; measures briefly what was never calibrated. Collective.

    What was measured briefly is not kept, so that ops go on as before. It has no curves of kernels:
    it is for work whose kernel is timed by itself.
    """
    box: list[Machine | None] = [None]
    if group.rank() == 0:
        box = [find(given, group.size())]
    dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
    if (found := box[0]) is not None:
        return found
    if group.rank() == 0:
        print(
            f"not calibrated for {group.size()} ranks: measured briefly, for this command only "
            f"(symm-cp calibrate --ranks {group.size()} measures well, and keeps it)",
            flush=True,
        )
    return measure(group, None, _BRIEFLY, kernels=False)


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
        """The median over repetitions of the slowest rank's time of `run`, after `before`.

        With `cold` after a matmul, which leaves nothing else in a core's own caches, as the work
        between two ops does.
        """
        spent = max(self._once(run, before, cold) for _ in range(2))
        own = [self._once(run, before, cold) for _ in range(self._agreed(spent))]
        times = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return max(_LEAST, statistics.median(times.tolist()))

    def _once(self, run: Callable[[], object], before: Callable[[], object], cold: bool) -> float:
        before()
        if cold:
            torch.mm(self._matrix, self._matrix, out=self._product)
        self.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _agreed(self, spent: float) -> int:
        slowest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        least, most = _REPETITIONS
        return max(least, min(most, int(self._budget / max(1e-9, float(slowest)))))

    def curve(self, name: str, points: Iterable[tuple[float, float]]) -> Curve:
        """A curve through points as they are measured."""
        sizes, seconds = zip(*points, strict=True)
        if self.progress is not None:
            self.progress.advance(name)
        return Curve(tuple(sizes), tuple(seconds))


class _Turns:
    """Symmetric memory twice, taken in turn, as the slots of a workspace are."""

    def __init__(self, meter: _Meter, nbytes: int) -> None:
        self._mine = [symm_mem.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
        handles = [symm_mem.rendezvous(half, meter.group) for half in self._mine]
        neighbour = (meter.rank + 1) % meter.ranks
        self._peers = [handle.get_buffer(neighbour, (nbytes,), torch.uint8) for handle in handles]
        self._turn = 0

    def mine(self, nbytes: int) -> torch.Tensor:
        """This rank's memory."""
        return self._mine[self._turn][:nbytes]

    def peer(self, nbytes: int) -> torch.Tensor:
        """That of the next rank."""
        return self._peers[self._turn][:nbytes]

    def write(self, nbytes: int) -> None:
        """Takes the other half, and writes it."""
        self._turn = 1 - self._turn
        self.mine(nbytes).zero_()


def _moves(meter: _Meter) -> dict[str, Curve]:
    turns = _Turns(meter, _COPIES[-1])
    own = torch.zeros(_COPIES[-1], dtype=torch.uint8)

    def publish(nbytes: int) -> float:
        """Into memory that the peer has just read."""

        def read() -> None:
            turns.write(nbytes)
            meter.barrier()
            turns.peer(nbytes).clone()

        return meter.seconds(lambda: turns.mine(nbytes).copy_(own[:nbytes]), read, cold=True)

    def pull(nbytes: int) -> float:
        """Out of memory that the peer has just written."""
        write = partial(turns.write, nbytes)
        return meter.seconds(lambda: own[:nbytes].copy_(turns.peer(nbytes)), write, cold=True)

    def read_later(nbytes: int) -> float:
        """How much longer it takes to read a peer's memory than one's own, both just written."""

        def total(of: Callable[[int], torch.Tensor]) -> float:
            write = partial(turns.write, nbytes)
            return meter.seconds(lambda: of(nbytes).view(torch.float32).sum(), write, cold=True)

        return max(_LEAST, total(turns.peer) - total(turns.mine))

    def fresh(nbytes: int) -> float:
        """New memory over memory that is there, both written once."""

        def make() -> torch.Tensor:
            return new_result(own, (nbytes,)).fill_(1)

        return max(_LEAST, meter.seconds(make) - meter.seconds(lambda: own[:nbytes].fill_(1)))

    kinds = {"copy": publish, "transfer": pull, "remote": read_later}
    curves = {
        kind: meter.curve(kind, [(float(size), run(size)) for size in _COPIES])
        for kind, run in kinds.items()
    }
    points = [(float(size), fresh(size)) for size in _FRESH]
    return {**curves, "fresh": meter.curve("fresh", points)}


def _reduce(meter: _Meter, call: float) -> Curve:
    """By the bytes that a rank reads; what a call costs anyway is taken off."""
    name = str(meter.group.group_name)
    turns = _Turns(meter, meter.ranks * _COPIES[-2])
    points = []
    for nbytes in _COPIES[:-1]:
        out = torch.empty(nbytes // 4)

        def run(nbytes: int = nbytes, out: torch.Tensor = out) -> None:
            full = turns.mine(meter.ranks * nbytes).view(torch.float32)
            torch.ops.symm_mem.reduce_scatter_out.default(full, name, False, out)

        write = partial(turns.write, meter.ranks * nbytes)
        taken = meter.seconds(run, write, cold=True) - call
        points.append((float(meter.ranks * nbytes), max(_LEAST, taken)))
    return meter.curve("reduce", points)


def _matmul(meter: _Meter, rows: int, size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
    return meter.seconds(partial(torch.mm, a, b, out=torch.empty_like(a)))


def _matmuls(meter: _Meter, name: str, dtype: torch.dtype) -> dict[str, Curve]:
    """What operations take, and what a second matrix takes that few rows are multiplied with."""
    largest = _CUBES[-1]
    rate = 2.0 * largest**3 / _matmul(meter, largest, largest, dtype)
    points = []
    for size in _WEIGHTS:
        operations = 2.0 * _FEW_ROWS * size * size / rate
        taken = _matmul(meter, _FEW_ROWS, size, dtype) - operations
        points.append((float(size * size * dtype.itemsize), max(_LEAST, taken)))
    weight = meter.curve(f"weight, {name}", points)
    cubes = []
    for size in _CUBES:
        taken = _matmul(meter, size, size, dtype)
        # Never less than half: what is taken off was measured with some noise.
        operations = max(taken / 2, taken - weight(size * size * dtype.itemsize))
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
    """What ops take on next to nothing."""
    group = meter.group
    name = str(group.group_name)
    tiny, weight = torch.ones(8, 8), torch.ones(8, 8)
    full = torch.ones(8 * meter.ranks, 8)
    out = torch.empty(8, 8)
    q = torch.ones(1, 1, 8, 8)
    ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor.default
    calls: dict[str, Callable[[], object]] = {
        "all_gather_matmul": lambda: symm_cp.all_gather_matmul(tiny, weight, group=group),
        "matmul_reduce_scatter": lambda: symm_cp.matmul_reduce_scatter(full, weight, group=group),
        "all_gather_attention": lambda: symm_cp.all_gather_attention(q, q, q, group=group),
        "reduce_scatter_out": lambda: ops.reduce_scatter_out.default(full, name, False, out),
        "all_gather": lambda: wait(ops._low_contention_all_gather.default(tiny, name)),
        "reduce_scatter": lambda: wait(
            ops._low_contention_reduce_scatter.default(full, "sum", name)
        ),
    }
    found = {op: meter.seconds(run, cold=True) for op, run in calls.items()}
    if meter.progress is not None:
        meter.progress.advance("calls")
    return found


def measure(
    group: dist.ProcessGroup,
    progress: Progress | None = None,
    seconds: float = 0.15,
    *,
    kernels: bool = True,
) -> Machine:
    """Returns what was measured, alike on all ranks. Collective; takes about ten seconds.

    Without `kernels` it takes two, and the machine is for work whose kernel is timed by itself.
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


def _points(curve: Curve) -> Iterable[tuple[float, float]]:
    return zip(curve.sizes, curve.seconds, strict=True)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _signal(meter: _Meter) -> float:
    """A barrier of two ranks is a signal each way."""
    many = 200

    def run() -> None:
        for _ in range(many):
            meter.barrier()

    return meter.seconds(run) / many


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp calibrate`; returns 0 when the file was written."""
    if launch.is_rank():
        launch.leave(launch.as_rank(lambda group: _rank(given, group), given.rendezvous))
    try:
        native.load()
    except native.BuildError as error:
        print(f"symm-cp calibrate: {error}", file=sys.stderr)
        return 2
    return launch.run_ranks("calibrate", given.ranks, given.arguments)


def _rank(given: argparse.Namespace, group: dist.ProcessGroup) -> int:
    progress = Progress(12) if group.rank() == 0 else None
    found = measure(group, progress, given.seconds)
    if group.rank() == 0:
        assert progress is not None
        progress.close()
        path = keep(given.out, partial(machine_path, group.size()), to_toml(found))
        print(f"{found.name}, {found.gpus} ranks: {path}")
    return 0
