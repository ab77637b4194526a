"""Patterns over the process group, for groups whose ranks work apart (`group/hosts.py`).

They run as on CPU, with kernels before or after a collective of the process group (gloo, NCCL) in
place of the exchange (process_group.py), on any kind of device. So nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp.group.memory import Group
from symm_cp.runtime import process_group
from symm_cp.runtime.api import BackgroundRuntime
from symm_cp.runtime.calls import BoxesCall, Collective, GatherCall
from symm_cp.runtime.cpu import CpuRuntime, consume_at_once
from symm_cp.tensors.shards import Split


class UnfusedRuntime(CpuRuntime, BackgroundRuntime):
    """The runtime for groups whose ranks work apart, on any kind of device."""

    def _gather(self, call: GatherCall) -> None:
        with call.group.own_lock():
            consume_at_once(call)

    def _exchange_boxes(self, call: BoxesCall) -> None:
        self._exchange(call.by_messages())

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `BackgroundRuntime`. Uses the process group's own collective."""
        return _OfProcessGroup(
            lambda group, tensor: process_group.all_gather(tensor, split, group.name)
        )

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """Like `prepare_all_gather`."""
        reduce_op = "avg" if mean else "sum"
        return _OfProcessGroup(
            lambda group, tensor: process_group.reduce_scatter(tensor, reduce_op, split, group.name)
        )


class _OfProcessGroup:
    """A collective of torch's process group, which runs in the background."""

    def __init__(self, start: Callable[[Group, torch.Tensor], torch.Tensor]) -> None:
        self._start = start

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`. With `out` it is complete when this returns."""
        result = self._start(group, tensor)
        return result if out is None else out.copy_(funcol.wait_tensor(result))
