"""Stand-ins for `torch.cuda` and `torch.accelerator` on CPU: see gpu_programs.py.

`Devices.of_cuda` and `Devices.of_accelerator` are tables of names and stand-ins. A public function
or class in neither a table nor `_AS_IT_IS` raises `UnmappedError`.
"""

from __future__ import annotations

import sys
import threading
import time
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch


class UnmappedError(NotImplementedError, unittest.SkipTest):
    """A test needs a feature of GPUs only; it is skipped, with this text as the reason."""


def unmapped(name: str) -> Callable[..., Any]:
    """Returns a function that raises `UnmappedError`: only a GPU has `name`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnmappedError(f"needs a GPU: {name}")

    return refuse


def unmapped_class(name: str) -> type:
    """Returns a class that can be named, as in `isinstance`, but not instantiated."""
    return type(name.rpartition(".")[2], (), {"__new__": unmapped(name)})


def standing_for(original: type, make: Callable[..., Any]) -> type:
    """Returns a class that constructs by `make`, and checks `isinstance` against `original`."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Meta(original.__name__, (), {"__module__": original.__module__})


#: Names in `torch.cuda` and `torch.accelerator` that work without a GPU, or through a stand-in.
_AS_IT_IS = {
    *("CudaError", "DeferredCudaCallError", "cudaStatus", "init"),
    *("device_of", "get_arch_list", "get_gencode_flags", "memory_summary"),
}
_DATA_TYPES = (
    *("BFloat16", "Bool", "Byte", "Char", "Double"),
    *("Float", "Half", "Int", "Long", "Short"),
)
_COMPLEX_TYPES = ("ComplexDouble", "ComplexFloat")
_SUBMODULES = {
    "torch.cuda": ("graphs", "memory", "profiler", "random", "streams"),
    "torch.accelerator": ("memory",),
}


class _Stream:
    """A stream whose work is done when the call that issued it has returned."""

    cuda_stream = device_index = 0
    device_type = 1  # CUDA
    device = torch.device("cpu")
    _last_id = 0
    _by_id: ClassVar[WeakValueDictionary[int, _Stream]] = WeakValueDictionary()

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        _Stream._last_id += 1
        self._id, self.priority = _Stream._last_id, priority
        self._outer: list[_Stream] = []

    @property
    def stream_id(self) -> int:
        """A number by which the stream can be set."""
        _Stream._by_id[self._id] = self
        return self._id

    def __enter__(self) -> _Stream:
        self._outer.append(torch.cuda.current_stream())  # type: ignore[arg-type]
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *args: object) -> None:
        torch.cuda.set_stream(self._outer.pop())  # type: ignore[arg-type]

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

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1


class _Event:
    """An event that happens when it is recorded."""

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


