"""A GPU that does nothing, for measuring what the host issues: see host_time.py.

What is stubbed, and nothing else:

- the driver: a library in which each function that csrc/cuda/driver.cpp looks up returns 0 at once;
- torch.cuda: streams, events, the current device and stream are constants in Python;
- the peers: there are none. A "fake" process group has the ranks, every rank's workspace is this
  rank's memory, and nobody answers;
- tensors are on CPU and tiny: torch's own CPU kernels run, on matrices that take next to no time,
  behind torch's dispatcher and shape checks. Launching a kernel on a GPU takes longer than that;
- attention, the products of float8 matrices and Triton kernels: Python functions that return at
  once. Only their dispatch is left out of the times, except for the products.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from benchmarks.one_rank import AloneDevice, answered, build_driver, driver_functions
from symm_cp import cuda
from symm_cp.cuda import kernels, plans
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from symm_cp.ops.attention import kernels as attention_kernels

_SOURCE = """
#include <cstddef>
#include <cstdint>
#include <cstdlib>
namespace { thread_local int64_t calls = 0; }
extern "C" {
int64_t idle_calls() { int64_t count = calls; calls = 0; return count; }
int cuMemAllocHost_v2(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return *memory == nullptr;
}
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
void* symm_cp_hosted_stream(int device) { return reinterpret_cast<void*>(1); }
"""
_BY_HAND = ("cuMemAllocHost_v2", "cuDriverGetVersion")


def _build(folder: Path) -> str:
    """Compiles the driver; returns the library's path."""
    others = (name for name in driver_functions() if name not in _BY_HAND)
    idle = (f"int {name}() {{ ++calls; return 0; }}" for name in others)
    return build_driver(folder, "idle", "\n".join([_SOURCE, *idle, "}", ""]))


class IdleStream:
    """A stream, or an event in it."""

    cuda_stream = 1  # not the null stream, which takes no batches

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait(self) -> None: ...
    def record(self, stream: object = None) -> None: ...


class _Workspace(cuda.DeviceWorkspace):
    """A workspace that every rank has at the same address."""

    def allocate(self, group: memory.Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory, [memory.data_ptr()] * self.world_size


class IdleDevice(AloneDevice, CudaDevice):
    """Acts as a CUDA device for ops on CPU tensors."""

    workspaces = _Workspace

    torch_type, dispatch_key = "cpu", "CPU"

    def __init__(self, driver: str) -> None:
        super().__init__(torch.device("cpu", 0))
        self.driver = driver
        self.kernels = IdleKernels()
        self.driver_calls: Callable[[], int] = ctypes.CDLL(driver).idle_calls

    def polls(self) -> bool:
        """Returns False: no kernels run here that wait for streams, or for which streams wait."""
        return False

    def synchronize(self) -> None:
        """Does nothing."""

    def used_by_copies(self, channel: str, *tensors: torch.Tensor) -> None:
        """Does nothing: CPU tensors know no streams."""


class IdleSymmetricMemory:
    """A handle of torch's symmetric memory; all ranks' buffers are one."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.barriers = 0
        self._memory = torch.empty(1 << 20, dtype=torch.uint8)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Counts barriers."""
        self.barriers += 1

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Returns a tensor over memory of a rank."""
        numbers = self._memory.view(dtype)
        return numbers.as_strided(sizes, torch.empty(sizes, device="meta").stride(), storage_offset)


@cache
def _attended(shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, E = shape
    return torch.zeros(B, S, H, E, dtype=dtype).transpose(1, 2), torch.zeros(shape[:3])


class IdleKernels:
    """The kernels that are stubbed; `count` says how many were called."""

    count = 0

    def attention(
        self, query: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the place of attention on a tile."""

        def attend(given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            self.count += 1
            return _attended(given[0].shape, given[0].dtype)

        return plans.in_python(attend, [query])

    def attention_backward(
        self, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Takes the place of the gradient of attention on a tile."""

        def attend(given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self.count += 1
            query, key = given
            of_keys = _attended(key.shape, key.dtype)[0]
            return _attended(query.shape, query.dtype)[0], of_keys, of_keys

        return plans.in_python(attend, [query, key])

    def triton(self, *_: Any, **__: Any) -> None:
        """Takes the place of a kernel in Triton."""
        self.count += 1


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _scaled(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out


@contextlib.contextmanager
def idle() -> Iterator[IdleDevice]:
    """Inside, ops on CPU tensors issue what they would for a GPU, and it is carried out by none."""
    stream = IdleStream()
    stubs = {
        "Stream": IdleStream,
        "Event": IdleStream,
        "stream": lambda chosen: chosen,
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "_sleep": _nothing,
    }
    # Uninitialised memory may hold denormal numbers, with which products take twice as long.
    torch.set_flush_denormal(True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        device = IdleDevice(_build(Path(folder)))
        scaled = torch.library.Library("aten", "IMPL")
        stack.callback(scaled._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel already
            scaled.impl("_scaled_mm.out", _scaled, "CPU", allow_override=True)
        patches: list[Any] = [
            *(mock.patch.object(torch.cuda, name, stub) for name, stub in stubs.items()),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 1, create=True),
            mock.patch.object(attention_kernels, "_cpu", device.kernels.attention),
            mock.patch.object(
                attention_kernels, "_cpu_backward", device.kernels.attention_backward
            ),
            mock.patch.object(kernels, "merge_attention", device.kernels.triton),
            mock.patch.object(kernels, "add_rows", device.kernels.triton),
            mock.patch.object(torch_symm_mem, "rendezvous", _nothing),
        ]
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(answered())
        stack.enter_context(cuda.replaced(torch.device("cpu"), device))
        yield device


@contextlib.contextmanager
def torchs_workspace(ranks: int) -> Iterator[IdleSymmetricMemory]:
    """Inside, torch's own pipelines run over a workspace of no peers."""
    shared = IdleSymmetricMemory(ranks)
    with mock.patch.object(torch_symm_mem, "get_symm_mem_workspace", lambda *_, **__: shared):
        yield shared
