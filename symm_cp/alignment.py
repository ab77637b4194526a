"""Where the buffers of kernels begin: at multiples of 64 bytes, so that bits depend on no address.

Matmul libraries may add in another order when an operand begins elsewhere or has another leading
dimension: MKL does on AMD processors (the last bits of a tenth of small float32 products change
when an operand moves by a few elements), cuBLAS chooses kernels by alignment. torch allocates at
multiples of 64 bytes. So everything that stands for a rank's shard does, too: slots, their parts,
staging memory and scratch. Where a shard lies elsewhere (a view of the caller's, a chunk of a
gathered tensor whose rows are odd), kernels get a copy.

`SYMM_CP_DEBUG_OFFSETS` moves these buffers to other multiples of 64 bytes, so that tests notice
what depends on more than that.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch

from symm_cp import env

#: Where buffers begin, in bytes: a cache line, and as torch's own allocations on CPU do.
ALIGN = 64

#: Debug offsets are multiples of this, up to a page. Tests set it to 8 to see whether they notice.
offset_unit = ALIGN
_OFFSETS = 64
_scratches = itertools.count()


def padded(nbytes: int) -> int:
    """Returns a number of bytes, rounded up to where the next buffer may begin."""
    return -(-nbytes // ALIGN) * ALIGN


def part_offsets(nbytes: Sequence[int]) -> tuple[int, ...]:
    """Returns where each part of a buffer begins; the last entry is the room that they take."""
    return (0, *itertools.accumulate(padded(size) for size in nbytes))


def debug_offset(*key: object) -> int:
    """Returns the bytes by which a buffer is moved: 0, or with `SYMM_CP_DEBUG_OFFSETS` a hash.

    It is the same on all ranks for the same key.
    """
    seed = env.debug_offsets()
    if seed is None:
        return 0
    return zlib.crc32(repr((seed, key)).encode()) % _OFFSETS * offset_unit


def scratch(like: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Returns `nbytes` bytes of aligned memory on the device of a tensor."""
    offset = 0
    if env.debug_offsets() is not None:
        offset = debug_offset("scratch", next(_scratches))
    return like.new_empty(offset + nbytes, dtype=torch.uint8)[offset:]


def scratch_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    """Returns `count` empty tensors like one in scratch memory, each contiguous and aligned."""
    pitch = padded(like.numel() * like.element_size())
    numbers = scratch(like, count * pitch).view(like.dtype)
    strides = (pitch // like.element_size(), *contiguous_strides(like.shape))
    return numbers.as_strided((count, *like.shape), strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides that torch gives a new tensor of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a shard as kernels take it: contiguous and aligned; a copy only where it is not.

    Dimensions of length 1 get the strides of a new tensor: matmuls tell from them which operand
    is transposed.
    """
    if tensor.data_ptr() % ALIGN != 0 or not tensor.is_contiguous():
        memory = scratch(tensor, tensor.numel() * tensor.element_size())
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    strides = contiguous_strides(tensor.shape) if 1 in tensor.shape else tensor.stride()
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
