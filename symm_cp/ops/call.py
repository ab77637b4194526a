"""The collectives of a call, for kernels whose ranks have equal parts: one exchange, or a pattern.

`symm_cp.op` gives a `Call` to each kernel of a user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops.common import (
    check_dim,
    check_reduce_op,
    group_of,
    name_of,
    rank_in,
    scatter_split,
    world_size_of,
)
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import AllReduceCall, ExchangeCall, GatherCall, ScatterCall
from symm_cp.tensors.alignment import aligned
from symm_cp.tensors.dtypes import real
from symm_cp.tensors.results import contiguous, copied, new_result
from symm_cp.tensors.shards import Split, viewing

#: Takes rows of the gathered tensor, and which rows these are.
ConsumeRows: TypeAlias = Callable[[torch.Tensor, slice], object]


class Call:
    """A call of a user's op on this rank: its group, and the collectives that it may make.

    All ranks make the same collectives in the same order, with tensors of equal shapes and dtypes.
    Each returns a new tensor.
    """

    def __init__(self, op: str, group: Group) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self._op = op
        self._collectives = 0
        self._agreed = ""

    def agree(self, values: object) -> None:
        """Makes the ranks compare the text of some values in the next collective."""
        self._agreed = f" {values}"

    def _name(self, collective: str, tensor: torch.Tensor, detail: str = "") -> bytes:
        """Returns the name of the next collective, which all ranks compare."""
        self._collectives += 1
        detail, self._agreed = f"{collective} {self._collectives}{detail}{self._agreed}", ""
        return name_of(self._op, tensor.dtype, tensor.shape, detail)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns the concatenation of all ranks' tensors along a dimension, contiguous."""
        dim = check_dim(self._op, "dim", dim, tensor.dim())
        split = Split.equal(tensor.shape[dim], self.world_size, dim)
        whole = split.whole_shape(tensor.shape)
        name = self._name("all_gather", tensor, f" {dim=}")
        if runtime.at_once(self.group, tensor, whole):
            return exchange.all_gather(self.group, tensor, split, name, keep=True)
        gathered = new_result(tensor, whole)
        call = GatherCall(
            self.group, [tensor], lambda *_: None, name, gathered=gathered, split=split
        )
        runtime.run(call)
        return gathered

    def for_each_shard(self, tensor: torch.Tensor, consume: ConsumeRows) -> None:
        """Calls `consume(gathered[where], where)` until it has had all rows of all ranks' tensors.

        On CPU it is called once with all rows, if they take at most 64 MiB. Above that, and on
        devices with streams, it gets one rank's rows after the other, while others are in flight.
        """
        size, ranks = tensor.shape[0], self.world_size
        if runtime.at_once(self.group, tensor, (ranks, *tensor.shape)):
            consume(self.all_gather(tensor), slice(0, size * ranks))
            return

        def consume_shard(shards: list[torch.Tensor], rank: int) -> None:
            consume(aligned(shards[0]), slice(rank * size, (rank + 1) * size))

        name = self._name("for_each_shard", tensor)
        runtime.run(GatherCall(self.group, [tensor], consume_shard, name))

    def reduce_scatter(
        self, tensor: torch.Tensor, dim: int = 0, reduce_op: str = "sum"
    ) -> torch.Tensor:
        """Returns this rank's part along a dimension of the sum or mean over ranks, contiguous.

        Sums are in rank order, in float32 for the 16-bit types.
        """
        dim, group = check_dim(self._op, "dim", dim, tensor.dim()), self.group
        mean = check_reduce_op(self._op, "the tensor", tensor.dtype, reduce_op)
        split = scatter_split(
            self._op, "dim", dim, tensor.shape[dim], None, self.world_size, any_sizes=False
        ).along(0)
        name = self._name("reduce_scatter", tensor, f" {dim=} {reduce_op}")
        front = tensor.movedim(dim, 0)
        shape = split.shape_of(self.rank, front.shape)
        if runtime.at_once(group, tensor, tensor.shape):
            parts = copied(front) if self.world_size == 1 else contiguous(front)
            shapes = [shape] * self.world_size
            out = exchange.reduce_scatter(group, parts, shapes, name, mean=mean)
        else:
            out, given = new_result(tensor, shape), split.parts(real(front))
            call = ScatterCall(
                group, lambda rank, part: part.copy_(given[rank]), real(out), name, mean=mean
            )
            runtime.run(call)
        return contiguous(out.movedim(0, dim))

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape, contiguous, whose part r of dimension 0 is rank r's.

        Each rank gets the part with its own number of every rank's tensor; parts are equal.
        """
        size, group = tensor.shape[0], self.group
        split = scatter_split(self._op, "dim", 0, size, None, self.world_size, any_sizes=False)
        name, given = self._name("all_to_all", tensor), contiguous(tensor)
        if runtime.at_once(group, given, given.shape):
            return exchange.all_to_all_rows(group, given, name)
        taken = new_result(given, given.shape)
        sent, arrived = split.parts(given), split.parts(taken)
        shape, dtype = tuple(sent[0].shape), given.dtype
        sizes = ((sent[0].nbytes,) * self.world_size,) * self.world_size

        def give(to: int, memory: torch.Tensor) -> None:
            viewing(memory)(0, shape, dtype).copy_(sent[to])

        def keep() -> None:
            arrived[self.rank].copy_(sent[self.rank])

        def take(source: int, memory: torch.Tensor) -> None:
            arrived[source].copy_(viewing(memory)(0, shape, dtype))

        runtime.run(ExchangeCall(group, give, keep, take, given.device, name, sizes))
        return taken

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str = "sum") -> torch.Tensor:
        """Returns the sum or mean over ranks, with the same bits on all of them, contiguous."""
        mean = check_reduce_op(self._op, "the tensor", tensor.dtype, reduce_op)
        name = self._name("all_reduce", tensor, f" {reduce_op}")
        if runtime.at_once(self.group, tensor, tensor.shape):
            return exchange.all_reduce(self.group, tensor, name, mean=mean)
        out, given = new_result(tensor, tensor.shape), real(tensor)
        call = AllReduceCall(
            self.group, lambda _, part: part.copy_(given), real(out), name, mean=mean
        )
        runtime.run(call)
        return out


class ShapesCall(Call):
    """The same collectives of tensors whose values do not matter: results have the right shapes."""

    def __init__(self, op: str, group_name: str) -> None:
        self.rank, self.world_size = rank_in(group_name), world_size_of(group_name)
        self._op, self._group_name = op, group_name

    def agree(self, values: object) -> None:
        """Does nothing: no rank compares anything."""

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The group, which fake calls do not need."""
        return group_of(self._group_name)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Like `Call.all_gather`."""
        shape, dim = list(tensor.shape), check_dim(self._op, "dim", dim, tensor.dim())
        shape[dim] *= self.world_size
        return tensor.new_empty(shape)

    def for_each_shard(self, tensor: torch.Tensor, consume: ConsumeRows) -> None:
        """Calls `consume` once, with the rows of all ranks."""
        consume(self.all_gather(tensor), slice(0, tensor.shape[0] * self.world_size))

    def reduce_scatter(
        self, tensor: torch.Tensor, dim: int = 0, reduce_op: str = "sum"
    ) -> torch.Tensor:
        """Like `Call.reduce_scatter`."""
        shape, dim = list(tensor.shape), check_dim(self._op, "dim", dim, tensor.dim())
        check_reduce_op(self._op, "the tensor", tensor.dtype, reduce_op)
        scatter_split(self._op, "dim", dim, shape[dim], None, self.world_size, any_sizes=False)
        shape[dim] = shape[dim] // self.world_size
        return tensor.new_empty(shape)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like `Call.all_to_all`."""
        size, ranks = tensor.shape[0], self.world_size
        scatter_split(self._op, "dim", 0, size, None, ranks, any_sizes=False)
        return tensor.new_empty(tensor.shape)

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str = "sum") -> torch.Tensor:
        """Like `Call.all_reduce`."""
        check_reduce_op(self._op, "the tensor", tensor.dtype, reduce_op)
        return tensor.new_empty(tensor.shape)
