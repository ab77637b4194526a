"""What loopback.py measures on: a device with a clock and a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import kernel_timeline
from benchmarks.kernel_timeline import Profile
from benchmarks.loopback_cases import MODELS, Call, Model, tiny
from benchmarks.loopback_device import Loopback
from symm_cp import cuda
from symm_cp.group.memory import Group

#: Calls of a block: few enough that their launches fit into the driver's queue (1024 on GPUs).
CALLS = 4
#: Blocks that are taken at least, however short the time.
_LEAST_BLOCKS = 3
_PEERS_BLOCKS = 20
_PROFILED = 3
# Cycles of a GPU for each microsecond: at most 2.1 today; more keeps the device busy for longer.
_CYCLES = 2500
# How much longer the host takes to issue a call while the profiler records.
_PROFILER_SLOWDOWN = 5
_MOST_SPIN_US = 50_000.0


class Lab:
    """A device in loopback that carries out nothing; subclasses have a clock and a profiler."""

    #: The type of its torch device, and its name in `report`.
    kind = "cpu"
    #: Whether ops have results, and the device takes time.
    works = False
    #: Whether torch's pipelines run, too: they need streams of torch.cuda.
    runs_torchs = True
    #: Nanoseconds of the host.
    clock: Callable[[], int] = staticmethod(time.thread_time_ns)

    def __init__(self, device: cuda.Device) -> None:
        self.device = device

    @property
    def peers(self) -> bool:
        """Whether the other ranks exist: these make the same calls."""
        return not isinstance(self.device, Loopback)

    def goes_on(self, times: Sequence[float], end: float) -> bool:
        """Tells whether to measure another block after some `times`, until `end`."""
        if self.peers:
            return len(times) < _PEERS_BLOCKS
        return len(times) < _LEAST_BLOCKS or time.monotonic() < end

    def models(self, ranks: int) -> Sequence[Model]:
        """Returns the models whose layers are measured."""
        return [tiny(ranks)]

    def device_us(self, call: Call, host_us: float) -> float:
        """Returns microseconds per call, of `CALLS` in a row; the host issues one in `host_us`."""
        raise NotImplementedError

    def profile(self, call: Call, host_us: float, trace: Path | None) -> Profile | None:
        """Profiles calls, and writes the timeline to a file; None if `symm_cp.trace` shows more."""
        raise NotImplementedError

    def in_graph(self, group: Group, call: Call, nbytes: int) -> Call:
        """Captures a call with slots of `nbytes`; returns its replay, which gives the results."""
        raise NotImplementedError


class Gpu(Lab):
    """The current GPU."""

    kind = "cuda"
    works = True
    clock = staticmethod(time.perf_counter_ns)

    def models(self, ranks: int) -> Sequence[Model]:
        """See `Lab`."""
        return MODELS

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
