"""The interface of runtimes: pipelines and collectives for tensors of one kind of device.

Pipelines contain no matmul and no attention: they take `consume(shard, rank)` and
`produce(rank, out)`. `call_name` is the bytes that name the call in errors, and that ranks compare
to detect different calls.

`Runtime` declares each method once: its arguments, defaults and contract. The method completes the
arguments (`Shards`, partial shapes, splits) and passes one record of them, such as `GatherCall`, to
the method that each kind of runtime implements. A generic `run(pattern, operands, callbacks)` would
be shorter here, but callers would lose the types of callbacks and options. A method that follows
from another one is implemented here, and a runtime overrides it only to be faster.

Slots, their parts, staging memory and partial sums begin at multiples of 64 bytes. A shard that is
read in place, or in the caller's gathered tensor, may begin anywhere and have other strides:
kernels whose bits depend on that take it through `symm_cp.tensors.alignment.aligned`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from symm_cp.group.memory import Group
from symm_cp.runtime.calls import (
    AllReduceCall,
    Collective,
    Combine,
    CombineCall,
    Consume,
    ConsumeAndProduce,
    ConsumeHere,
    Count,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    PackedBoxes,
    Pass,
    Poll,
    Produce,
    ScatterCall,
    Sizes,
    TogetherAndScatterCall,
    TogetherCall,
)
from symm_cp.tensors.shards import Shape, Shapes, Shards, Split


class Runtime(ABC):
    """Runs schedules on one kind of device; all methods are collective over the group."""

    def all_gather_and_consume(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: Consume,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None = None,
        gathered: torch.Tensor | None = None,
        split: Split | None = None,
    ) -> None:
        """Calls `consume(shard of rank r, r)` for each rank, its own first, peers' as they arrive.

        `shard` is one or more tensors of any strides. A single contiguous tensor in symmetric
        memory that was rendezvoused with the group is read in place if all ranks pass such tensors,
        and on CPU if the call is not small (cpu.py).
        `shapes` gives the shapes of each rank's shard where they differ. `gathered`, if given, is
        contiguous and receives all ranks' first tensors, divided by `split` (by default into
        equal parts of dimension 0).
        """
        shards = Shards(shard, group.world_size, shapes)
        if gathered is not None and split is None:
            split = Split.equal(shard[0].shape[0], group.world_size)
        self._gather(GatherCall(group, shards, consume, call_name, gathered, split))

    def all_gather_and_combine(
        self,
        group: Group,
        shard: torch.Tensor,
        combine: Combine,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """Calls `combine(shards of all ranks)` once, when all have arrived.

        `shapes` gives the shape of each rank's shard where they differ.
        """
        parts = None if shapes is None else [(shape,) for shape in shapes]
        shards = Shards([shard], group.world_size, parts)
        self._combine(CombineCall(group, shards, combine, call_name))

    def all_gather_into(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        split: Split,
        call_name: bytes,
    ) -> None:
        """Gathers the tensors of a shard, of any strides, into contiguous `outputs`.

        `split` divides the gathered dimension of each output.
        """

        def consume(parts: list[torch.Tensor], rank: int) -> None:
            for output, part in zip(outputs, parts, strict=True):
                split.of(rank, output).copy_(part)

        shapes = split.shard_shapes(*shard)
        self.all_gather_and_consume(group, shard, consume, call_name, shapes=shapes)

    def all_gather_and_poll(
        self,
        group: Group,
        shard: torch.Tensor,
        kernel: Poll,
        call_name: bytes,
        *,
        gathered: torch.Tensor | None = None,
    ) -> None:
        """Calls `kernel` once, while the peers' shards are in flight: it polls for them.

        All ranks' shards have equal shapes. `gathered`, if given, is contiguous and receives them,
        concatenated along dimension 0: the kernel gets all of it, in rank order. Raises
        `NotImplementedError` where kernels cannot poll.
        """
        raise NotImplementedError(f"{call_name.decode()}: kernels on this device cannot poll")

    def all_gather_and_consume_together(self, call: TogetherCall) -> None:
        """Calls `consume()`, and `consume_others` once, when the shards of all peers have arrived.

        Raises `NotImplementedError` where ranks read each other's memory.
        """
        raise NotImplementedError(f"{call.name.decode()}: nothing is pulled on this device")

    def produce_and_reduce_scatter(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
        mean: bool = False,
    ) -> None:
        """Calls `produce(r, partial)` for each rank r, its own last; `out` is the sum over ranks.

        `produce` writes this rank's contribution to rank r's output into the contiguous `partial`,
        of shape `shapes[r]` (by default the shape of `out`). Contributions are added in rank order,
        in float32 for the 16-bit types.
        """
        if shapes is None:
            partials: Sequence[Shape] = (tuple(out.shape),) * group.world_size
            nbytes = (out.nbytes,) * group.world_size
        else:
            partials, nbytes = shapes, _bytes_of(shapes, out.element_size())
        self._scatter(ScatterCall(group, produce, out, call_name, partials, nbytes, mean))

    def count_and_reduce_scatter(
        self, group: Group, kernel: Count, out: torch.Tensor, call_name: bytes, *, mean: bool
    ) -> None:
        """Calls `kernel` once, which produces for all ranks; `out` is the sum over ranks.

        Like `produce_and_reduce_scatter` with equal shapes. Data that the kernel reports as written
        is sent to the peers while it still runs. Raises `NotImplementedError` where streams cannot
        wait for a kernel.
        """
        raise NotImplementedError(
            f"{call_name.decode()}: streams on this device cannot wait for kernels"
        )

    def produce_and_all_reduce(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        split: Split | None = None,
        mean: bool = False,
    ) -> None:
        """Calls `produce(r, partial)` for each rank r, its own last; `out` is the sum over ranks.

        `produce` writes this rank's contribution to part r of `out`, which is contiguous and whose
        dimension 0 `split` divides, into the contiguous `partial`. Without `split` it is called
        once, with this rank and memory for all of `out`. Contributions are added in rank order, in
        float32 for the 16-bit types. All ranks get the same bits.
        """
        self._all_reduce(AllReduceCall(group, produce, out, call_name, split, mean))

    def exchange_and_consume(
        self,
        group: Group,
        give: Pass,
        consume: ConsumeHere,
        take: Pass,
        device: torch.device,
        call_name: bytes,
        *,
        sizes: Sizes,
    ) -> None:
        """Calls `give(r, memory)` for each peer r, `consume()`, and `take(r, memory)` for each.

        `give` writes the data for r to the memory, and `take` finds there the data from r, which
        travels while `consume` runs. Memory is 1-D and contiguous, of `sizes[source][to]` bytes.
        """
        self._exchange(ExchangeCall(group, give, consume, take, device, call_name, sizes))

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """Exchanges parts of tensors, and writes them to their places in `outputs`.

        Tensors may have any strides, except that the last dimension's must be 1.
        """
        self.exchange_and_consume(
            group,
            lambda to, memory: packed.give(tensors, to, memory),
            lambda: packed.keep(tensors, outputs),
            lambda source, memory: packed.take(outputs, source, memory),
            tensors[0].device,
            call_name,
            sizes=packed.sizes,
        )

    def consume_and_reduce_scatter(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: ConsumeAndProduce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None,
        partials: Sequence[Shape],
        ring: bool = False,
    ) -> None:
        """Calls `consume(shard of rank r, r, partial)` for each rank r; sums the partials in `out`.

        Like `all_gather_and_consume`, but `consume` also writes this rank's contribution to rank r
        into the contiguous `partial` of shape `partials[r]` and the dtype of `out`. It gets its own
        shard as given. Contributions are added in rank order; with `ring` in the order rank,
        rank-1, ..., with room for two of them at a time instead of one for each rank.
        """
        shards = Shards(shard, group.world_size, shapes)
        nbytes = _bytes_of(partials, out.element_size())
        self._gather_and_scatter(
            GatherAndScatterCall(group, shards, consume, out, call_name, partials, nbytes, ring)
        )

    def consume_and_reduce_scatter_together(self, call: TogetherAndScatterCall) -> None:
        """Calls `consume(partial)` for this rank's shard, then `consume_others` once for all peers.

        Contributions are added in rank order. Raises like `all_gather_and_consume_together`.
        """
        raise NotImplementedError(f"{call.name.decode()}: nothing is pulled on this device")

    def give_up(self, group: Group, error: BaseException) -> None:
        """After an error in the middle of a call, ends peers' waits that have no time-out."""
        return  # CPUs have no such waits

    @abstractmethod
    def _gather(self, call: GatherCall) -> None: ...

    @abstractmethod
    def _combine(self, call: CombineCall) -> None: ...

    @abstractmethod
    def _scatter(self, call: ScatterCall) -> None: ...

    @abstractmethod
    def _all_reduce(self, call: AllReduceCall) -> None: ...

    @abstractmethod
    def _exchange(self, call: ExchangeCall) -> None: ...

    @abstractmethod
    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None: ...


def _bytes_of(shapes: Sequence[Shape], item: int) -> tuple[int, ...]:
    return tuple([math.prod(shape) * item for shape in shapes])


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