class _StreamContext:
    """Inside, `torch.cuda.current_stream` returns the stream; None changes nothing."""

    def __init__(self, stream: _Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *args: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class _Device:
    """Inside, `device` is the current device; a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self.idx, self.prev_idx = -1 if index is None else index, -1

    def __enter__(self) -> None:
        self.prev_idx = torch.cuda.current_device()
        if self.idx >= 0:
            torch.cuda.set_device(self.idx)

    def __exit__(self, *args: object) -> None:
        torch.cuda.set_device(self.prev_idx)


class _CudaRuntime:
    """The functions of the CUDA runtime that begin and end a profile; nothing else."""

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise UnmappedError(f"needs a GPU: torch.cuda.cudart().{name}")


#: For `torch.cuda.nvtx`: ranges that nobody records.
NVTX = SimpleNamespace(
    rangePushA=lambda message: 0,
    rangePop=lambda: 0,
    rangeStartA=lambda message: 0,
    rangeEnd=lambda range_id: None,
    deviceRangeStart=lambda message, stream: 0,
    deviceRangeEnd=lambda range_handle, stream: None,
    markA=lambda message: None,
)

_PROPERTIES = SimpleNamespace(
    name="CPU in place of a GPU",
    major=9,
    minor=0,
    total_memory=1 << 36,
    multi_processor_count=1,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=1 << 16,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    clock_rate=1_000_000,
    is_integrated=False,
    is_multi_gpu_board=False,
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
    uuid="CPU",
    gcnArchName="",
)


def _nothing() -> Callable[..., None]:
    """Returns a new function, since Dynamo tells functions apart by identity."""
    return lambda *args, **kwargs: None


class Devices(threading.local):
    """`count` devices, of which each thread has chosen one, and one of its streams."""

    def __init__(self, count: int, current: int, default_stream: _Stream) -> None:
        self._count, self._current = count, current
        self._default_stream = self._stream = default_stream

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._current = self._current if index is None else index

    def _exchange_device(self, device: int) -> int:
        previous = self._current
        if device >= 0:
            self._current = device
        return previous

    def _set_stream(self, stream: _Stream | None) -> None:
        self._stream = self._stream if stream is None else stream

    def of_bindings(self) -> dict[str, Any]:
        """Returns the stand-ins for functions of `torch._C` that torch and its tests call."""

        def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
            self._stream = _Stream._by_id[stream_id]

        return {
            "_cuda_setStream": set_stream,
            "_cuda_setDevice": lambda device: self._set_device(device),
            "_cuda_getDevice": lambda: self._current,
            "_cuda_synchronize": _nothing(),
            "_cuda_clearCublasWorkspaces": _nothing(),
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        }

    def of_cuda(self) -> dict[str, Any]:
        """Returns the stand-ins for names of `torch.cuda`."""
        return {
            **self._selection(),
            **self._properties(),
            **_memory(),
            **self._random(),
            **self._streams(),
            **_types(),
            "cudart": _CudaRuntime,
            "check_error": _nothing(),
            "_sleep": _nothing(),
        }

    def of_accelerator(self) -> dict[str, Any]:
        """Returns the stand-ins for names of `torch.accelerator`."""
        memory = _memory()
        return {
            "is_available": lambda: True,
            "device_count": lambda: self._count,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: self._current,
            "current_device_idx": lambda: self._current,
            "set_device_index": self._set_device,
            "set_device_idx": self._set_device,
            "device_index": _Device,
            "current_stream": lambda device=None: self._stream,
            "set_stream": self._set_stream,
            "synchronize": _nothing(),
            "empty_host_cache": _nothing(),
            **{name: memory[name] for name in torch.accelerator.__all__ if name in memory},
        }

    def _selection(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self._count,
            "current_device": lambda: self._current,
            "set_device": self._set_device,
            "_exchange_device": self._exchange_device,
            "_maybe_exchange_device": self._exchange_device,
            "device": _Device,
            "can_device_access_peer": lambda device, peer: True,
            "synchronize": _nothing(),
        }

    def _properties(self) -> dict[str, Any]:
        return {
            "get_device_name": lambda device=None: _PROPERTIES.name,
            "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
            "get_device_properties": lambda device=None: _PROPERTIES,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "is_tf32_supported": lambda: True,
        }

    def _random(self) -> dict[str, Any]:
        """Returns stand-ins by which all devices use the generator of the CPU."""
        cpu = torch.default_generator  # Dynamo has rules for its methods: these are other functions
        return {
            "default_generators": (cpu,) * self._count,
            "manual_seed": lambda seed: cpu.manual_seed(seed),
            "manual_seed_all": lambda seed: cpu.manual_seed(seed),
            "seed": lambda: cpu.seed(),
            "seed_all": lambda: cpu.seed(),
            "initial_seed": lambda: cpu.initial_seed(),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()] * self._count,
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "set_rng_state_all": lambda states: torch.set_rng_state(next(iter(states))),
        }

    def _streams(self) -> dict[str, Any]:
        return {
            "Stream": _Stream,
            "ExternalStream": _Stream,
            "Event": _Event,
            "StreamContext": _StreamContext,
            "stream": _StreamContext,
            "current_stream": lambda device=None: self._stream,
            "default_stream": lambda device=None: self._default_stream,
            "set_stream": self._set_stream,
            "get_stream_from_external": lambda pointer, device=None: _Stream(),
            "is_current_stream_capturing": lambda: False,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": _nothing(),
        }


def devices(count: int, current: int) -> Devices:
    """Returns devices on whose one stream all threads begin."""
    return Devices(count, current, _Stream())


def _memory() -> dict[str, Any]:
    """Returns stand-ins that report no byte in use, whatever a program has allocated."""
    in_use = ("memory_allocated", "memory_reserved", "memory_cached")
    return {
        **{name: lambda device=None: 0 for name in in_use},
        **{f"max_{name}": lambda device=None: 0 for name in in_use},
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
        "memory_stats": lambda device=None: defaultdict(int, num_alloc_retries=0, num_ooms=0),
        "memory_stats_as_nested_dict": lambda device=None: {},
        "host_memory_stats": lambda: defaultdict(int),
        "host_memory_stats_as_nested_dict": dict,
        "reset_peak_memory_stats": _nothing(),
        "reset_accumulated_memory_stats": _nothing(),
        "reset_peak_host_memory_stats": _nothing(),
        "reset_accumulated_host_memory_stats": _nothing(),
        "reset_max_memory_allocated": _nothing(),
        "reset_max_memory_cached": _nothing(),
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "set_per_process_memory_fraction": _nothing(),
    }


def _types() -> dict[str, Any]:
    """The legacy types of tensors and storages."""
    names = [f"{data}Tensor" for data in _DATA_TYPES]
    names += [f"{data}Storage" for data in (*_DATA_TYPES, *_COMPLEX_TYPES)]
    return {name: getattr(torch, name) for name in names}


def _rest(module: ModuleType, mapped: dict[str, Any]) -> dict[str, Any]:
    """Returns stand-ins for the public functions and classes that are not mapped."""
    rest: dict[str, Any] = {}
    for name in module.__all__:
        original = getattr(module, name, None)
        if name in mapped or name in _AS_IT_IS or not callable(original):
            continue
        make = unmapped_class if isinstance(original, type) else unmapped
        rest[name] = make(f"{module.__name__}.{name}")
    if module is torch.cuda:
        memory = ("_record_memory_history", "_snapshot", "_dump_snapshot")
        rest |= {name: unmapped(f"torch.cuda.memory.{name}") for name in memory}
    return rest


def stand_ins(devices: Devices) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields modules, names in them and the stand-ins for these."""
    for module, mapped in (
        (torch.cuda, devices.of_cuda()),
        (torch.accelerator, devices.of_accelerator()),
    ):
        submodules = [
            sys.modules[f"{module.__name__}.{name}"] for name in _SUBMODULES[module.__name__]
        ]
        for name, stand_in in (mapped | _rest(module, mapped)).items():
            # Functions of torch.cuda.memory look each other up in their own module.
            for owner in (module, *submodules):
                if hasattr(owner, name):
                    yield owner, name, stand_in
    for name, stand_in in devices.of_bindings().items():
        yield torch._C, name, stand_in
    # Constructors do not make instances of torch's classes, which Dynamo would trace.
    yield torch, "Stream", standing_for(torch.Stream, _Stream)
    yield torch, "Event", standing_for(torch.Event, _Event)
