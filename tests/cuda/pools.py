"""Symmetric memory as torch's memory pools give it: at another offset on each rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

_STEP = 512  # what caching allocators align blocks to
_empty = symm_mem.empty


def at(offset: int, *shape: int, dtype: torch.dtype = torch.float32, room: int = 0) -> torch.Tensor:
    """Returns a tensor of its own storage, `offset` bytes into symmetric memory.

    The memory is at least `room` bytes larger than the tensor, to hold others.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    segment = _empty(max(offset, room) + nbytes + 1, dtype=torch.uint8, device="cpu")
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    block = torch.frombuffer(segment.numpy(), dtype=torch.uint8, offset=offset, count=nbytes)
    return block.view(dtype).view(shape)


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """As `symm_mem.empty`, at an offset that depends on the rank."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    wanted = torch.get_default_dtype() if dtype is None else dtype
    room = _STEP * (1 + dist.get_world_size())  # the same on all ranks
    return at(_STEP * (1 + dist.get_rank()), *shape, dtype=wanted, room=room)
