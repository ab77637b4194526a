"""The runtime for devices with streams on CPU memory: real schedules, launches and peers.

`tests/cuda/driver.cpp` is its driver; it guarantees what CUDA's does and no more. There is no
device: kernels of the caller's stream run in the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shlex
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from symm_cp import devices, memory, native
from symm_cp.devices.symmetric import SymmetricWorkspace

_SOURCE = Path(__file__).with_name("driver.cpp")


@cache
def build() -> str:
    """Compiles the stand-in, once for each version and compiler; returns the library's path."""
    command = native.find_compiler()
    digest = hashlib.sha256(command.encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"symm_cp_simulated_driver_{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "driver.so"
            flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-o", str(made)]
            subprocess.run([*shlex.split(command), *flags, str(_SOURCE)], check=True)
            scratch = target.with_name(f"{target.name}.{made.parent.name}")
            scratch.write_bytes(made.read_bytes())
            scratch.replace(target)
    return str(target)


#: A function that a stream calls.
CALL = ctypes.CFUNCTYPE(None)


class _Event:
    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._stream = library, stream

    def wait(self) -> None:
        self._library.simulated_drain(self._stream)


class SimulatedDevice(devices.Device):
    """A device whose memory is the CPU's; its null stream is the calling thread."""

    torch_type, dispatch_key = "cpu", "CPU"
    captures = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.driver = build()
        self.library = ctypes.CDLL(self.driver)
        self.library.simulated_stream.restype = ctypes.c_void_p
        self.library.simulated_drain.argtypes = [ctypes.c_void_p]
        self.library.simulated_call.argtypes = [ctypes.c_void_p, CALL]
        self._sides: dict[str, int] = {}
        self._calls: deque[tuple[Any, list[bool]]] = deque()
        self.in_capture = False
        self.chosen_signals = devices.Signals.STREAM

    def _side(self, channel: str) -> int:
        if channel not in self._sides:
            self._sides[channel] = self.library.simulated_stream()
        return self._sides[channel]

    def streams(self, channel: str) -> tuple[int, int]:
        return 0, self._side(channel)

    def launch(self, lane: str, channel: str, kernel: Callable[[], object]) -> None:
        if lane == "compute":
            kernel()
            return
        self.call(self._side(channel), kernel)

    def call(self, stream: int, function: Callable[[], object]) -> None:
        """Has a stream call a function."""
        ended: list[bool] = []

        def call() -> None:
            function()
            ended.append(True)

        # The stream calls it later; until then it must not be freed, nor while it returns.
        while len(self._calls) > 1000 and self._calls[0][1]:
            self._calls.popleft()
        wrapped = CALL(call)
        self._calls.append((wrapped, ended))
        self.library.simulated_call(stream, wrapped)

    def mark(self, lane: str, channel: str) -> devices.Mark:
        times: list[int] = []
        self.launch(lane, channel, lambda: times.append(time.monotonic_ns()))
        return lambda: times[0]

    def capturing(self) -> bool:
        return self.in_capture

    def synchronize(self) -> None:
        for stream in self._sides.values():
            self.library.simulated_drain(stream)

    def used_by_copies(self, channel: str, *tensors: torch.Tensor) -> None:
        # Memory here is freed at once: it has to be kept by whoever uses it.
        self.kept = [*getattr(self, "kept", [])[-64:], *tensors]

    def copies_ended(self, channel: str) -> Any:
        return _Event(self.library, self._side(channel))

    def verdict(self, group: memory.Group) -> devices.Verdict:
        return devices.Verdict(self.chosen_signals)

    def workspace(
        self,
        group: memory.Group,
        channel: str,
        slot_bytes: int,
        *,
        graph: bool,
        verdict: devices.Verdict,
    ) -> devices.DeviceWorkspace:
        return SymmetricWorkspace(group, self, channel, slot_bytes, graph=graph, verdict=verdict)

    def is_symmetric(self, tensor: torch.Tensor, group: memory.Group) -> bool:
        return memory.is_symmetric(tensor, group)

    def count(self) -> dict[str, int]:
        """How often the driver was called since the last time."""
        kinds = ("copies", "batches", "2d", "mem_op_calls", "mem_ops")
        return {kind: self.library.simulated_count(i) for i, kind in enumerate(kinds)}


@cache
def simulated_device() -> SimulatedDevice:
    """The one device of this process."""
    return SimulatedDevice()


@contextlib.contextmanager
def simulation(*, delays_us: int = 100, graph: bool = False, signals: str = "stream") -> Any:
    """Inside, ops on CPU tensors run on streams; `graph`: as while a graph is captured."""
    made = simulated_device()
    made.library.simulated_delays(delays_us)
    made.in_capture, made.chosen_signals = graph, devices.Signals(signals)
    with devices.replaced(torch.device("cpu"), made):
        try:
            yield made
        finally:
            made.synchronize()
            made.in_capture, made.chosen_signals = False, devices.Signals.STREAM
