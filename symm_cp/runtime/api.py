"""What a runtime does: pipelines and collectives for tensors of one kind of device.

Pipelines know no matmul and no attention: they take `consume(shard, rank)` and
`produce(rank, out)`. `call_name` is the bytes that name the call in errors, and by which ranks
notice that they make different calls.

Slots, their parts, staging memory and partial sums begin at multiples of 64 bytes. Where a shard is
read in place, or in the caller's gathered tensor, it may begin anywhere and have other strides:
kernels whose bits depend on that take it through `symm_cp.tensors.alignment.aligned`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from symm_cp import wire
from symm_cp.group.memory import Group
from symm_cp.tensors.shards import Shape, Shapes, Split

#: Takes the tensors of a rank's shard, and the rank.
Consume: TypeAlias = Callable[[list[torch.Tensor], int], None]
#: Takes the shards of all ranks, in rank order.
Combine: TypeAlias = Callable[[list[torch.Tensor]], None]
#: Takes a rank and the memory for this rank's contribution to it.
Produce: TypeAlias = Callable[[int, torch.Tensor], None]
#: Takes the tensors of a rank's shard, the rank, and the memory for the contribution to it.
ConsumeAndProduce: TypeAlias = Callable[[list[torch.Tensor], int, torch.Tensor], None]
#: Takes the peers' shards (one tensor for each part, in the order of `peers`), words of int32, a
#: step and an epoch: shard i is there once word i * step is the epoch, or a later one.
Poll: TypeAlias = Callable[[list[torch.Tensor], torch.Tensor, int, int], None]
#: Takes a piece, what the rank before passes on of it (None: this rank is the first of the chain),
#: and the memory for what this rank passes on (None: it is the last).
RelayStep: TypeAlias = Callable[[int, torch.Tensor | None, torch.Tensor | None], None]

#: Works on what is here already.
ConsumeHere: TypeAlias = Callable[[], None]
#: Takes the rank that this one gives to or takes from, and the memory that passes between them.
Pass: TypeAlias = Callable[[int, torch.Tensor], None]

#: The element types that can be summed.
REDUCIBLE: dict[torch.dtype, wire.DType] = {
    torch.uint8: wire.DType.UINT8,
    torch.int8: wire.DType.INT8,
    torch.int16: wire.DType.INT16,
    torch.int32: wire.DType.INT32,
    torch.int64: wire.DType.INT64,
    torch.float16: wire.DType.FLOAT16,
    torch.float32: wire.DType.FLOAT32,
    torch.float64: wire.DType.FLOAT64,
    torch.bfloat16: wire.DType.BFLOAT16,
}


#: Bytes that each rank (first index) gives to each (second index).
Sizes: TypeAlias = tuple[tuple[int, ...], ...]


class PlacedBox(NamedTuple):
    """`planes` times `rows` runs of `row` bytes of a tensor; see `Box` in csrc/wire.h."""

    peer: int
    piece: int
    operand: int
    offset: int
    in_slot: int
    planes: int
    plane_pitch: int
    rows: int
    pitch: int
    row: int


class PackedBoxes(Protocol):
    """Which parts of its tensors each rank sends to each, packed into one message for each peer.

    Kernels of torch copy the parts by `give`, `take` and `keep`, native code by `boxes`.
    """

    def __hash__(self) -> int:
        """Equal objects have equal boxes, which are made once."""

    @property
    def sizes(self) -> Sizes:
        """The bytes of the message from each rank (first index) to each (second index)."""

    @property
    def joins(self) -> bool:
        """Whether the parts from all ranks lie side by side; else those for all ranks do."""

    def give(self, tensors: Sequence[torch.Tensor], to: int, memory: torch.Tensor) -> None:
        """Writes the message for a peer to memory of that size."""

    def take(self, outputs: Sequence[torch.Tensor], source: int, memory: torch.Tensor) -> None:
        """Copies the parts in a peer's message to their places."""

    def keep(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copies the parts that stay on this rank."""

    def boxes(
        self, strides: Sequence[tuple[int, ...]], room: int
    ) -> tuple[list[PlacedBox], list[PlacedBox]]:
        """Returns the parts that are sent and those that arrive, in order of peers and pieces.

        `strides` are those of tensors and outputs. A piece has `room` bytes for each rank. A part
        that stays is one box of both lists.
        """


class Collective(Protocol):
    """A background collective on tensors of one shape and dtype, prepared once for a group."""

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Starts the collective and returns its result, which `wait_tensor` completes.

        Writes it to `out`, if given: contiguous, and of the result's shape and dtype. Waits for no
        peer, not in the first call either.
        """


class Runtime(Protocol):
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
        memory that was rendezvoused with the group is read in place if all ranks pass such a one.
        `shapes` gives the shapes of each rank's shard where they differ. `gathered`, if given, is
        contiguous and receives the first tensor of all ranks, divided by `split` (by default into
        equal parts of dimension 0).
        """

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

    def all_gather_and_poll(
        self, group: Group, shard: Sequence[torch.Tensor], kernel: Poll, call_name: bytes
    ) -> None:
        """Calls `kernel` once, while the peers' shards are on their way: it polls for them.

        `shard` is one or more tensors, of equal shapes on all ranks. Raises `NotImplementedError`
        where kernels cannot poll.
        """

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
        of shape `shapes[r]` (by default that of `out`). Contributions are added in rank order, in
        float32 for the 16-bit types.
        """

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

        `give` writes what goes to r to the memory, and `take` finds there what r has given, which
        travels while `consume` runs. Memory is 1-D and contiguous, of `sizes[source][to]` bytes.
        """

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """Exchanges parts of tensors, and writes them to where they belong in `outputs`.

        Tensors may have any strides, but 1 in the last dimension.
        """

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
        """Calls `consume(shard of rank r, r, partial)` for each rank r; `out` sums what is for it.

        As `all_gather_and_consume`; and `consume` writes this rank's contribution to rank r into
        the contiguous `partial` of shape `partials[r]` and the dtype of `out`. Its own shard it
        gets as given. Contributions are added in rank order; with `ring` in the order rank,
        rank-1, ..., and then there is room for two of them at a time instead of one for each rank.
        """

    def relay(
        self,
        group: Group,
        step: RelayStep,
        like: torch.Tensor,
        shapes: Sequence[Shape],
        call_name: bytes,
        *,
        reverse: bool = False,
    ) -> None:
        """Calls `step(piece, received, passed)` for each piece; ranks form a chain.

        `received` is what the rank before has written to its `passed` for this piece: it begins
        with the next piece while this rank works on this one. `shapes` are those of the pieces, of
        the dtype and device of `like`; memory is contiguous. With `reverse` the chain goes from the
        last rank to the first.
        """


class BackgroundRuntime(Protocol):
    """Runs collectives in the background, where that is not native (csrc/low_contention.cpp)."""

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """Prepares an all-gather along dimension 0, for tensors such as `tensor`.

        `split` divides the result.
        """

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """Prepares a reduce-scatter along dimension 0, for tensors such as `tensor`.

        `split` divides the input.
        """
