"""Memory for the results of ops on CPU: large results reuse the memory of freed ones.

Fresh memory costs more than a transfer: the kernel clears each page and maps it at the first
access. So memory of freed results of at least 1 MiB is kept, in huge pages where the system has
them, for the next result of about that size (csrc/memory/blocks.h). The tensors behave like all
others.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from symm_cp import native

# Bytes from which on results come from the pool; csrc/memory/pool.h has the same number. Smaller
# results come from torch's allocator: with a smaller number the pool would hold many small blocks.
_POOLED_BYTES = 1 << 20


class ResultMemory(NamedTuple):
    """Memory of results in this process, in bytes: in use, cached, and the most to cache."""

    in_use: int
    kept: int
    limit: int


def new_result(
    like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns an empty contiguous tensor on the device of `like`. For kernels, not fake ones."""
    dtype = dtype or like.dtype
    if math.prod(shape) * dtype.itemsize < _POOLED_BYTES or like.device.type != "cpu":
        return like.new_empty(tuple(shape), dtype=dtype)
    native.load()
    return torch.ops.symm_cp.new_result.default(like, shape, dtype)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if it is contiguous, else a contiguous copy. For kernels."""
    if tensor.is_contiguous():
        return tensor
    return copied(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy. For kernels."""
    return new_result(tensor, tensor.shape).copy_(tensor)


def result_memory() -> ResultMemory:
    """Returns how much memory the results of this process take; raises `BuildError`."""
    numbers = (ctypes.c_int64 * len(ResultMemory._fields))()
    native.load().symm_cp_result_memory(numbers)
    return ResultMemory(*numbers)


def empty_cache() -> int:
    """Releases memory of freed results to the system; returns the number of bytes released.

    Ops on CPU keep memory of freed results of at least 1 MiB for later results, up to a bound
    (`SYMM_CP_KEEP_MIB`). Results that are in use stay. Not collective; call it from any thread.

    Raises `BuildError` without the native part. Like `torch.cuda.empty_cache`.
    """
    released: int = native.load().symm_cp_empty_cache()
    return released
