"""Runtimes: each carries out schedules on one kind of machine, with the same functions.

`all_gather_and_consume`, `all_gather_and_combine`, `produce_and_reduce_scatter`,
`consume_and_reduce_scatter`

Slots, their parts, staging memory and partial sums begin at multiples of 64 bytes. Where a shard is
read in place, or in the caller's gathered tensor, it may begin anywhere and have other strides:
kernels whose bits depend on that take it through `symm_cp.alignment.aligned`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from symm_cp.devices import has_streams, spans_hosts
from symm_cp.hosts import hosts_of
from symm_cp.memory import Group
from symm_cp.runtime import cpu, cuda, hierarchy


def of(tensor: torch.Tensor, group: Group) -> ModuleType:
    """Returns the runtime for the device of a tensor and the ranks of a group."""
    if spans_hosts(group, tensor.device):
        return on(tensor)
    return on(tensor) if hosts_of(group, tensor.device) is None else hierarchy


def on(tensor: torch.Tensor) -> ModuleType:
    """Returns the runtime for the device of a tensor, of ranks that share memory."""
    return cuda if has_streams(tensor.device) else cpu
