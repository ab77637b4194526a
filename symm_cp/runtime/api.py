"""The interface of runtimes: each runs the calls of patterns on tensors of one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from symm_cp.group.memory import Group
from symm_cp.runtime.calls import (
    AllReduceCall,
    BoxesCall,
    Collective,
    CountCall,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    GatherIntoCall,
    PatternCall,
    PollCall,
    ScatterCall,
    TogetherAndScatterCall,
    TogetherCall,
)
from symm_cp.tensors.shards import Split


class Runtime(ABC):
    """Runs calls on one kind of device. What a kind of call means is said at its class."""

    def run(self, call: PatternCall) -> None:
        """Runs a call. Raises `NotImplementedError` if this kind of device has no such calls."""
        _METHODS[type(call)](self, call)

    @abstractmethod
    def _gather(self, call: GatherCall) -> None: ...

    @abstractmethod
    def _scatter(self, call: ScatterCall) -> None: ...

    @abstractmethod
    def _all_reduce(self, call: AllReduceCall) -> None: ...

    @abstractmethod
    def _exchange(self, call: ExchangeCall) -> None: ...

    @abstractmethod
    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None: ...

    # These follow from the others, and a runtime overrides them to be faster:

    def _gather_into(self, call: GatherIntoCall) -> None:
        def consume(parts: list[torch.Tensor], rank: int) -> None:
            for output, part in zip(call.outputs, parts, strict=True):
                call.split.of(rank, output).copy_(part)

        shapes = call.split.shard_shapes(*call.shard)
        self._gather(GatherCall(call.group, call.shard, consume, call.name, shapes=shapes))

    def _exchange_boxes(self, call: BoxesCall) -> None:
        self._exchange(call.by_messages())

    # Only streams have these:

    def _poll(self, call: PollCall) -> None:
        raise _unknown(call)

    def _count(self, call: CountCall) -> None:
        raise _unknown(call)

    def _gather_together(self, call: TogetherCall) -> None:
        raise _unknown(call)

    def _gather_and_scatter_together(self, call: TogetherAndScatterCall) -> None:
        raise _unknown(call)


_METHODS: dict[type[Any], Callable[[Runtime, Any], None]] = {
    GatherCall: lambda runtime, call: runtime._gather(call),
    GatherIntoCall: lambda runtime, call: runtime._gather_into(call),
    PollCall: lambda runtime, call: runtime._poll(call),
    TogetherCall: lambda runtime, call: runtime._gather_together(call),
    ScatterCall: lambda runtime, call: runtime._scatter(call),
    CountCall: lambda runtime, call: runtime._count(call),
    AllReduceCall: lambda runtime, call: runtime._all_reduce(call),
    ExchangeCall: lambda runtime, call: runtime._exchange(call),
    BoxesCall: lambda runtime, call: runtime._exchange_boxes(call),
    GatherAndScatterCall: lambda runtime, call: runtime._gather_and_scatter(call),
    TogetherAndScatterCall: lambda runtime, call: runtime._gather_and_scatter_together(call),
}


def _unknown(call: PatternCall) -> NotImplementedError:
    return NotImplementedError(
        f"{call.name.decode()}: {type(call).__name__} is not supported on {call.device}"
    )


class BackgroundRuntime(Runtime):
    """Runs collectives in the background that are not native (csrc/ops/low_contention.cpp)."""

    @abstractmethod
    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """Prepares an all-gather along dimension 0, for tensors like `tensor`.

        `split` divides the result.
        """

    @abstractmethod
    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """Prepares a reduce-scatter along dimension 0, for tensors like `tensor`.

        `split` divides the input.
        """
