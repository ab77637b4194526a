"""Groups of the backend symm_cp next to the pool's gloo groups, and inputs for tests."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from symm_cp.testing import Setup

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCED = (*FLOATING, *INTEGERS, *COMPLEX, torch.bool)
MOVED = (*REDUCED, *FLOAT8, torch.uint16, torch.uint64)

#: Torch 2.13 renamed these functions; older versions lack the new names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def shared(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks with the backend symm_cp, created once.

    `new_group` would need the pool's other ranks, or the same earlier groups on all these ranks.
    """
    if group not in _groups:
        ranks = dist.get_process_group_ranks(group)
        c10d = dist.distributed_c10d
        ours, _ = c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            "symm_cp",
            c10d._get_default_store(),
            f"symm_cp of {ranks}",
            timeout=Setup().timeout,
        )
        c10d._world.pg_group_ranks[ours] = {rank: index for index, rank in enumerate(ranks)}
        _groups[group] = ours
    return _groups[group]


def fresh(group: dist.ProcessGroup, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """A new group of the same ranks with the backend symm_cp, for ranks of `Ranks.own`."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout, "symm_cp", use_local_synchronization=True)


def small_integers(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Values whose sums and products over four ranks are exact in any dtype; ranks differ."""
    generator = torch.Generator().manual_seed(1234 + rank)
    values = torch.randint(0, 4, shape, generator=generator)
    return values.bool() if dtype is torch.bool else values.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps, in another order of dimensions."""
    room = torch.zeros([2 * size for size in reversed(tensor.shape)], dtype=tensor.dtype)
    view = room[tuple(slice(None, None, 2) for _ in tensor.shape)]
    view = view.permute(tuple(reversed(range(tensor.ndim))))
    view.copy_(tensor)
    assert tensor.numel() < 2 or not view.is_contiguous()
    return view


def gathered(group: dist.ProcessGroup, value: object) -> list[object]:
    """The values of all ranks, gathered through gloo."""
    values: list[object] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def settle(
    how: str, collective: Callable[..., dist.Work | None], *args: object, **kwargs: object
) -> None:
    """Makes a blocking call, or an asynchronous one and waits for its work or future, or polls."""
    work = collective(*args, async_op=how != "sync", **kwargs)
    if how == "sync":
        assert work is None
        return
    assert work is not None
    if how == "async":
        work.wait()
    elif how == "future":
        work.get_future().wait()
    else:
        while not work.is_completed():
            time.sleep(50e-6)  # peers may need this processor
        work.wait()  # raises why it failed
        assert work.is_success()
