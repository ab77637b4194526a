"""The simulated device, in loopback or not: `python benchmarks/loopback.py --driver simulated`.

With TRITON_INTERPRET=1 it also has the kernels that poll, with small tiles.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.kernel_timeline import Profile
from benchmarks.loopback_cases import SMALL, Call, Model
from benchmarks.loopback_device import Loopback
from benchmarks.loopback_labs import CALLS, Lab
from symm_cp import cuda
from symm_cp.group.memory import Group
from tests.cuda.simulated import SimulatedDevice, simulation


class SimulatedLoopback(Loopback, SimulatedDevice):
    """A simulated device whose peers are itself."""

    replayed = 0  # the number of the last graph of `SimulatedLab.in_graph`
    interprets = False

    def graph_pool(self) -> Hashable:
        """All replays of a graph count as one capture: they take its workspace."""
        return self.replayed

    def polls(self) -> bool:
        return self.interprets


class SimulatedLab(Lab):
    """The simulated device, whose times mean nothing."""

    works = True
    runs_torchs = False

    def models(self, ranks: int) -> Sequence[Model]:
        # Triton's interpreter has no bfloat16.
        interprets = SimulatedLoopback.interprets
        return [replace(SMALL, dtype=torch.float32) if interprets else SMALL]

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
        device = self.device
        assert isinstance(device, SimulatedDevice)
        cuda.reserve_on(group, device, nbytes, graphs=1)
        if isinstance(device, SimulatedLoopback):
            device.replayed += 1

        def replay() -> object:
            device.in_capture = True
            try:
                return call()
            finally:
                device.in_capture = False

        return replay


@contextlib.contextmanager
def simulated_lab(*, peers: bool) -> Iterator[SimulatedLab]:
    with contextlib.ExitStack() as stack:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from symm_cp.cuda.kernels import tile_matmul
            from tests.cuda import interpreted

            interpreted.mend()
            fitting = tile_matmul.Tiling(64, 64, 64, 4, 1), 3
            stack.enter_context(mock.patch.object(tile_matmul, "_fitting", return_value=fitting))
            stack.enter_context(mock.patch.object(SimulatedLoopback, "interprets", True))
        device = stack.enter_context(simulation(delays_us=0, patience_ms=10_000))
        yield SimulatedLab(device if peers else SimulatedLoopback())
