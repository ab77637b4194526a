"""A GPU that does nothing: `loopback.py --driver idle` measures the host's time to issue an op.

What is stubbed, and nothing else:

- the driver: a library in which each function that csrc/cuda/driver.cpp looks up returns 0 at once;
- torch.cuda: streams, events, the current device and stream are constants in Python;
- tensors are on CPU and tiny: torch's own CPU kernels run, on matrices that take next to no time,
  behind torch's dispatcher and shape checks. Launching a kernel on a GPU takes longer than that;
- attention, the products of float8 matrices and Triton kernels: Python functions that return at
  once. Only their dispatch is left out of the times, except for the products.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.loopback_device import Loopback, build_driver, driver_functions
from symm_cp.cuda import kernels, plans
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.ops.attention import kernels as attention_kernels

_SOURCE = """
#include <cstddef>
#include <cstdlib>
extern "C" {
int cuMemAllocHost_v2(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return *memory == nullptr;
}
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
void* symm_cp_hosted_stream(int device) { return reinterpret_cast<void*>(1); }
void* symm_cp_hosted_use(void* stream) { return stream; }
"""
_BY_HAND = ("cuMemAllocHost_v2", "cuDriverGetVersion")


def _build(folder: Path) -> str:
    """Compiles the driver; returns the library's path."""
    others = (name for name in driver_functions() if name not in _BY_HAND)
    return build_driver(
        folder, "idle", "\n".join([_SOURCE, *(f"int {n}() {{ return 0; }}" for n in others), "}\n"])
    )


class IdleStream:
    """A stream, or an event in it."""

    cuda_stream = 1  # not the null stream, which takes no batches

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait(self) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True


class IdleDevice(Loopback, CudaDevice):
    """Acts as a CUDA device for ops on CPU tensors."""

    torch_type, dispatch_key = "cpu", "CPU"

    def __init__(self, driver: str) -> None:
        super().__init__(torch.device("cpu", 0))
        self.driver = driver

    def polls(self) -> bool:
        """Returns False: no kernels run here that wait for streams, or for which streams wait."""
        return False

    def multiprocessors(self) -> int:
        """Returns the number of an H100's."""
        return 132

    def synchronize(self) -> None:
        """Does nothing."""


@cache
def _attended(shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, E = shape
    return torch.zeros(B, S, H, E, dtype=dtype).transpose(1, 2), torch.zeros(shape[:3])


def _attention(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return plans.in_python(lambda given: _attended(given[0].shape, given[0].dtype), [query])


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def attend(given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_query, of_keys = (_attended(t.shape, t.dtype)[0] for t in given)
        return of_query, of_keys, of_keys

    return plans.in_python(attend, [query, key])


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _scaled(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out


@contextlib.contextmanager
def idle() -> Iterator[IdleDevice]:
    """Inside, ops on CPU tensors issue what they would for a GPU, and it is carried out by none."""
    stream = IdleStream()
    stubs: dict[str, Callable[..., object]] = {
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
            mock.patch.object(attention_kernels, "_cpu", _attention),
            mock.patch.object(attention_kernels, "_cpu_backward", _attention_backward),
            mock.patch.object(kernels, "merge_attention", _nothing),
            mock.patch.object(kernels, "add_rows", _nothing),
        ]
        for patch in patches:
            stack.enter_context(patch)
        yield device
