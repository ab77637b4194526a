"""Signals between ranks by kernels of one warp, where streams cannot signal themselves.

A flag is an int32 word in the memory of the rank that waits for it; only one rank writes it. A
signal releases, and a wait acquires, at system scope: writes of the signalling rank's stream before
the signal are visible after the wait. One launch handles several peers, a thread for each.

No argument that changes from call to call is specialised: a compilation in the middle of training
would hold up all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARP = 32
#: The distance between the flags of two ranks, in words; wire.FLAG_BYTES.
_PITCH = tl.constexpr(16)


@triton.jit(do_not_specialize=["offset", "first", "count", "world_size", "value"])
def signal_kernel(bases, offset, first, count, world_size, value, BLOCK: tl.constexpr):
    """Stores `value` `offset` bytes behind the addresses of `count` ranks from `first` on."""
    at = tl.arange(0, BLOCK)
    inside = at < count
    base = tl.load(bases + (first + at) % world_size, mask=inside, other=0)
    flags = (base + offset).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, value, mask=inside, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first", "count", "world_size", "needed"])
def wait_kernel(flags, first, count, world_size, needed, RESET: tl.constexpr, BLOCK: tl.constexpr):
    """Returns when the flags of `count` ranks from `first` on are >= `needed` (mod 2^32)."""
    at = tl.arange(0, BLOCK)
    inside = at < count
    mine = flags + (first + at) % world_size * _PITCH
    missing = count
    while missing > 0:
        seen = tl.atomic_add(mine, 0, mask=inside, sem="acquire", scope="sys")
        missing = tl.sum((inside & (seen - needed < 0)).to(tl.int32))
    if RESET:
        # Peers raise these flags again only after a later signal from this rank.
        tl.atomic_xchg(mine, 0, mask=inside, sem="relaxed", scope="sys")


def signal(bases: torch.Tensor, offset: int, first: int, count: int, value: int) -> None:
    """Raises a flag at `count` ranks from `first` on (mod W) to `value`.

    `bases` (W,), int64, are the addresses here of all ranks' memory, `offset` is where the flag
    lies in each, in bytes.
    """
    W = len(bases)
    signal_kernel[(1,)](
        bases, offset, first, count, W, value, BLOCK=_block(W), num_warps=1, enable_fp_fusion=True
    )


def wait(flags: torch.Tensor, first: int, count: int, needed: int, *, reset: bool) -> None:
    """Waits until the flags of `count` ranks from `first` on (mod W) are at least `needed`.

    `flags` (W,), int32, are the flags of all ranks in this rank's memory, a cache line each. With
    `reset` they are set to 0 afterwards.
    """
    W = len(flags)
    wait_kernel[(1,)](
        flags, first, count, W, needed, RESET=reset, BLOCK=_block(W), num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip


def _block(world_size: int) -> int:
    return max(_WARP, triton.next_power_of_2(world_size))
