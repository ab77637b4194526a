"""Host and device time of each op at 2 to 16 ranks, in one process whose peers are itself.

    python benchmarks/loopback.py --json loopback.json --trace traces       # on a GPU
    python benchmarks/loopback.py --driver idle --json benchmarks/results/host_time.json
    python benchmarks/loopback.py --driver simulated --ranks 2              # to try it out
    symm-cp run --nproc-per-node 8 benchmarks/loopback.py                   # with a GPU per rank

The process is a rank of a group whose other ranks do not exist; loopback_device.py says how the
peers' memory comes to be its own. Links are not measured: a copy from a "peer" stays within the
GPU, and no peer is ever late. Started as ranks, the peers are these, and rank 0 reports. The
drivers:

real       a GPU: streams, kernels and calls of the driver are those of a real call
idle       a GPU that does nothing (loopback_idle.py): the host's CPU time to issue a call, for tiny
           tensors, and nothing else; it needs no GPU, and results are not checked
simulated  the driver of the tests, with small tensors: the times mean nothing

For each op, at the shapes of a model's layer with 8192 tokens over the ranks, and for each
algorithm that serves it (* : the one it takes by its size):

host      microseconds in which the host issues a call, the tenth percentile; if Python makes it
device    microseconds of a call between two events, the host being ahead of the device
alone     likewise for the same matmul or attention on the gathered input, and device / alone
torch     host and device time of torch's own pipeline, whose barriers do nothing here
kernels, copies, gap   of a call in the profiler; the longest time without a kernel
driver    calls of the driver, and their microseconds; each function is in the JSON file

Results are checked as far as one rank can know them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import symm_cp
from benchmarks import kernel_timeline
from benchmarks.kernel_timeline import Profile
from benchmarks.loopback_cases import Call, Case, Model, cases
from benchmarks.loopback_device import (
    LoopbackGpu,
    TimedDriver,
    forget_slots,
    group_of,
    place_of,
    timed,
)
from benchmarks.loopback_idle import idle
from benchmarks.loopback_labs import CALLS, Gpu, Lab
from symm_cp import cuda, native, tuning
from symm_cp.commands.harness import report
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group.memory import Group, resolve
from symm_cp.ranks import exit_as_rank, is_rank, positive
from symm_cp.schedule import trace as drawing

DRIVERS = ("real", "idle", "simulated")
#: Calls that are checked: one by Python, the recorded one, and the record's, in both slots.
_CHECKED = 4


@dataclass
class Row:
    """Times of a case, in microseconds; with an `error`, only the times measured before it.

    `gap_us`, `busy_us`: the longest time without a kernel, the time with one. `driver`: calls and
    microseconds of each function of the driver, unless it does nothing.
    """

    case: str
    model: str
    ranks: int
    algorithm: str = ""
    #: Whether the op takes this algorithm by its size.
    by_size: bool = True
    host_us: float | None = None
    #: If Python makes the call, as for the first calls of a kind.
    python_us: float | None = None
    device_us: float | None = None
    kernels: int | None = None
    copies: int | None = None
    gap_us: float | None = None
    busy_us: float | None = None
    driver_calls: int | None = None
    driver: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: str = ""
    #: The compute alone, where the op computes.
    alone_us: float | None = None
    #: A replay of a graph of the call, with `--graphs`.
    replay_us: float | None = None
    torch_us: float | None = None
    torch_device_us: float | None = None
    torch_error: str = ""

    def written(self) -> dict[str, object]:
        """Returns what is known, for a file."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "", {})}

    def line(self) -> str:
        """Returns the row as text, as far as it is known."""
        algorithm = self.algorithm + "*" * (self.by_size and self.algorithm != "")
        cells = [f"{self.case:41} {algorithm:9} {self.model:11} {self.ranks:2} ranks"]

        def add(name: str, *times: float | None) -> None:
            known = [f"{us:8.1f}" for us in times if us is not None]
            if known:
                cells.append(f"{name} {' /'.join(known)} us")

        add("host", self.host_us, self.python_us)
        add("device", self.device_us)
        if self.alone_us is not None and self.device_us is not None:
            add(f"{self.device_us / self.alone_us:.2f} of alone", self.alone_us)
        add("torch", self.torch_us, self.torch_device_us)
        add("replayed", self.replay_us)
        if self.driver_calls is not None:
            us = sum(us for _, us in self.driver.values())
            cells.append(f"driver {self.driver_calls} calls {us:.1f} us")
        if self.gap_us is not None:
            cells.append(f"{self.kernels} kernels {self.copies} copies gap {self.gap_us:.1f} us")
        if self.error:
            cells.append(f"FAILED: {self.error}")
        return "  ".join(cells)


