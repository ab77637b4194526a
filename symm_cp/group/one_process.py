"""The ranks of torch's `LocalTensorMode`, of one process: within `on_ranks` each is a thread.

Their groups have torch's backend "fake". torch's functional collectives exchange tensors between
the threads, so all that runs over the process group runs as it does between hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

KernelOf: TypeAlias = Callable[[Any, Any], Callable[..., Any] | None]
_functional = torch.ops._c10d_functional


class _Meeting:
    """Where the ranks of a group exchange values, one after the other."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks
        self.abort = self._barrier.abort

    def all(self, rank: int, value: T) -> list[T]:
        """Returns the values of all ranks. Collective."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # until all have read them
        return values


class _Rank(threading.local):
    """The rank in the world that this thread is, if it is one, and the meetings of all ranks."""

    number: int | None = None
    meetings: dict[tuple[int, ...], _Meeting]


_this = _Rank()


def is_one_of_several() -> bool:
    """Whether this thread is one of the ranks of a process."""
    return _this.number is not None


def rank_of(group: dist.ProcessGroup) -> int:
    """Returns the rank in a group of this thread, or of this process."""
    return group.rank() if _this.number is None else _members(group).index(_this.number)


def all_values(group_name: str, value: T) -> list[T]:
    """Returns the values of all ranks of a group, which are threads. Collective."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return _this.meetings[tuple(_members(group))].all(rank_of(group), value)


def _members(group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks in the world of this thread's group.

    The process knows the groups of its own rank only; those of others lie in the mesh as they do.
    """
    return next(members for members in _all_members(group) if _this.number in members)


def _all_members(group: dist.ProcessGroup) -> list[list[int]]:
    from torch.distributed._local_tensor._c10d import _prepare_collective_groups

    ranks, offsets, _ = _prepare_collective_groups(group)
    return [[offset + rank for rank in ranks] for offset in offsets]


class _Exchanging(TorchDispatchMode):
    """Makes functional collectives exchange tensors between threads, and calls our ops' kernels."""

    def __init__(self, kernel_of: KernelOf) -> None:
        super().__init__()
        self._kernel_of = kernel_of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        collective = _COLLECTIVES.get(func)
        if collective is not None:
            return collective(*args, **(kwargs or {}))
        kernel = self._kernel_of(func, args)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        with self:
            return kernel(*args, **(kwargs or {}))


def _all_gather(tensor: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    return torch.cat(all_values(group_name, tensor))


def _all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    total = torch.stack(all_values(group_name, tensor)).sum(0, dtype=tensor.dtype)
    return total / dist.get_world_size(_group(group_name)) if reduce_op == "avg" else total


def _reduce_scatter(
    tensor: torch.Tensor, reduce_op: str, ranks: int, group_name: str
) -> torch.Tensor:
    total = _all_reduce(tensor, reduce_op, group_name)
    return total.chunk(ranks)[rank_of(_group(group_name))].clone()


def _all_to_all(
    tensor: torch.Tensor, arriving: Sequence[int], sent: Sequence[int], group_name: str
) -> torch.Tensor:
    rank = rank_of(_group(group_name))
    parts = [given.split(sizes) for given, sizes in all_values(group_name, (tensor, list(sent)))]
    return torch.cat([of_source[rank] for of_source in parts])


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


_COLLECTIVES: dict[Any, Callable[..., torch.Tensor]] = {
    _functional.all_gather_into_tensor.default: _all_gather,
    _functional.all_reduce.default: _all_reduce,
    _functional.reduce_scatter_tensor.default: _reduce_scatter,
    _functional.all_to_all_single.default: _all_to_all,
}


def on_ranks(
    ranks: Sequence[int],
    call: Callable[[int], T],
    kernel_of: KernelOf,
) -> list[T]:
    """Returns what `call(rank)` returns on a thread for each rank of a process.

    `kernel_of` takes an op and its arguments; returns its kernel if ranks exchange tensors in it.
    """
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 0]
    meetings = {
        tuple(members): _Meeting(len(members))
        for group in groups
        for members in _all_members(group)
    }

    failures: list[BaseException] = []

    def run(rank: int) -> T:
        _this.number, _this.meetings = rank, meetings
        try:
            with torch.no_grad(), _Exchanging(kernel_of):
                return call(rank)
        except BaseException as error:
            failures.append(error)  # the first is the cause of the others
            for meeting in meetings.values():
                meeting.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(run, rank) for rank in ranks]
    if failures:
        raise failures[0]
    return [each.result() for each in running]
