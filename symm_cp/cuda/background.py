"""Low-contention collectives on streams: transfers in the background of the caller's stream."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial

import torch
from torch._C._distributed_c10d import Work, _register_work

from symm_cp.cuda import plans
from symm_cp.cuda.base import DeviceWorkspace
from symm_cp.cuda.stream_call import StreamCall, add_rows
from symm_cp.cuda.stream_launches import background_launch
from symm_cp.group.memory import Group
from symm_cp.runtime.lowering import Kernel
from symm_cp.schedule import patterns
from symm_cp.tensors.dtypes import real
from symm_cp.tensors.shards import Extent, Split


class _Transfer(Work):
    """The work that `wait_tensor` waits for: the current stream then follows the transfer.

    It keeps the tensors that the transfer uses until the stream that began it waits for it, and so
    may take their memory again; if another stream waits, until it has ended. In a capture no end
    can be asked for: a tensor that another stream waits for must stay until the capture ends.
    """

    def __init__(self, space: DeviceWorkspace, used: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._user = space.device, space.user
        self._ended = self._device.copies_ended(self._user)
        self._stream, self._used = self._device.streams(self._user)[0], used

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self._device.guard():  # the waiting thread may be new, or on another device
            self._ended.wait()
            if self._device.streams(self._user)[0] == self._stream:
                self._used = []
        return True

    def release(self) -> bool:
        """Keeps nothing more if the transfer has ended; returns whether it has."""
        if ended := self._ended.query():
            self._used = []  # torch keeps works that nobody waits for
        return ended


def _started(space: DeviceWorkspace, used: list[torch.Tensor]) -> None:
    """Makes `wait_tensor` of the last tensor that a transfer uses wait for the transfer's end."""
    transfer = _Transfer(space, used)
    if not space.device.capturing():
        while space.transfers and space.transfers[0].release():
            space.transfers.popleft()
        space.transfers.append(transfer)
    _register_work(used[-1], transfer)


def _start(
    group: Group,
    tensor: torch.Tensor,
    call_name: bytes,
    pattern: patterns.Pattern,
    chunks: Extent,
    target: torch.Tensor,
    result: torch.Tensor,
    kernels: dict[str, Callable[[int], None]],
) -> None:
    """Runs a background pattern with the operands `tensor` and `target`; callers await `result`."""
    call, source = StreamCall(group, tensor.device, call_name), tensor.contiguous()
    scatter = pattern is patterns.BACKGROUND_REDUCE_SCATTER
    some_empty = not scatter and min(chunks.nbytes) == 0
    addresses = call.in_place([tensor], some_empty=some_empty)
    launch = background_launch(pattern, group.rank, chunks, call.slots, addresses is not None)
    room = max(chunks.nbytes) * (group.world_size if scatter else 1)
    with call.workspace(0 if addresses is not None else room, "async"):
        # The copy lane reads a plain input no more: the caller's stream copies it to `target`.
        used = [*([] if addresses is None else [source]), target, result]
        call.run(launch, [source, target, *(addresses or ())], kernels, *used)
        plans.in_python(partial(_started, call.space), used)


class BackgroundGather:
    """A low-contention all-gather; see `Collective`."""

    def __init__(self, tensor: torch.Tensor, split: Split, call_name: bytes) -> None:
        self._output_shape, self._name = split.whole_shape(tensor.shape), call_name
        self._chunks = Extent.split(1, split, self._output_shape, tensor.element_size())

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`."""
        output = tensor.new_empty(self._output_shape) if out is None else out
        pattern = patterns.BACKGROUND_ALL_GATHER
        _start(group, tensor, self._name, pattern, self._chunks, output, output, {})
        return output


class BackgroundScatter:
    """A low-contention reduce-scatter; see `Collective`."""

    def __init__(
        self, tensor: torch.Tensor, split: Split, rank: int, call_name: bytes, mean: bool
    ) -> None:
        self._output_shape, self._name = split.shape_of(rank, tensor.shape), call_name
        self._chunks = Extent.split(0, split, tensor.shape, tensor.element_size())
        self._mean = mean

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`."""
        numbers = real(tensor)
        more = numbers.shape[tensor.dim() :]
        output = numbers.new_empty((*self._output_shape, *more)) if out is None else real(out)
        # Each row has room for any chunk, since they hold the input first.
        largest = max(self._chunks.nbytes) // numbers.element_size()
        rows = numbers.new_empty((group.world_size, largest))
        partials = rows[:, : output.numel()].unflatten(1, output.shape)
        kernels: dict[str, Kernel] = {
            "reduce": lambda _: add_rows(partials, output, mean=self._mean)
        }
        pattern = patterns.BACKGROUND_REDUCE_SCATTER
        _start(group, numbers, self._name, pattern, self._chunks, partials, output, kernels)
        if out is not None:
            return out
        return torch.view_as_complex(output) if tensor.is_complex() else output
