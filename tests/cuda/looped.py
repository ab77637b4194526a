"""The simulated device in loopback: for benchmarks/loopback.py where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from pathlib import Path

from benchmarks.kernel_timeline import Profile
from benchmarks.loopback import CALLS
from benchmarks.loopback_device import Loopback
from benchmarks.one_rank import Call
from symm_cp import cuda
from symm_cp.group.memory import Group
from tests.cuda.simulated import SimulatedDevice, simulation


class SimulatedLoopback(Loopback, SimulatedDevice):
    """A simulated device whose peers are itself."""

    replayed = 0  # the number of the last graph of `SimulatedLab.in_graph`

    def graph_pool(self) -> Hashable:
        """All replays of a graph count as one capture: they take its workspace."""
        return self.replayed


class SimulatedLab:
    """A `Lab` of the simulated device, whose times mean nothing."""

    kind = "cpu"

    def __init__(self) -> None:
        self.device = SimulatedLoopback()

    def device_us(self, call: Call, host_us: float) -> float:
        begin = self.device.mark("compute", "sync")
        for _ in range(CALLS):
            call()
        end = self.device.mark("compute", "sync")
        self.device.synchronize()
        return (end() - begin()) / CALLS / 1e3

    def profile(self, call: Call, host_us: float, trace: Path | None) -> Profile | None:
        return None

    def in_graph(self, group: Group, call: Call, nbytes: int) -> Call:
        """Each replay is captured anew, over the same workspace."""
        cuda.reserve_on(group, self.device, nbytes, graphs=1)
        self.device.replayed += 1

        def replay() -> object:
            self.device.in_capture = True
            try:
                return call()
            finally:
                self.device.in_capture = False

        return replay


@contextlib.contextmanager
def simulated_lab() -> Iterator[SimulatedLab]:
    with simulation(delays_us=0, patience_ms=10_000):
        yield SimulatedLab()
