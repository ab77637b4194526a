"""The CUDA runtime on CPU memory: real schedules, launches and peers, but not the real driver.

`tests/cuda/driver.cpp` does what the driver promises and no more. What it leaves out is the device:
kernels run in the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from symm_cp import device, memory, native, runtime

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


_CALL = ctypes.CFUNCTYPE(None)


class _Event:
    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._stream = library, stream

    def wait(self) -> None:
        self._library.simulated_drain(self._stream)


class SimulatedDevice(device.Device):
    """A device whose memory is the CPU's; its null stream is the calling thread."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.driver = build()
        self.library = ctypes.CDLL(self.driver)
        self.library.simulated_stream.restype = ctypes.c_void_p
        self.library.simulated_drain.argtypes = [ctypes.c_void_p]
        self.library.simulated_call.argtypes = [ctypes.c_void_p, _CALL]
        self._sides: dict[str, int] = {}
        self._calls: list[Any] = []
        self.in_capture = False
        self.by_stream = True

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
        call = _CALL(lambda: kernel() and None)
        self._calls = [*self._calls[-1000:], call]  # the stream calls them later
        self.library.simulated_call(self._side(channel), call)

    def mark(self, lane: str, channel: str) -> device.Mark:
        times: list[int] = []
        self.launch(lane, channel, lambda: times.append(time.monotonic_ns()))
        return lambda: times[0]

    def guard(self) -> Any:
        return contextlib.nullcontext()

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

    def signals_by_stream(self) -> bool:
        return self.by_stream

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
def simulation(*, delays_us: int = 100, graph: bool = False, by_stream: bool = True) -> Any:
    """Ops on CPU tensors run as on CUDA; `graph`: as while a graph is captured."""
    made = simulated_device()
    made.library.simulated_delays(delays_us)
    cpu = torch.device("cpu")
    before = device._devices.get(cpu)
    device._devices[cpu] = made
    made.in_capture, made.by_stream = graph, by_stream
    with runtime.replaced("cpu", "cuda"):
        try:
            yield made
        finally:
            made.synchronize()
            made.in_capture, made.by_stream = False, True
            del device._devices[cpu]
            if before is not None:
                device._devices[cpu] = before
