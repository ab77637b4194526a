"""Captured graphs of the simulated device: captured work runs when the graph is replayed.

Torch's ops that are called while a stream is captured are recorded one by one, on the stream of
their lane, between the driver's commands. They also run once during the capture, only to get the
shapes of their results; afterwards existing tensors are as they were, and the graph's own tensors
("private pool") are garbage until the first replay.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.cuda.simulated import SimulatedDevice

GARBAGE = 0xFF  # in every byte: NaN in all floating types

#: Ops in our namespaces that compute something themselves; the others call further ops.
_LEAVES = (
    *("merge_attention", "new_result"),
    *("attention_tile", "attention_inner", "attention_tile_backward"),
)
#: Ops that need the values of tensors on the host.
_SYNCHRONIZING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "_to_cpu")
_ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def refuse(what: str) -> Any:
    """Raises torch's error for a host that waits for a stream under capture."""
    raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def _refused(_: torch.Tensor) -> None:
    refuse("a copy to the host")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments to which an op writes."""
    given = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    into = (a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    return _tensors([given[name] for name in into if name in given])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in _SYNCHRONIZING:
            refuse(str(func))
        if func.namespace in ("symm_mem", "symm_cp") and name not in _LEAVES:
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if func.namespace == "_c10d_functional":
            return func(*args, **kwargs)
        return self.graph.record(func, args, kwargs)


class Graph:
    """A capture, and then a graph; it keeps all memory that it uses."""

    def __init__(self, device: SimulatedDevice, pool: object | None = None) -> None:
        self.device, self.library = device, device.library
        self.pool = object() if pool is None else pool
        device.graphs.add(self)
        self.handle = ctypes.c_void_p()
        self.kept: list[Any] = []  # tensors, and functions that the driver calls
        self._own: dict[int, torch.UntypedStorage] = {}

    # --- capture

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures the work of this thread inside."""
        stream = self.device.current_stream()
        assert self.library.simulated_capture_begin(stream) == 0
        self.device.graph = self
        try:
            with (
                _Recorder(self),
                mock.patch.object(torch.Tensor, "tolist", _refused),
                mock.patch.object(torch.Tensor, "numpy", _refused),
                # A captured stream takes no notice of torch's modes.
                mock.patch("symm_cp.modes._disable_current_modes", contextlib.nullcontext),
            ):
                yield
        finally:
            self.device.graph = None
            result = self.library.simulated_capture_end(stream, 0, ctypes.byref(self.handle))
            for storage in self._own.values():
                if storage.device.type != "meta":  # of tensors that only have a shape
                    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)
        if result:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(result, ctypes.byref(name))
            raise RuntimeError(f"CUDA error: {(name.value or b'').decode()}: the capture is lost")

    def record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op to get its results' shapes, and has the stream run it at every replay."""
        given, written = _tensors((args, kwargs)), _written(func, args, kwargs)
        before = [(t, t.clone()) for t in written if _storage(t) not in self._own]
        result = func(*args, **kwargs)
        for tensor, value in before:
            tensor.copy_(value)
        known = {_storage(t) for t in given}
        fresh = [(i, t) for i, t in enumerate(_tensors(result)) if _storage(t) not in known]
        for _, tensor in fresh:
            self._own[_storage(tensor)] = tensor.untyped_storage()
        self.kept.append((args, kwargs, result))
        if (not fresh and not written) or func.overloadpacket.__name__ in _ALLOCATING:
            return result

        def replayed() -> None:
            results = _tensors(func(*args, **kwargs))
            for i, tensor in fresh:
                tensor.copy_(results[i])

        machine, stream = self.device.machine, self.device.lane_stream()
        machine.call(stream, replayed, kind=1, name=str(func), keep=self.kept)
        return result

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
