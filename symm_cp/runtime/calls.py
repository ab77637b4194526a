"""The calls of patterns that ops make: their tensors, and the functions that they call.

Functions contain the work: a pattern knows no matmul and no attention. `name` is the bytes that
name the call in errors, and that ranks compare to detect different calls. All calls are collective
over the group.

Slots, their parts, staging memory and partial sums begin at multiples of 64 bytes. A shard that is
read in place, or in the caller's gathered tensor, may begin anywhere and have other strides:
kernels whose bits depend on that take it through `symm_cp.tensors.alignment.aligned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from symm_cp.group.memory import Group
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.shards import Shape, Shapes, Shards, Split

#: Takes the tensors of a rank's shard, and the rank.
Consume: TypeAlias = Callable[[list[torch.Tensor], int], None]
#: Takes the peers' rows of each tensor of a shard.
ConsumeOthers: TypeAlias = Callable[[list[torch.Tensor]], None]
#: Takes the same rows, and memory for the contributions to them.
ConsumeOthersAndProduce: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
#: Takes a rank and the memory for this rank's contribution to it.
Produce: TypeAlias = Callable[[int, torch.Tensor], None]
#: Takes the tensors of a rank's shard, the rank, and the memory for the contribution to it.
ConsumeAndProduce: TypeAlias = Callable[[list[torch.Tensor], int, torch.Tensor], None]
#: Takes the peers' shards (stacked, in the order of `peers`), words of int32, a step and an epoch:
#: shard i has arrived once word i * step is the epoch, or a later one.
Poll: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int, int], None]
#: Takes memory for the contributions to all ranks (stacked), memory for the contribution to this
#: rank, words of int32, a step and an epoch: raises word i * step to the epoch when the i-th peer's
#: contribution is written.
Count: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], None]

#: Processes local data while remote data is in flight.
ConsumeHere: TypeAlias = Callable[[], None]
#: Takes the peer that this rank gives to or takes from, and the memory that passes between them.
Pass: TypeAlias = Callable[[int, torch.Tensor], None]

#: Bytes that each rank (first index) gives to each (second index).
Sizes: TypeAlias = tuple[tuple[int, ...], ...]


class PlacedBox(NamedTuple):
    """`planes` times `rows` runs of `row` bytes of a tensor; see `Box` in csrc/channel/wire.h."""

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
    """The parts of its tensors that each rank sends to each peer, packed into a message for each.

    Kernels of torch copy the parts by `give`, `take` and `keep`, native code by `boxes`.
    """

    def __hash__(self) -> int:
        """Equal objects have equal boxes, which are made once."""

    @property
    def sizes(self) -> Sizes:
        """The bytes of the message from each rank (first index) to each (second index)."""

    @property
    def joins(self) -> bool:
        """Whether the parts from all ranks lie side by side; else the parts for all ranks do."""

    def give(self, tensors: Sequence[torch.Tensor], to: int, memory: torch.Tensor) -> None:
        """Writes the message for a peer to memory of that size."""

    def take(self, outputs: Sequence[torch.Tensor], source: int, memory: torch.Tensor) -> None:
        """Copies the parts in a peer's message to their places in the outputs."""

    def keep(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copies the parts that stay on this rank."""

    def boxes(
        self, strides: Sequence[tuple[int, ...]], room: int
    ) -> tuple[list[PlacedBox], list[PlacedBox]]:
        """Returns the sent and the arriving parts, in order of peers and pieces.

        `strides` are the strides of tensors and outputs. A piece has `room` bytes for each rank. A
        part that stays on this rank is one box of both lists.
        """


class _OfOperands:
    """A call on the device of `shard`."""

    shard: Any

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        first = self.shard if isinstance(self.shard, torch.Tensor) else self.shard[0]
        return first.device


class _OfResult:
    """A call on the device of `out`."""

    out: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.out.device


@dataclass(eq=False)
class GatherCall(_OfOperands):
    """Calls `consume(shard of rank r, r)` for each rank, its own first, peers' as they arrive.

    `shard` is one or more tensors of any strides. A single contiguous tensor in symmetric memory
    that was rendezvoused with the group is read in place if all ranks pass such tensors, and on CPU
    if the call is not small (cpu.py). `shapes` gives the shapes of each rank's shard where they
    differ. `gathered`, if given, is contiguous and receives all ranks' first tensors, divided by
    `split` (by default into equal parts of dimension 0). With `lanes`, `consume` may run for two
    shards at once, on streams: it writes different memory for each, and reads no other's shard.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: Consume
    name: bytes
    shapes: Sequence[Shapes] | None = None
    gathered: torch.Tensor | None = None
    split: Split | None = None
    lanes: bool = False

    def __post_init__(self) -> None:
        ranks = self.group.world_size
        self.shards = Shards(self.shard, ranks, self.shapes)
        if self.gathered is not None and self.split is None:
            self.split = Split.equal(self.shard[0].shape[0], ranks)


@dataclass(eq=False)
class GatherIntoCall(_OfOperands):
    """Gathers the tensors of a shard, of any strides, into contiguous `outputs`.

    `split` divides the gathered dimension of each output. Streams read a single tensor in place if
    the ranks have agreed on that (cuda/in_place.py).
    """

    group: Group
    shard: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    split: Split
    name: bytes


@dataclass(eq=False)
class PollCall(_OfOperands):
    """Calls `kernel` once, while the peers' shards are in flight: it polls for them.

    All ranks' shards have equal shapes. `gathered`, if given, is contiguous and receives them,
    concatenated along dimension 0: the kernel gets all of it, in rank order. Only where kernels can
    poll.
    """

    group: Group
    shard: torch.Tensor
    kernel: Poll
    name: bytes
    gathered: torch.Tensor | None = None


@dataclass(eq=False)
class TogetherCall(_OfOperands):
    """Calls `consume()`, and `consume_others` once, when the shards of all peers have arrived.

    `shard` is one or more contiguous tensors, whose rows are positions of a sequence spread by
    `layout`. `consume_others` takes the peers' rows of each, in the order of the sequence. Only on
    streams.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: ConsumeHere
    consume_others: ConsumeOthers
    name: bytes
    layout: SequenceLayout


@dataclass(eq=False)
class ScatterCall(_OfResult):
    """Calls `produce(r, partial)` for each rank r, its own last; `out` is the sum over ranks.

    `produce` writes this rank's contribution to rank r's output into the contiguous `partial`, of
    shape `shapes[r]` (by default the shape of `out`). Contributions are added in rank order, in
    float32 for the 16-bit types. With `lanes`, `produce` may run for two ranks at once, on streams.
    """

    group: Group
    produce: Produce
    out: torch.Tensor
    name: bytes
    shapes: Sequence[Shape] | None = None
    mean: bool = False
    lanes: bool = False

    def __post_init__(self) -> None:
        alike = (tuple(self.out.shape),) * self.group.world_size
        self.partials = alike if self.shapes is None else self.shapes
        self.nbytes = _bytes_of(self.partials, self.out)


@dataclass(eq=False)
class CountCall(_OfResult):
    """Calls `kernel` once, which produces for all ranks; `out` is the sum over ranks.

    Like `ScatterCall` with equal shapes. Data that the kernel reports as written is sent to the
    peers while it still runs. Only where streams can wait for a kernel.
    """

    group: Group
    kernel: Count
    out: torch.Tensor
    name: bytes
    mean: bool


@dataclass(eq=False)
class AllReduceCall(_OfResult):
    """Calls `produce(r, partial)` for each rank r, its own last; `out` is the sum over ranks.

    `produce` writes this rank's contribution to part r of `out`, which is contiguous and whose
    dimension 0 `split` divides, into the contiguous `partial`. Without `split` it is called once,
    with this rank and memory for all of `out`. Contributions are added in rank order, in float32
    for the 16-bit types. All ranks get the same bits.
    """

    group: Group
    produce: Produce
    out: torch.Tensor
    name: bytes
    split: Split | None = None
    mean: bool = False


@dataclass(eq=False)
class ExchangeCall:
    """Calls `give(r, memory)` for each peer r, `consume()`, and `take(r, memory)` for each.

    `give` writes the data for r to the memory, and `take` finds there the data from r, which
    travels while `consume` runs. Memory is 1-D and contiguous, of `sizes[source][to]` bytes.
    """

    group: Group
    give: Pass
    consume: ConsumeHere
    take: Pass
    device: torch.device
    name: bytes
    sizes: Sizes


@dataclass(eq=False)
class BoxesCall(_OfOperands):
    """Exchanges parts of tensors, and writes them to their places in `outputs`.

    Tensors may have any strides, except that the last dimension's must be 1.
    """

    group: Group
    packed: PackedBoxes
    shard: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    name: bytes

    def by_messages(self) -> ExchangeCall:
        """The same call with messages that kernels of torch write and read."""
        packed, tensors, outputs = self.packed, self.shard, self.outputs
        return ExchangeCall(
            self.group,
            lambda to, memory: packed.give(tensors, to, memory),
            lambda: packed.keep(tensors, outputs),
            lambda source, memory: packed.take(outputs, source, memory),
            self.device,
            self.name,
            packed.sizes,
        )


@dataclass(eq=False)
class GatherAndScatterCall(_OfResult):
    """Calls `consume(shard of rank r, r, partial)` for each rank r; sums the partials in `out`.

    Like `GatherCall`, but `consume` also writes this rank's contribution to rank r into the
    contiguous `partial` of shape `partials[r]` and the dtype of `out`. It gets its own shard as
    given. Contributions are added in rank order; with `ring` in the order rank, rank-1, ..., with
    room for two of them at a time instead of one for each rank.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: ConsumeAndProduce
    out: torch.Tensor
    name: bytes
    shapes: Sequence[Shapes] | None
    partials: Sequence[Shape]
    ring: bool = False

    def __post_init__(self) -> None:
        self.shards = Shards(self.shard, self.group.world_size, self.shapes)
        self.nbytes = _bytes_of(self.partials, self.out)


@dataclass(eq=False)
class TogetherAndScatterCall(_OfResult):
    """Calls `consume(partial)` for this rank's shard, then `consume_others` once for all peers.

    Like `TogetherCall`, but both functions also write contributions, in the dtype of `out`:
    `consume` to a 1-D tensor, for one tensor of the shard after the other, `consume_others` to
    memory like the peers' rows. `out` is the sum over ranks, in rank order, 1-D.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: Callable[[torch.Tensor], None]
    consume_others: ConsumeOthersAndProduce
    out: torch.Tensor
    name: bytes
    layout: SequenceLayout


#: A call of any pattern.
PatternCall: TypeAlias = (
    GatherCall
    | GatherIntoCall
    | PollCall
    | TogetherCall
    | ScatterCall
    | CountCall
    | AllReduceCall
    | ExchangeCall
    | BoxesCall
    | GatherAndScatterCall
    | TogetherAndScatterCall
)


def _bytes_of(shapes: Sequence[Shape], like: torch.Tensor) -> tuple[int, ...]:
    item = like.element_size()
    return tuple([math.prod(shape) * item for shape in shapes])


class Collective(Protocol):
    """A background collective on tensors of one shape and dtype, prepared once for a group."""

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Starts the collective and returns its result, which `wait_tensor` completes.

        Writes it to `out`, if given: contiguous, and of the result's shape and dtype. Never waits
        for a peer, not even in the first call.
        """
