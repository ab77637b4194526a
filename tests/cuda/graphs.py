"""Captured graphs of the simulated device: captured work runs when the graph is replayed.

Torch's ops that are called while a stream is captured are recorded one by one (ahead.py), on the
stream of their lane, between the driver's commands. The graph's own tensors ("private pool") are
garbage until the first replay.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.cuda.ahead import Ahead

if TYPE_CHECKING:
    from tests.cuda.simulated import SimulatedDevice


def refuse(what: str) -> Any:
    """Raises torch's error for a host that waits for a stream under capture."""
    raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def _refused(_: torch.Tensor) -> None:
    refuse("a copy to the host")


class _Recorder(Ahead):
    """Ops go to the graph; what it uses is kept as long as the graph is."""

    def synchronize(self, why: str) -> None:
        refuse(why)


class Graph:
    """A capture, and then a graph; it keeps all memory that it uses."""

    def __init__(self, device: SimulatedDevice, pool: object | None = None) -> None:
        self.device, self.library = device, device.library
        self.pool = object() if pool is None else pool
        device.graphs.add(self)
        self.handle = ctypes.c_void_p()
        self.kept: list[Any] = []  # tensors, and functions that the driver calls

    # --- capture

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures the work of this thread inside."""
        stream = self.device.current_stream()
        assert self.library.simulated_capture_begin(stream) == 0
        self.device.graph = self
        try:
            with (
                _Recorder(self.device, self.kept),
                mock.patch.object(torch.Tensor, "tolist", _refused),
                mock.patch.object(torch.Tensor, "numpy", _refused),
                # A captured stream takes no notice of torch's modes.
                mock.patch("symm_cp.modes._disable_current_modes", contextlib.nullcontext),
            ):
                yield
        finally:
            self.device.graph = None
            result = self.library.simulated_capture_end(stream, 0, ctypes.byref(self.handle))
        if result:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(result, ctypes.byref(name))
            raise RuntimeError(f"CUDA error: {(name.value or b'').decode()}: the capture is lost")

    # --- replay

    def replay(self) -> None:
        """Runs it on the current stream, and returns when that has ended."""
        self.start()
        self.device.join()

    def start(self) -> None:
        """Runs it on the current stream, while the host goes on."""
        result = self.library.simulated_replay(self.handle, self.device.current_stream(), 0)
        assert result == 0, result

    def __del__(self) -> None:
        if self.handle:
            self.library.simulated_graph_destroy(self.handle)


def graphed(
    device: SimulatedDevice, function: Callable[[], Any], pool: object | None = None
) -> tuple[Graph, Any]:
    """Captures a function; returns the graph and the function's result, which replays fill."""
    graph = Graph(device, pool)
    with graph.capturing():
        result = function()
    return graph, result
