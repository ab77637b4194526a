"""Low-contention collectives on CUDA: copy engines move the bytes, the caller goes on.

They run in the channel "async", on a stream of its own. The caller's stream waits only until its
input has been read (for a symmetric input not even that: leave it alone until the transfer was
waited for).
"""

from __future__ import annotations

import datetime
from functools import lru_cache
from typing import Any

import torch
from torch._C._distributed_c10d import Work, _register_work

from symm_cp.devices import Device, device_for, workspace
from symm_cp.memory import Group
from symm_cp.runtime.cuda import Mode, peers_in_place
from symm_cp.runtime.launch import Kernel, Launch, lower
from symm_cp.runtime.program import Extent
from symm_cp.runtime.reduce import add_rows
from symm_cp.schedule import staged


class _Transfer(Work):
    """What `wait_tensor` waits for: the current stream then follows the transfer."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._ended = device.copies_ended("async")

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._ended.wait()
        return True


@lru_cache(maxsize=512)
def _gather_launch(rank: int, ranks: int, nbytes: int, mode: Mode, in_place: bool) -> Launch:
    shard = (Extent.even(0, nbytes),)
    binding = {
        "input": shard,
        "output": (Extent.even(1, nbytes, ranks),),
        "symmetric": (Extent.even(2, nbytes),),
    }
    schedule = staged.background_gather(rank, ranks, in_place=in_place, slots=mode.slots)
    slots = dict.fromkeys(range(ranks), (Extent.even(None, nbytes),))
    return lower(schedule, binding, slots, by_kernels=mode.by_kernels, joined=False)


@lru_cache(maxsize=512)
def _scatter_launch(rank: int, ranks: int, chunk: int, mode: Mode, in_place: bool) -> Launch:
    full = (Extent.even(0, chunk, ranks),)
    binding = {
        "input": full,
        "partials": (Extent.even(1, chunk, ranks),),
        "symmetric": (Extent.even(2, chunk, ranks),),
    }
    schedule = staged.background_scatter(rank, ranks, in_place=in_place, slots=mode.slots)
    slots = dict.fromkeys(range(ranks), (Extent.even(None, chunk, ranks),))
    return lower(schedule, binding, slots, by_kernels=mode.by_kernels, joined=False)


def _start(
    group: Group,
    tensor: torch.Tensor,
    launch: Any,
    nbytes: int,
    target: torch.Tensor,
    result: torch.Tensor,
    kernels: dict[str, Kernel],
    what: bytes,
) -> torch.Tensor:
    """Runs `launch(rank, ranks, nbytes, mode, in_place)` on the tensor and another operand."""
    device = device_for(group, tensor.device)
    mode = Mode.of(device)
    source = tensor.contiguous()
    with group.lock, device.guard():
        addresses = peers_in_place(group, device, [tensor], mode, what)
        room = 0 if addresses is not None else source.numel() * source.element_size()
        space = workspace(group, device, "async", room)
        lowered: Launch = launch(group.rank, group.world_size, nbytes, mode, addresses is not None)
        operands = [source.data_ptr(), target.data_ptr(), *(addresses or ())]
        capturing = mode.slots == 1
        lowered.run(space, space.next_epoch(), operands, kernels, capturing=capturing, what=what)
        device.used_by_copies("async", source, target, result)
        _register_work(result, _Transfer(device))
    return result


def all_gather(group: Group, tensor: torch.Tensor, what: bytes) -> torch.Tensor:
    """Starts an all-gather along the first dimension; `wait_tensor` completes the result."""
    output = tensor.new_empty((tensor.shape[0] * group.world_size, *tensor.shape[1:]))
    nbytes = tensor.numel() * tensor.element_size()
    return _start(group, tensor, _gather_launch, nbytes, output, output, {}, what)


def reduce_scatter(group: Group, tensor: torch.Tensor, what: bytes, *, mean: bool) -> torch.Tensor:
    """Starts a reduce-scatter along the first dimension; `wait_tensor` completes the result."""
    ranks = group.world_size
    output = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
    partials = tensor.new_empty((ranks, *output.shape))
    kernels: dict[str, Kernel] = {"reduce": lambda _: add_rows(partials, output, mean=mean)}
    nbytes = output.numel() * output.element_size()
    return _start(group, tensor, _scatter_launch, nbytes, partials, output, kernels, what)
