"""The interface of runtimes: each runs the calls of patterns on tensors of one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class Runtime:
    """Runs calls on one kind of device. What a kind of call means is said at its class."""

    def run(self, call: PatternCall) -> None:
        """Runs a call. Raises `NotImplementedError` if this kind of device has no such calls."""
        method = getattr(self, _METHODS[type(call)], None)
        if method is None:
            raise NotImplementedError(
                f"{call.name.decode()}: {type(call).__name__} is not supported on {call.device}"
            )
        method(call)

    # A runtime may override these to be faster.

    def _gather_into(self, call: GatherIntoCall) -> None:
        def consume(parts: list[torch.Tensor], rank: int) -> None:
            for output, part in zip(call.outputs, parts, strict=True):
                call.split.of(rank, output).copy_(part)

        shapes = call.split.shard_shapes(*call.shard)
        self.run(GatherCall(call.group, call.shard, consume, call.name, shapes=shapes))

    def _exchange_boxes(self, call: BoxesCall) -> None:
        self.run(call.by_messages())


_METHODS: dict[type[object], str] = {
    GatherCall: "_gather",
    GatherIntoCall: "_gather_into",
    PollCall: "_poll",
    TogetherCall: "_gather_together",
    ScatterCall: "_scatter",
    CountCall: "_count",
    AllReduceCall: "_all_reduce",
    ExchangeCall: "_exchange",
    BoxesCall: "_exchange_boxes",
    GatherAndScatterCall: "_gather_and_scatter",
    TogetherAndScatterCall: "_gather_and_scatter_together",
}


class BackgroundRuntime(Runtime, ABC):
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
