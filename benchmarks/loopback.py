"""Host and device time of each op at 2 to 16 ranks, in one process on one GPU.

    python benchmarks/loopback.py --json loopback.json --trace traces

The process is a rank of a group whose other ranks do not exist; loopback_device.py says how the
peers' memory comes to be its own. Streams, kernels and calls of the driver are those of a real
call. Links are not measured: a copy from a "peer" stays within the GPU, and no peer is ever late.

For each op, at the shapes of a model's layer with 8192 tokens over the ranks:

host      microseconds in which the host issues a call, the tenth percentile
device    microseconds of a call between two events, the host being ahead of the device
alone     likewise for the same matmul or attention on the gathered input, and device / alone
kernels, copies, gap   of a call in the profiler; the longest time without a kernel
driver    calls of the driver, and their microseconds; each function is in the JSON file

Results are checked as far as one rank can know them. `--simulated` runs it over the driver of the
tests instead, with small shapes: to try it out, not to measure.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import symm_cp
from benchmarks import kernel_timeline
from benchmarks.kernel_timeline import Profile
from benchmarks.loopback_cases import MODELS, SMALL, Case, Model, cases
from benchmarks.loopback_device import (
    Loopback,
    LoopbackGpu,
    TimedDriver,
    forget_slots,
    loopback,
)
from benchmarks.one_rank import Call, group_of
from symm_cp import cuda, native
from symm_cp.commands.harness import report
from symm_cp.group.memory import Group, resolve
from symm_cp.ranks import positive
from symm_cp.schedule import trace as drawing

#: Calls of a block: few enough that their launches fit into the driver's queue (1024 on GPUs).
CALLS = 4
#: Blocks that are taken at least, however short the time.
_LEAST_BLOCKS = 3
_PROFILED = 3
# Cycles of a GPU for each microsecond: at most 2.1 today; more keeps the device busy for longer.
_CYCLES = 2500
# How much longer the host takes to issue a call while the profiler records.
_PROFILER_SLOWDOWN = 5
_MOST_SPIN_US = 50_000.0


class Lab(Protocol):
    """A device in loopback, and its clock and profiler."""

    #: The type of its torch device, and its name in `report`.
    kind: str

    @property
    def device(self) -> Loopback:
        """The device that runs the ops."""

    def device_us(self, call: Call, host_us: float) -> float:
        """Returns microseconds per call, of `CALLS` in a row; the host issues one in `host_us`."""

    def profile(self, call: Call, host_us: float, trace: Path | None) -> Profile | None:
        """Profiles calls, and writes the timeline to a file; None if `symm_cp.trace` shows more."""

    def in_graph(self, group: Group, call: Call, nbytes: int) -> Call:
        """Captures a call with slots of `nbytes`; returns its replay, which gives the results."""


class Gpu:
    """The current GPU."""

    kind = "cuda"

    def __init__(self) -> None:
        self.device = LoopbackGpu(torch.device("cuda", torch.cuda.current_device()))

    def _spin(self, us: float) -> None:
        torch.cuda._sleep(int(min(us, _MOST_SPIN_US) * _CYCLES))

    def device_us(self, call: Call, host_us: float) -> float:
        """See `Lab`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._spin(CALLS * host_us)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / CALLS * 1e3

    def profile(self, call: Call, host_us: float, trace: Path | None) -> Profile | None:
        """See `Lab`."""
        activities = [
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.CUDA,
        ]
        with _trace_file(trace, ".kineto.json") as path:
            with torch.profiler.profile(activities=activities) as profiler:
                for _ in range(_PROFILED):
                    self._spin(_PROFILER_SLOWDOWN * host_us)
                    call()
                    torch.cuda.synchronize()
            profiler.export_chrome_trace(str(path))
            return kernel_timeline.of_trace(path)

    def in_graph(self, group: Group, call: Call, nbytes: int) -> Call:
        """See `Lab`."""
        cuda.reserve_on(group, self.device, nbytes)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()  # libraries allocate memory at first use
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay() -> object:
            graph.replay()
            return result

        return replay


@contextmanager
def _trace_file(stem: Path | None, suffix: str) -> Iterator[Path]:
    """Yields the file of a trace, or without `stem` a temporary file."""
    if stem is not None:
        yield stem.with_name(stem.name + suffix)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder, "trace" + suffix)


@dataclass
class Row:
    """Times of a case, in microseconds; with an `error`, only the times measured before it.

    `gap_us`, `busy_us`: the longest time without a kernel, the time with one. `driver`: calls and
    microseconds of each function of the driver.
    """

    case: str
    model: str
    ranks: int
    host_us: float | None = None
    device_us: float | None = None
    kernels: int | None = None
    copies: int | None = None
    gap_us: float | None = None
    busy_us: float | None = None
    driver: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: str = ""
    #: The compute alone, where the op computes.
    alone_us: float | None = None
    #: A replay of a graph of the call, with `--graphs`.
    replay_us: float | None = None

    def line(self) -> str:
        """Returns the row as text, as far as it is known."""
        cells = [f"{self.case:36} {self.model:11} {self.ranks:2} ranks"]
        if self.host_us is not None:
            cells.append(f"host {self.host_us:8.1f} us")
        if self.device_us is not None:
            cells.append(f"device {self.device_us:9.1f} us")
        if self.alone_us is not None and self.device_us is not None:
            cells.append(f"alone {self.alone_us:9.1f} us ({self.device_us / self.alone_us:.2f})")
        if self.replay_us is not None:
            cells.append(f"replayed {self.replay_us:9.1f} us")
        if self.driver:
            calls, us = (sum(numbers) for numbers in zip(*self.driver.values(), strict=True))
            cells.append(f"driver {calls} calls {us:.1f} us")
        if self.gap_us is not None:
            cells.append(f"{self.kernels} kernels {self.copies} copies gap {self.gap_us:.1f} us")
        if self.error:
            cells.append(f"FAILED: {self.error}")
        return "  ".join(cells)


