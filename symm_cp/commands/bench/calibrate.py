"""`symm-cp calibrate`: measures what kernels, copies and calls cost on this machine.

All ranks measure at once, so the figures include contention for memory bandwidth and, with fewer
cores than ranks, for cores. Transfers between ranks are measured as ops use them: one rank writes
the memory just before another one reads it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp import measured, trusted
from symm_cp.commands.bench import divisions
from symm_cp.commands.harness.measure import duration, slowest
from symm_cp.commands.harness.progress import Progress
from symm_cp.commands.harness.report import keep, processor
from symm_cp.commands.harness.start import run_command
from symm_cp.ranks import quick_barrier
from symm_cp.schedule.machine import Curve, Machine, from_toml, machine, to_toml
from symm_cp.tensors.results import new_result
from symm_cp.tuning import machine_path

#: A measured point of a curve: its size (bytes or operations) and seconds.
Point: TypeAlias = tuple[float, float]

_COPIES = tuple(1 << n for n in range(12, 27, 2))  # 4 KiB to 64 MiB
# The memory of large results is reused (symm_cp/tensors/results.py) up to SYMM_CP_KEEP_MIB;
# beyond that the C library returns blocks of 32 MiB or more to the system when they are freed.
_FRESH = (*_COPIES[:-1], (1 << 25) - (1 << 20), 1 << 25, 1 << 26)
_CUBES = (32, 64, 128, 256, 512, 1024)
_FEW_ROWS, _WEIGHTS = 32, (256, 512, 1024, 2048, 4096)
_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
_HEADS, _HEAD_DIM = 4, 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MIN_REPETITIONS, _MAX_REPETITIONS = 5, 50
#: A call that takes longer than this many times the time for a point is measured once: noise is
#: comparatively small, and a processor without instructions for bfloat16 takes 2.4 s to multiply
#: two matrices of 1024 x 1024.
_LONG = 2.0
_BRIEF_SECONDS = 0.01  # for each point
_MIN_SECONDS = 1e-9  # a curve must not contain zeros
# The least difference of two times, as a share of the first time: noise may exceed the difference.
# If the share is smaller, noise can make a cost vanish; if it is larger, it hides small costs.
_LEAST_DIFFERENCE = 0.01
# More work cannot take less time: a point gets up to 4 measurements while it takes longer than a
# larger point by the factor 2 and 20 us, both beyond the noise of an idle machine.
_ATTEMPTS, _FALL, _FALL_SECONDS = 4, 2.0, 20e-6
#: If a rank gets less than this share of a core during this many seconds of computing, other
#: programs use the core, too.
_LEAST_SHARE, _SHARE_SECONDS = 0.85, 0.3


class BusyError(RuntimeError):
    """The machine runs other programs at the same time, so times are meaningless."""


def find(name: str | None, ranks: int) -> Machine | None:
    """Returns the machine of a name or file; without one, this machine as calibrated for `ranks`.

    Returns None if there is no calibration for `ranks`. Raises `ValueError` for an unknown name,
    and for a file that describes no machine or that another user could change.
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
    """Like `find`, identically on all ranks; measures briefly without a calibration. Collective.

    A brief measurement is not saved, so ops behave as before. It has no kernel curves: it is for
    work whose kernel is timed separately.
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
        #: Curves in which more work took less time in spite of all attempts.
        self.implausible: list[str] = []

    def share(self) -> float:
        """Returns the least share of a core that any rank gets while all ranks compute."""
        self.barrier()
        wall, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < _SHARE_SECONDS:
            torch.mm(self._matrix, self._matrix, out=self._product)
        got = (time.thread_time() - own) / (time.perf_counter() - wall)
        least = torch.tensor(got, dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return float(least)

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
        (first,) = slowest([self._once(run, before, cold)], self.group)
        if first > _LONG * self._budget:
            return first
        (second,) = slowest([self._once(run, before, cold)], self.group)
        repetitions = self._repetitions(max(first, second))
        own = [self._once(run, before, cold) for _ in range(repetitions)]
        return max(_MIN_SECONDS, statistics.median(slowest(own, self.group)))

    def _once(self, run: Callable[[], object], before: Callable[[], object], cold: bool) -> float:
        before()
        if cold:
            torch.mm(self._matrix, self._matrix, out=self._product)
        self.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _repetitions(self, longest: float) -> int:
        """Returns the number of repetitions that fit into the time for a point."""
        fitting = int(self._budget / max(1e-9, longest))
        return max(_MIN_REPETITIONS, min(_MAX_REPETITIONS, fitting))

    def curve(self, name: str, point: Callable[[int], Point], numbers: Sequence[int]) -> Curve:
        """Returns the curve through the points for `numbers`, which must increase.

        All ranks get the same times, so all measure the same points again.
        """
        points = [point(number) for number in numbers]
        for _ in range(_ATTEMPTS - 1):
            for index in falls(points):
                again = point(numbers[index])
                points[index] = min(points[index], again, key=lambda p: p[1])
        if fallen := falls(points):
            size, seconds = points[fallen[0]]
            later = min(points[fallen[0] + 1 :], key=lambda p: p[1])
            self.implausible.append(
                f"{name} of {size:.3g} took {duration(seconds)}, of {later[0]:.3g} "
                f"{duration(later[1])}"
            )
        if self.progress is not None:
            self.progress.advance(name)
        return rising(points)


def falls(points: Sequence[Point]) -> list[int]:
    """Returns the indices of points that take much longer than a point of larger size."""
    return [
        index
        for index, (_, seconds) in enumerate(points)
        if any(seconds > _FALL * later + _FALL_SECONDS for _, later in points[index + 1 :])
    ]


def rising(points: Sequence[Point]) -> Curve:
    """Returns the non-decreasing curve that is closest to the points, in logarithms.

    Decreasing neighbours are replaced by their mean (pool adjacent violators; Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []  # mean of logarithms, and their number
    for _, seconds in points:
        mean, count = math.log(max(_MIN_SECONDS, seconds)), 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean = (mean * count + before * others) / (count + others)
            count += others
        pools.append((mean, count))
    fitted = [math.exp(mean) for mean, count in pools for _ in range(count)]
    return Curve(tuple(size for size, _ in points), tuple(fitted))


def _difference(seconds: float, others: float) -> float:
    """Returns `seconds - others`, at least a small share of `seconds`."""
    return max(_LEAST_DIFFERENCE * seconds, seconds - others)


class _Slots:
    """Two slots of symmetric memory, used in turn like the slots of a workspace."""

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
        """Switches to the other slot, and writes its beginning."""
        self._current = 1 - self._current
        self.own(nbytes).zero_()


def _moves(meter: _Meter) -> dict[str, Curve]:
    """Measures copies, transfers, reads of a peer's memory, and fresh memory, by bytes."""
    slots = _Slots(meter, _COPIES[-1])
    plain = torch.zeros(_COPIES[-1], dtype=torch.uint8)

    def copy(nbytes: int) -> float:
        """Times a copy into memory that the peer has just read."""

        def read() -> None:
            slots.write(nbytes)
            meter.barrier()
            slots.peer(nbytes).clone()

        return meter.seconds(lambda: slots.own(nbytes).copy_(plain[:nbytes]), read, cold=True)

    def transfer(nbytes: int) -> float:
        """Times a copy from memory that the peer has just written."""
        write = partial(slots.write, nbytes)
        return meter.seconds(lambda: plain[:nbytes].copy_(slots.peer(nbytes)), write, cold=True)

    def remote(nbytes: int) -> float:
        """Times reading a peer's memory, minus reading own memory, both just written."""

        def total(slot: Callable[[int], torch.Tensor]) -> float:
            write = partial(slots.write, nbytes)
            return meter.seconds(lambda: slot(nbytes).view(torch.float32).sum(), write, cold=True)

        return _difference(total(slots.peer), total(slots.own))

    def fresh(nbytes: int) -> float:
        """Times allocating and writing memory, minus writing it again."""

        def make() -> torch.Tensor:
            return new_result(plain, (nbytes,)).fill_(1)

        again = meter.seconds(lambda: plain[:nbytes].fill_(1))
        return _difference(meter.seconds(make), again)

    kinds = {"copy": (copy, _COPIES), "transfer": (transfer, _COPIES),
             "remote": (remote, _COPIES), "fresh": (fresh, _FRESH)}  # fmt: skip

    def point(run: Callable[[int], float], nbytes: int) -> Point:
        return float(nbytes), run(nbytes)

    return {
        kind: meter.curve(kind, partial(point, run), sizes) for kind, (run, sizes) in kinds.items()
    }


def _reduce(meter: _Meter, call: float) -> Curve:
    """Measures reductions by the bytes that a rank reads, minus the `call` seconds of an op."""
    name = str(meter.group.group_name)
    slots = _Slots(meter, meter.ranks * _COPIES[-2])

    def point(nbytes: int) -> Point:
        out = torch.empty(nbytes // 4)

        def run() -> None:
            full = slots.own(meter.ranks * nbytes).view(torch.float32)
            torch.ops.symm_mem.reduce_scatter_out.default(full, name, False, out)

        write = partial(slots.write, meter.ranks * nbytes)
        return float(meter.ranks * nbytes), _difference(meter.seconds(run, write, cold=True), call)

    return meter.curve("reduce", point, _COPIES[:-1])


def _matmul(meter: _Meter, rows: int, size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
    return meter.seconds(partial(torch.mm, a, b, out=torch.empty_like(a)))


def _matmuls(meter: _Meter, name: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Measures matmuls by operations, and the time to load the weight by its bytes.

    Matmuls with few rows show the load; it is subtracted from the others.
    """
    largest = _CUBES[-1]
    rate = 2.0 * largest**3 / _matmul(meter, largest, largest, dtype)

    def load(size: int) -> Point:
        seconds = _matmul(meter, _FEW_ROWS, size, dtype)
        operations = 2.0 * _FEW_ROWS * size * size / rate
        return float(size * size * dtype.itemsize), _difference(seconds, operations)

    weight = meter.curve(f"weight, {name}", load, _WEIGHTS)

    def cube(size: int) -> Point:
        seconds = _matmul(meter, size, size, dtype)
        # At least half: the subtracted time was measured with some noise.
        operations = max(seconds / 2, seconds - weight(size * size * dtype.itemsize))
        return 2.0 * size**3, operations

    return {
        f"weight.{name}": weight,
        f"matmul.{name}": meter.curve(f"matmul, {name}", cube, _CUBES),
    }


def _attention(meter: _Meter, dtype: torch.dtype, tokens: int) -> Point:
    q, k, v = (torch.randn(1, _HEADS, tokens, _HEAD_DIM).to(dtype) for _ in range(3))
    seconds = meter.seconds(partial(F.scaled_dot_product_attention, q, k, v))
    return 4.0 * _HEADS * tokens * tokens * _HEAD_DIM, seconds


def _kernels(meter: _Meter) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for name, dtype in _DTYPES.items():
        curves |= _matmuls(meter, name, dtype)
        point = partial(_attention, meter, dtype)
        curves[f"attention.{name}"] = meter.curve(f"attention, {name}", point, _TOKENS)
    return curves


def _one_matmul(meter: _Meter) -> dict[str, Curve]:
    def cube(size: int) -> Point:
        return 2.0 * size**3, _matmul(meter, size, size, torch.float32)

    return {"matmul.float32": meter.curve("matmul, float32", cube, [_CUBES[len(_CUBES) // 2]])}


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
    idle: bool = False,
) -> Machine:
    """Measures this machine, identically on all ranks. Collective; takes about 10 s.

    Without `kernels` it takes 2 s, and the result is for work whose kernel is timed separately.
    With `idle`, raises `BusyError` if other programs take cores from the ranks, or if more work
    took less time; without `idle`, rank 0 prints a warning in the second case.
    """
    meter = _Meter(group, progress, seconds)
    if idle:
        _check_idle(meter, "before the measurement")
    with torch.no_grad():
        calls = _calls(meter)
        curves = _kernels(meter) if kernels else _one_matmul(meter)
        curves |= _moves(meter)
        curves["reduce"] = _reduce(meter, calls["reduce_scatter_out"])
    if idle:
        _check_idle(meter, "after the measurement")
    if meter.implausible and kernels:
        fallen = f"more work took less time: {'; '.join(meter.implausible)}"
        if idle:
            raise BusyError(fallen)
        if group.rank() == 0:
            print(f"symm-cp calibrate: {fallen}; measure again when idle", file=sys.stderr)
    fastest = max(size / seconds for size, seconds in _points(curves["matmul.float32"]))
    rate = max(size / seconds for size, seconds in _points(curves["copy"]))
    memory = float(_memory_bytes())
    return Machine(
        processor(), fastest, memory, 2 * rate, rate, gpus=meter.ranks,
        matmul_reached=1.0, attention_reached=1.0, link_reached=1.0,
        kernel_seconds=0.0, signal_seconds=_signal(meter), calls=calls, curves=curves,
    )  # fmt: skip


def _check_idle(meter: _Meter, when: str) -> None:
    cores = len(os.sched_getaffinity(0))
    expected = min(1.0, cores / meter.ranks)
    share = meter.share()
    if share < _LEAST_SHARE * expected:
        raise BusyError(
            f"{when}, {meter.ranks} ranks that computed got {share:.0%} of a core each, must get "
            f"{expected:.0%} on {cores} cores: other programs run"
        )


def _points(curve: Curve) -> Iterable[Point]:
    return zip(curve.sizes, curve.seconds, strict=True)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _signal(meter: _Meter) -> float:
    """Measures a barrier; between two ranks a barrier is one signal each way."""
    barriers = 200

    def run() -> None:
        for _ in range(barriers):
            meter.barrier()

    return meter.seconds(run) / barriers


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp calibrate`; returns 0 if the file was written."""
    return run_command(args, lambda _: None, run_rank)


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the files."""
    threads = args.threads or len(os.sched_getaffinity(0)) // group.size()
    progress = Progress(13 if threads > 1 else 12) if group.rank() == 0 else None
    try:
        found = measure(group, progress, args.seconds, idle=not args.force)
    except BusyError as error:  # on all ranks
        if progress is not None:
            progress.close()
            print(
                f"symm-cp calibrate: the machine is busy ({error}): nothing was written; run this "
                "again when it is idle",
                file=sys.stderr,
            )
        return 1
    divided_from = 0
    if threads > 1:
        divided_from = divisions.measure(_Meter(group, None, args.seconds).seconds, threads)
        if progress is not None:
            progress.advance("threads")
    if progress is not None:
        progress.close()
        path = keep(args.out, partial(machine_path, group.size()), to_toml(found))
        print(f"{found.name}, {found.gpus} ranks: {path}")
        if threads > 1:
            place = measured.divided_path(threads)
            beside = None if args.out is None else args.out.with_name(place.name)
            path = keep(beside, lambda: place, measured.to_toml(divided_from))
            print(f"{threads} threads of a rank divide from {divided_from >> 10} KiB on: {path}")
    return 0
