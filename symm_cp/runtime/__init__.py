"""Runtimes: each runs schedules on one kind of machine; `api.Runtime` is their interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

import torch

from symm_cp.group.hosts import apart_of, in_test_mode
from symm_cp.group.memory import Group
from symm_cp.runtime.api import BackgroundRuntime, Runtime
from symm_cp.runtime.calls import PatternCall
from symm_cp.runtime.cpu import CpuRuntime
from symm_cp.runtime.exchange import WHOLE_BYTES
from symm_cp.runtime.unfused import UnfusedRuntime

__all__ = [
    "FOR_RANKS_APART",
    "Choose",
    "at_once",
    "background_of",
    "exchanges",
    "of",
    "run",
    "serve",
]

#: Returns the runtime for a group's tensors on a device.
Choose: TypeAlias = Callable[[torch.device, Group], Runtime]
#: Types of torch devices with runtimes of their own, and the functions that return these runtimes.
_served: list[tuple[Container[str], Choose]] = []

_cpu = CpuRuntime()
#: For groups whose ranks work apart and in torch's test mode, whatever device their tensors are on.
FOR_RANKS_APART = UnfusedRuntime()


def serve(types: Container[str], choose: Choose) -> None:
    """Makes `choose` return the runtime for devices of these types; types may be added later."""
    _served.append((types, choose))


def run(call: PatternCall) -> None:
    """Runs the call of a pattern. Collective over its group."""
    of(call.device, call.group).run(call)


def of(device: torch.device, group: Group) -> Runtime:
    """Returns the runtime for tensors on a device and the ranks of a group."""
    if in_test_mode():
        return FOR_RANKS_APART
    for types, choose in _served:
        if device.type in types:
            return choose(device, group)
    return _cpu if apart_of(group, device) is None else FOR_RANKS_APART


def background_of(tensor: torch.Tensor, group: Group) -> BackgroundRuntime:
    """Returns the runtime for background collectives where these are not native."""
    found = of(tensor.device, group)
    assert isinstance(found, BackgroundRuntime), found
    return found


def at_once(
    group: Group, like: torch.Tensor, whole: Sequence[int], most: float = WHOLE_BYTES
) -> bool:
    """Returns whether a tensor of a whole shape is exchanged by `symm_cp.runtime.exchange`.

    It must not be empty, nor take more than `most` bytes.
    """
    return 0 < math.prod(whole) * like.itemsize <= most and exchanges(group, like)


def exchanges(group: Group, like: torch.Tensor) -> bool:
    """Returns whether tensors of a group are exchanged by `symm_cp.runtime.exchange`, if small."""
    return of(like.device, group) is _cpu