def host_us(lab: Lab, call: Call, seconds: float) -> float:
    """Microseconds in which the host issues a call: the tenth percentile of blocks."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < _LEAST_BLOCKS or time.monotonic() < end:
        lab.device.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - begin) / CALLS / 1e3)
    lab.device.synchronize()
    return sorted(times)[len(times) // 10]


def device_us(lab: Lab, call: Call, host: float, seconds: float) -> float:
    """Microseconds of a call on the device: the median of blocks."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < _LEAST_BLOCKS or time.monotonic() < end:
        times.append(lab.device_us(call, host))
    return statistics.median(times)


def check(lab: Lab, group: Group, case: Case, call: Call) -> None:
    """Makes a call twice, so that it uses both slots, and checks the results of the case."""
    for _ in range(2):
        lab.device.synchronize()
        forget_slots(group)
        result = call()
        lab.device.synchronize()
        case.check(result)


def profiled(lab: Lab, case: Case, host: float, stem: Path | None) -> Profile:
    """Profiles a case; with `stem` writes the timelines of torch's profiler and of the steps."""
    profile = lab.profile(case.run, host, stem)
    with symm_cp.trace() as recording:
        case.run()
    if stem is not None:
        drawing.save(stem.with_name(f"{stem.name}.steps.json"), {"measured": recording.timeline})
    return profile or kernel_timeline.of_recording(recording.timeline)


@dataclass(frozen=True)
class Options:
    """How cases are measured."""

    seconds: float
    traces: Path | None = None
    graphs: bool = False

    def stem(self, row: Row) -> Path | None:
        """Returns the file of a row's traces, without its suffix."""
        if self.traces is None:
            return None
        name = f"{row.case} {row.model} {row.ranks} ranks"
        return self.traces / re.sub(r"\W+", "-", name.lower())


def fill(row: Row, case: Case, lab: Lab, driver: TimedDriver, group: Group, how: Options) -> None:
    """Checks a case and measures it; each of three times gets a third of the seconds."""
    check(lab, group, case, case.run)
    seconds = how.seconds / 3
    row.host_us = host_us(lab, case.run, seconds)
    row.device_us = device_us(lab, case.run, row.host_us, seconds)
    if case.alone is not None:
        case.alone()
        row.alone_us = device_us(lab, case.alone, row.host_us, seconds)
    row.driver = driver.calls_of(case.run)
    lab.device.synchronize()
    profile = profiled(lab, case, row.host_us, how.stem(row))
    row.kernels, row.copies = profile.kernels, profile.copies
    row.gap_us, row.busy_us = profile.largest_gap_us, profile.busy_us
    if how.graphs and case.slot_bytes:
        replay = lab.in_graph(group, case.run, case.slot_bytes)
        check(lab, group, case, replay)
        row.replay_us = device_us(lab, replay, row.host_us, seconds)


def rows_of(
    ranks: int, model: Model, lab: Lab, driver: TimedDriver, how: Options, only: str
) -> Iterator[Row]:
    """Measures the cases of a model at a number of ranks; a failed case is a row with its error."""
    group = group_of(ranks, lab.kind)
    known = resolve(group)
    try:
        for case in cases(group, model, lab.device.torch_device):
            if only not in case.name:
                continue
            row = Row(case.name, model.name, ranks)
            try:
                fill(row, case, lab, driver, known, how)
            except Exception as error:
                row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            yield row
    finally:
        lab.device.synchronize()
        cuda.workspaces_of(known).clear()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=positive, nargs="+", default=[2, 4, 8, 16], help="(2 4 8 16)")
    add("--model", default="", help="only models with this in their name")
    add("--case", default="", help="only cases with this in their name")
    add("--small", action="store_true", help="one model of small sizes")
    add("--graphs", action="store_true", help="capture calls into CUDA graphs as well")
    add("--seconds", type=float, default=0.6, help="time for a case (%(default)s)")
    add("--json", type=Path, help="write the rows, the machine and the date here")
    add("--trace", type=Path, metavar="FOLDER", help="write timelines of each case here")
    add("--simulated", action="store_true", help="over the driver of the tests, with --small")
    return parser.parse_args()


@contextmanager
def _lab(simulated: bool) -> Iterator[Lab]:
    if not simulated:
        yield Gpu()
        return
    from tests.cuda.looped import simulated_lab

    with simulated_lab() as lab:
        yield lab


def main() -> int:
    """Runs the benchmark; returns 1 if a case failed, 2 if none ran."""
    args = _parse()
    if not args.simulated and not torch.cuda.is_available():
        print("loopback: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 2
    native.load()
    sizes: Sequence[Model] = [SMALL] if args.small or args.simulated else MODELS
    models = [model for model in sizes if args.model in model.name]
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    how = Options(args.seconds, args.trace, args.graphs)
    rows: list[Row] = []
    with _lab(args.simulated) as lab, loopback(lab.device) as driver:
        head = report.heading(["python", *sys.argv], lab.kind)
        for ranks, model in itertools.product(args.ranks, models):
            for row in rows_of(ranks, model, lab, driver, how, args.case):
                print(row.line(), flush=True)
                rows.append(row)
                if (
                    args.json is not None
                ):  # after each case: whoever runs this may have a time limit
                    report.write_json(args.json, head, [asdict(row) for row in rows])
    if not rows:
        print("loopback: no case has that name", file=sys.stderr)
        return 2
    failed = sum(bool(row.error) for row in rows)
    print(f"loopback: {len(rows)} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
