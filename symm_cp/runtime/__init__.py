"""Runtimes: each carries out schedules on one kind of machine, with the same functions.

`all_gather_and_consume`, `all_gather_and_combine`, `produce_and_reduce_scatter`,
`consume_and_reduce_scatter`

Slots, their parts, staging memory and partial sums begin at multiples of 64 bytes. Where a shard is
read in place, or in the caller's gathered tensor, it may begin anywhere and have other strides:
kernels whose bits depend on that take it through `symm_cp.alignment.aligned`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import torch

from symm_cp.hosts import hosts_of
from symm_cp.memory import Group
from symm_cp.runtime import cpu, hierarchy

_runtimes: dict[str, ModuleType] = {"cpu": cpu}


def of(tensor: torch.Tensor, group: Group) -> ModuleType:
    """Returns the runtime for the device of a tensor and the ranks of a group."""
    if group.engine is not None and tensor.device.type != "cpu":
        return on(tensor)  # it reaches other hosts
    return on(tensor) if hosts_of(group, tensor.device) is None else hierarchy


def on(tensor: torch.Tensor) -> ModuleType:
    """Returns the runtime for the device of a tensor, of ranks that share memory."""
    kind = tensor.device.type
    found = _runtimes.get(kind)
    if found is None:
        found = _runtimes[kind] = import_module(f"symm_cp.runtime.{kind}")
    return found


@contextmanager
def replaced(kind: str, by: str) -> Iterator[None]:
    """Uses another runtime for tensors on devices of a kind, inside. For tests."""
    before = _runtimes.get(kind)
    _runtimes[kind] = import_module(f"symm_cp.runtime.{by}")
    try:
        yield
    finally:
        del _runtimes[kind]
        if before is not None:
            _runtimes[kind] = before
