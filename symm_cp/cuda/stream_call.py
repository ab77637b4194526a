"""The common parts of all pipelines on streams: a call, its workspace, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from symm_cp.cuda import kernels, plans
from symm_cp.cuda.base import DeviceWorkspace
from symm_cp.cuda.debug_calls import agree
from symm_cp.cuda.in_place import any_in_place, found_in_place
from symm_cp.cuda.registry import device_for, kind_for
from symm_cp.cuda.stream_program import Launch
from symm_cp.cuda.workspaces import hold, workspace
from symm_cp.group.memory import Group
from symm_cp.native import wire
from symm_cp.runtime.calls import PatternCall
from symm_cp.runtime.lowering import Kernel
from symm_cp.tensors.alignment import scratch
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.shards import Shards, ViewAt, viewing


def add_rows(rows: torch.Tensor, out: torch.Tensor, *, mean: bool = False) -> None:
    """Writes `rows[0] + rows[1] + ...` to `out`, added in that order, in float32 for 16-bit types.

    `rows` is (W, ...) for `out` of shape (...); each row is contiguous.
    """
    if out.numel() == 0:
        return
    kind = kind_for(rows.device)
    if kind is not None and kind.triton:
        plans.in_python(lambda given: kernels.add_rows(*given, mean=mean), [rows, out])
        return
    total = rows[0].to(wide(rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    if mean:
        total /= rows.shape[0]
    out.copy_(total)


class StreamCall:
    """A call of a group on a device; every pipeline begins with one."""

    #: Inside `workspace`: the workspace, and the number of the call in it.
    space: DeviceWorkspace
    epoch: int

    def __init__(self, group: Group, device: torch.device, call_name: bytes) -> None:
        agree(group, call_name)
        self.group, self.name = group, call_name
        self.device = device_for(group, device)
        self.capturing = self.device.capturing()
        self.slots = 1 if self.capturing else wire.SLOTS

    @classmethod
    def of(cls, call: PatternCall) -> StreamCall:
        """Begins a call of a pattern."""
        return cls(call.group, call.device, call.name)

    def in_place(
        self, shard: Sequence[torch.Tensor], *, some_empty: bool = False
    ) -> tuple[int, ...] | None:
        """Returns the addresses of all ranks' shards if they are read in place (`read_in_place`).

        If a rank's shard is empty, and so has no address, no shard is read in place.
        """
        found, route = None, b" through a slot"
        if len(shard) == 1 and not self.capturing and not some_empty:
            found = found_in_place(shard[0], self.group)
        if (plan := plans.current()) is not None and any_in_place(self.group):
            plan.refuse("the group reads tensors in place")
        if found is not None:
            route = b" of symmetric tensor number %d" % found.number
        agree(self.group, self.name + route)
        return None if found is None else found.addresses

    @contextmanager
    def workspace(self, slot_bytes: int, channel: str = "sync") -> Iterator[None]:
        """Inside, the call has the workspace of a channel, with slots of at least `slot_bytes`."""
        with self.group.lock, self.device.guard():
            self.space = workspace(self.group, self.device, channel, slot_bytes)
            self.epoch = self.space.next_epoch()
            yield

    def viewing_slot(self) -> ViewAt:
        """Returns a function that makes tensors over parts of this rank's slot in this call."""
        base, view_at = self.space.layout.slot_offset(self.epoch), viewing(self.space.memory)
        return lambda offset, shape, dtype: view_at(base + offset, shape, dtype)

    def by_epoch(self) -> None:
        """Declares that a kernel compares the call's number, which changes from call to call."""
        assert not self.capturing, "numbers cannot change in a graph"
        if (plan := plans.current()) is not None:
            plan.refuse("a kernel compares the number of the call")

    def words(self) -> tuple[torch.Tensor, int, int]:
        """Returns words for a kernel to compare with the call's number, their pitch, and that."""
        return self.space.flags("arrived"), wire.FLAG_BYTES // 4, self.epoch

    def run(
        self,
        launch: Launch,
        operands: Sequence[torch.Tensor | int],
        kernels: Mapping[str, Kernel],
        *used: torch.Tensor,
    ) -> None:
        """Issues a launch on tensors of this rank, and addresses of its peers.

        Operands and `used` are all memory of this rank that its streams may touch. Keeps it
        allocated after an error, since the streams may run on after the caller frees it. Without an
        error the caller's stream waits for the other streams, or in the background `_start` keeps
        the memory allocated.
        """
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        addresses = [o.data_ptr() if isinstance(o, torch.Tensor) else o for o in operands]
        launched = partial(launch.run, capturing=self.capturing, call_name=self.name)
        try:
            launched(self.space, self.epoch, addresses, kernels)
        except BaseException:
            if not self.capturing:
                hold(self.space, *tensors, *used)
            raise


def staging_for(shards: Shards, places: int) -> torch.Tensor:
    """Returns memory for `places` shards."""
    return scratch(shards.own[0], max(1, places * shards.nbytes))
