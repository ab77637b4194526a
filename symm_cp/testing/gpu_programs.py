"""Programs that ask for "cuda", on the CPU: GPU code of several ranks is tested without a GPU.

What names a device of CUDA gets the CPU: factories, `to`, `cuda()`, modules, meshes, symmetric
memory, and process groups of NCCL, which become those of `symm_cp`. Streams and events do nothing,
since all work is done when a call returns. By torch's own means: a `TorchFunctionMode`, and
functions of `torch.cuda` that are replaced. Tensors say, truly, that they are on the CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

_CUDA = re.compile(r"cuda(:\d+)?")
_NCCL = re.compile(r"\bnccl\b")


class UnmappedError(NotImplementedError):
    """A test needs what only a GPU has; the plugin skips it, with this text as the reason."""


def _mapped(device: Any) -> Any:
    """Returns the CPU for a device of CUDA, anything else as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and _CUDA.fullmatch(device) else device


class _OnCpu(TorchFunctionMode):
    """Has torch's functions take the CPU for CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:  # programs ask a device for its index
            return func(*args, **(kwargs or {}))
        kwargs = {name: _mapped(value) for name, value in (kwargs or {}).items()}
        if type(kwargs.get("device")) is int:  # the number of a GPU
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*map(_mapped, args), **kwargs)


class _Stream:
    """Work on it is done when the call that issued it has returned."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Event:
    """Happens when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._at - self._at) * 1e3


class _ProcessGroupNCCL:
    """The class of no group: in builds of torch without NCCL functions ask groups for it."""


_PROPERTIES = SimpleNamespace(
    name="CPU in place of a GPU",
    major=9,
    minor=0,
    total_memory=1 << 36,
    multi_processor_count=1,
    is_integrated=False,
    uuid="CPU",
    gcnArchName="",
)


def _unmapped(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnmappedError(f"needs a GPU: {what}")

    return refuse


class _Devices:
    """What stands in for functions and classes of `torch.cuda` and `torch.accelerator`."""

    def __init__(self, count: int, current: int) -> None:
        self._count, self._current, self._stream = count, current, _Stream()

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._current = self._current if index is None else index

    def of_cuda(self) -> dict[str, Any]:
        nothing = lambda *args, **kwargs: None  # noqa: E731
        seed = torch.default_generator.manual_seed
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self._count,
            "current_device": lambda: self._current,
            "get_device_name": lambda device=None: _PROPERTIES.name,
            "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
            "get_device_properties": lambda device=None: _PROPERTIES,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "set_device": self._set_device,
            "synchronize": nothing,
            "empty_cache": nothing,
            "reset_peak_memory_stats": nothing,
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "manual_seed": seed,
            "manual_seed_all": seed,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "current_stream": lambda device=None: self._stream,
            "default_stream": lambda device=None: self._stream,
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
            "Stream": _Stream,
            "Event": _Event,
            "is_current_stream_capturing": lambda: False,
            "CUDAGraph": _unmapped("torch.cuda.CUDAGraph"),
            "graph": _unmapped("torch.cuda.graph"),
            "graph_pool_handle": _unmapped("torch.cuda.graph_pool_handle"),
            "mem_get_info": _unmapped("torch.cuda.mem_get_info"),
        }

    def of_accelerator(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "device_count": lambda: self._count,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: self._current,
            "set_device_index": self._set_device,
            "current_stream": lambda device=None: self._stream,
            "synchronize": lambda device=None: None,
        }


def _taking(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that changes each argument."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(change, args), **{name: change(v) for name, v in kwargs.items()})

    return call


def _without_nccl(argument: Any) -> Any:
    if isinstance(argument, torch.device):  # to which a group of NCCL is bound
        return None
    return _NCCL.sub("symm_cp", argument) if isinstance(argument, str) else argument


def _without_accelerator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that finds no accelerator: Dynamo guards its stream by calls in C++."""

    def call(*args: Any) -> Any:
        with mock.patch.object(torch.accelerator, "is_available", return_value=False):
            return function(*args)

    return call


@contextmanager
def cuda_on_cpu(world_size: int = 1, rank: int = 0) -> Iterator[None]:
    """Inside, programs that ask for CUDA run on the CPU.

    Args:
        world_size: what `torch.cuda.device_count` says.
        rank: what `torch.cuda.current_device` says.

    CUDA graphs and free memory raise `UnmappedError`; kernels in Triton fail as without a GPU.
    """
    import_module("torch._dynamo")  # reads torch.cuda once, and wants to find torch's own functions
    p2p = torch_symm_mem._SymmetricMemory
    with ExitStack() as stack:
        devices = _Devices(world_size, rank)
        for module, functions in (
            (torch.cuda, devices.of_cuda()),
            (torch.accelerator, devices.of_accelerator()),
        ):
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(module, name, function))
        for owner, name, change in (
            (c10d, "_new_process_group_helper", _without_nccl),
            (DeviceMesh, "__init__", _mapped),
            (p2p, "empty_strided_p2p", _mapped),
            (torch_symm_mem, "empty", _mapped),
        ):
            taking = _taking(getattr(owner, name), change)
            if isinstance(owner, type) and name != "__init__":
                taking = staticmethod(taking)  # type: ignore[assignment]
            stack.enter_context(mock.patch.object(owner, name, taking))
        for module in (c10d, torch.distributed):
            stack.enter_context(mock.patch.object(module, "is_nccl_available", return_value=True))
            if not hasattr(module, "ProcessGroupNCCL"):
                nccl = mock.patch.object(module, "ProcessGroupNCCL", _ProcessGroupNCCL, create=True)
                stack.enter_context(nccl)
        streams = import_module("torch._dynamo.variables.streams").SymbolicStreamState
        no_stream = _without_accelerator(streams.__init__)
        stack.enter_context(mock.patch.object(streams, "__init__", no_stream))
        triton = import_module("torch.utils._triton")  # there are no kernels of its for CPUs
        stack.enter_context(mock.patch.object(triton, "has_triton_package", return_value=False))
        stack.enter_context(_OnCpu())
        yield
