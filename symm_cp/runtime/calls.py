"""The interface between ops and runtimes: callbacks, and the complete arguments of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from symm_cp.group.memory import Group
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.shards import Shape, Shards, Split

#: Takes the tensors of a rank's shard, and the rank.
Consume: TypeAlias = Callable[[list[torch.Tensor], int], None]
#: Takes the peers' rows of each tensor of a shard.
ConsumeOthers: TypeAlias = Callable[[list[torch.Tensor]], None]
#: Takes the same rows, and memory for the contributions to them.
ConsumeOthersAndProduce: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
#: Takes the shards of all ranks, in rank order.
Combine: TypeAlias = Callable[[list[torch.Tensor]], None]
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


class GatherCall(NamedTuple):
    """The arguments of `Runtime.all_gather_and_consume`; `split` is given with `gathered`."""

    group: Group
    shards: Shards
    consume: Consume
    name: bytes
    gathered: torch.Tensor | None = None
    split: Split | None = None


class TogetherCall(NamedTuple):
    """The arguments of `Runtime.all_gather_and_consume_together`.

    `shard` is one or more contiguous tensors, whose rows are positions of a sequence spread by
    `layout`. `consume_others` takes the peers' rows of each, in the order of the sequence.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: ConsumeHere
    consume_others: ConsumeOthers
    name: bytes
    layout: SequenceLayout


class TogetherAndScatterCall(NamedTuple):
    """The arguments of `Runtime.consume_and_reduce_scatter_together`.

    Like `TogetherCall`, but both functions also write contributions, in the dtype of `out`:
    `consume` to a 1-D tensor, for one tensor of the shard after the other, `consume_others` to
    memory like the peers' rows. `out` is the sum over ranks, 1-D.
    """

    group: Group
    shard: Sequence[torch.Tensor]
    consume: Callable[[torch.Tensor], None]
    consume_others: ConsumeOthersAndProduce
    out: torch.Tensor
    name: bytes
    layout: SequenceLayout


class CombineCall(NamedTuple):
    """The arguments of `Runtime.all_gather_and_combine`; shards are of one tensor each."""

    group: Group
    shards: Shards
    combine: Combine
    name: bytes


class ScatterCall(NamedTuple):
    """The arguments of `Runtime.produce_and_reduce_scatter`.

    `partials` and `nbytes` are the shape and the size of each rank's partial sum.
    """

    group: Group
    produce: Produce
    out: torch.Tensor
    name: bytes
    partials: Sequence[Shape]
    nbytes: tuple[int, ...]
    mean: bool


class AllReduceCall(NamedTuple):
    """The arguments of `Runtime.produce_and_all_reduce`."""

    group: Group
    produce: Produce
    out: torch.Tensor
    name: bytes
    split: Split | None
    mean: bool


class ExchangeCall(NamedTuple):
    """The arguments of `Runtime.exchange_and_consume`."""

    group: Group
    give: Pass
    consume: ConsumeHere
    take: Pass
    device: torch.device
    name: bytes
    sizes: Sizes


class GatherAndScatterCall(NamedTuple):
    """The arguments of `Runtime.consume_and_reduce_scatter`.

    `partials` and `nbytes` are the shape and the size of the partial sum for each rank.
    """

    group: Group
    shards: Shards
    consume: ConsumeAndProduce
    out: torch.Tensor
    name: bytes
    partials: Sequence[Shape]
    nbytes: tuple[int, ...]
    ring: bool


class Collective(Protocol):
    """A background collective on tensors of one shape and dtype, prepared once for a group."""

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Starts the collective and returns its result, which `wait_tensor` completes.

        Writes it to `out`, if given: contiguous, and of the result's shape and dtype. Never waits
        for a peer, not even in the first call.
        """
