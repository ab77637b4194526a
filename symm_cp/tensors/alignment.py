"""Aligns the buffers of kernels to 64 bytes, so that no result depends on an address.

Matmul libraries may sum in a different order when an operand's alignment or leading dimension
changes: MKL does on AMD processors (the last bits of a tenth of small float32 products change when
an operand moves by a few elements), and cuBLAS chooses kernels by alignment. torch allocates at
multiples of 64 bytes. So every buffer that holds a rank's shard begins at one: slots, their parts,
staging memory and scratch. Where a shard is not aligned (a view of the caller's, a chunk of a
gathered tensor with odd rows), kernels get a copy.

`SYMM_CP_DEBUG_OFFSETS` moves these buffers to other multiples of 64 bytes, so that tests detect
results that depend on more than that.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from symm_cp import env
from symm_cp.tensors.results import new_result

#: The alignment of buffers in bytes: a cache line, and the alignment of torch's CPU allocations.
ALIGN = 64

#: Debug offsets are multiples of this, up to a page; tests set it to 8 to check that they fail.
offset_unit = ALIGN
_OFFSETS = 64
_scratches = itertools.count()


def padded(nbytes: int) -> int:
    """Returns a number of bytes, rounded up to the alignment."""
    return -(-nbytes // ALIGN) * ALIGN


def part_offsets(nbytes: Sequence[int]) -> tuple[int, ...]:
    """Returns the offset of each part of a buffer; the last entry is the size of the buffer."""
    return (0, *itertools.accumulate(padded(size) for size in nbytes))


def debug_offset(*key: object) -> int:
    """Returns the bytes by which a buffer is moved: 0, or with `SYMM_CP_DEBUG_OFFSETS` a hash.

    The same key gives the same offset on all ranks.
    """
    seed = env.debug_offsets()
    if seed is None:
        return 0
    return zlib.crc32(repr((seed, key)).encode()) % _OFFSETS * offset_unit


def scratch(like: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Returns `nbytes` bytes of aligned memory on the device of a tensor."""
    if env.debug_offsets() is None:
        return new_result(like, (nbytes,), torch.uint8)
    offset = debug_offset("scratch", next(_scratches))
    return new_result(like, (offset + nbytes,), torch.uint8)[offset:]


def scratch_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    """Returns `count` empty tensors in scratch memory, stacked, each contiguous and aligned."""
    pitch = padded(like.numel() * like.element_size())
    numbers = scratch(like, count * pitch).view(like.dtype)
    strides = (pitch // like.element_size(), *contiguous_strides(like.shape))
    return numbers.as_strided((count, *like.shape), strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides that torch gives a new tensor of a shape."""
    return _strides(tuple(shape))


@lru_cache(maxsize=512)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def aligned(tensor: torch.Tensor, to: int = ALIGN) -> torch.Tensor:
    """Returns a contiguous tensor of the same values at a multiple of `to` bytes, at most `ALIGN`.

    Copies only if needed. Dimensions of length 1 get the strides of a new tensor: matmuls derive
    from strides which operand is transposed.
    """
    if tensor.data_ptr() % to != 0 or not tensor.is_contiguous():
        memory = scratch(tensor, tensor.numel() * tensor.element_size())
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    strides = contiguous_strides(tensor.shape) if 1 in tensor.shape else tensor.stride()
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