def host_us(lab: Lab, call: Call, seconds: float) -> float:
    """Microseconds in which the host issues a call: the tenth percentile of blocks."""
    times: list[float] = []
    for _ in range(_CHECKED):  # the second call of a kind is recorded
        call()
    end = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    try:
        while lab.goes_on(times, end):
            lab.device.synchronize()
            begin = lab.clock()
            for _ in range(CALLS):
                call()
            times.append((lab.clock() - begin) / CALLS / 1e3)
    finally:
        gc.enable()
    lab.device.synchronize()
    return sorted(times)[len(times) // 10]


def device_us(lab: Lab, call: Call, host: float, seconds: float) -> float:
    """Microseconds of a call on the device: the median of blocks."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while lab.goes_on(times, end):
        times.append(lab.device_us(call, host))
    return statistics.median(times)


def check(lab: Lab, group: Group, case: Case, call: Call) -> None:
    """Makes several calls, and checks the results of the case."""
    for _ in range(_CHECKED):
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
        name = f"{row.case} {row.algorithm} {row.model} {row.ranks} ranks"
        return self.traces / re.sub(r"\W+", "-", name.lower())


def fill_torchs(row: Row, call: Call, lab: Lab, seconds: float) -> None:
    """Measures torch's pipeline; an error of its own leaves the row's other times."""
    try:
        row.torch_us = host_us(lab, call, seconds)
        if lab.works:
            row.torch_device_us = device_us(lab, call, row.torch_us, seconds)
    except Exception as error:
        if lab.peers:
            raise
        row.torch_error = f"{type(error).__name__}: {error}"


def fill(row: Row, case: Case, lab: Lab, driver: TimedDriver, group: Group, how: Options) -> None:
    """Checks a case and measures it; each of the times gets a share of the seconds."""
    seconds = how.seconds / 5
    record_at = native.load().symm_cp_plans_record_at
    if lab.works:
        check(lab, group, case, case.run)
    record_at(-1)
    try:
        row.python_us = host_us(lab, case.run, seconds)
    finally:
        record_at(1)
    row.host_us = host_us(lab, case.run, seconds)
    counted = driver.calls_of(case.run)
    row.driver_calls = sum(calls for calls, _ in counted.values())
    row.driver = counted if lab.works else {}
    lab.device.synchronize()
    if case.torchs is not None and lab.runs_torchs:
        fill_torchs(row, case.torchs, lab, seconds)
    if not lab.works:
        return
    row.device_us = device_us(lab, case.run, row.host_us, seconds)
    if case.alone is not None:
        case.alone()
        row.alone_us = device_us(lab, case.alone, row.host_us, seconds)
    profile = profiled(lab, case, row.host_us, how.stem(row))
    row.kernels, row.copies = profile.kernels, profile.copies
    row.gap_us, row.busy_us = profile.largest_gap_us, profile.busy_us
    if how.graphs and case.slot_bytes:
        replay = lab.in_graph(group, case.run, case.slot_bytes)
        check(lab, group, case, replay)
        row.replay_us = device_us(lab, replay, row.host_us, seconds)


def algorithms_of(case: Case) -> Iterator[tuple[str, bool]]:
    """Yields the algorithms that serve a case, and whether the op takes it by its size."""
    with tuning.listening() as choices:
        case.run()
    by_size = {choice.algorithm for choice in choices.values()}
    if not by_size:  # nothing to choose from
        yield next(iter(case.algorithms), ""), True
        return
    for algorithm in case.algorithms:
        with tuning.forced(algorithm), tuning.listening() as choices:
            case.run()
        if tuning.Choice(algorithm, "forced") in choices.values():
            yield algorithm, algorithm in by_size


def rows_of(
    group: dist.ProcessGroup, model: Model, lab: Lab, driver: TimedDriver, how: Options,
    only: Callable[..., bool],
) -> Iterator[Row]:  # fmt: skip
    """Measures the cases of a model in a group; a failed case is a row with its error."""
    known = resolve(group)
    try:
        for case in cases(group, model, place_of(lab.device), peers=lab.peers):
            if not only(case.name, *(case.algorithms or ("",))):
                continue
            for algorithm, by_size in algorithms_of(case):
                if not only(case.name, algorithm):
                    continue
                row = Row(case.name, model.name, group.size(), algorithm, by_size)
                try:
                    with tuning.forced(algorithm or None):
                        fill(row, case, lab, driver, known, how)
                except Exception as error:
                    if lab.peers:
                        raise  # these would go on
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
    add("--driver", choices=DRIVERS, default="real", help="(%(default)s)")
    add("--ranks", type=positive, nargs="+", default=[2, 4, 8, 16], help="(2 4 8 16)")
    add("--model", default="", help="only models with this in their name")
    add("--case", default="", help="only cases with this in their name")
    add("--algorithm", nargs="+", metavar="NAME", help="only these")
    add("--without", nargs="+", metavar="NAME", default=[], help="all algorithms but these")
    add("--graphs", action="store_true", help="capture calls into CUDA graphs as well")
    add("--seconds", type=float, default=1.0, help="time for a case (%(default)s)")
    add("--json", type=Path, help="write the rows, the machine and the date here")
    add("--trace", type=Path, metavar="FOLDER", help="write timelines of each case here")
    return parser.parse_args()


@contextmanager
def _lab(driver: str, *, peers: bool) -> Iterator[Lab]:
    if driver == "real":
        kind = CudaDevice if peers else LoopbackGpu
        yield Gpu(kind(torch.device("cuda", torch.cuda.current_device())))
    elif driver == "idle":
        with idle() as device:
            yield Lab(device)
    else:
        from tests.cuda.looped import simulated_lab

        with simulated_lab(peers=peers) as lab:
            yield lab


def _is_wanted(args: argparse.Namespace, name: str, *algorithms: str) -> bool:
    chosen = set(algorithms if args.algorithm is None else args.algorithm) - set(args.without)
    return args.case in name and not chosen.isdisjoint(algorithms)


def measured(args: argparse.Namespace, group: dist.ProcessGroup | None) -> Iterator[Row]:
    """Measures the cases in a group of real ranks, or in loopback at the numbers of `--ranks`."""
    if group is not None and group.rank() != 0:
        args.trace = None
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    how = Options(args.seconds, args.trace, args.graphs)
    with _lab(args.driver, peers=group is not None) as lab, timed(lab.device) as driver:
        for ranks in args.ranks if group is None else [group.size()]:
            members = group_of(ranks, lab.kind) if group is None else group
            for model in lab.models(ranks):
                if args.model in model.name:
                    only = functools.partial(_is_wanted, args)
                    yield from rows_of(members, model, lab, driver, how, only)


def run(args: argparse.Namespace, group: dist.ProcessGroup | None = None) -> int:
    """Measures and reports; returns 1 if a case failed, 2 if none ran."""
    speaks = group is None or group.rank() == 0
    head = report.heading(["python", *sys.argv], "cuda" if args.driver == "real" else "cpu")
    rows: list[Row] = []
    for row in measured(args, group):
        rows.append(row)
        if speaks:
            print(row.line(), flush=True)
            if args.json is not None:  # after each case: whoever runs this may have a time limit
                report.write_json(args.json, head, [row.written() for row in rows])
    if not rows:
        print("loopback: no case has that name", file=sys.stderr)
        return 2
    failed = sum(bool(row.error) for row in rows)
    if speaks:
        print(f"loopback: {len(rows)} cases, {failed} failed")
    return int(failed > 0)


def main() -> int:
    """Runs the benchmark, as one of the ranks if it was started so."""
    args = _parse()
    if args.driver == "real" and not torch.cuda.is_available():
        print("loopback: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 2
    native.load()
    if is_rank():
        if args.driver == "idle":
            raise SystemExit("loopback: --driver idle has no peers; start it alone")
        backend = "cpu:gloo,cuda:gloo" if args.driver == "real" else "gloo"
        exit_as_rank(lambda group: run(args, group), None, backend)
    if args.driver == "idle":
        torch.set_num_threads(1)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
