"""Predicts how long attention over a sequence on several ranks takes, by each method.

`allgather`: the schedule of the pipeline, in which each kernel attends to the keys of one rank. On
streams also `together`, in which one kernel attends to the keys of all peers.
`ulysses`: an exchange of queries, keys and values, one kernel for the whole sequence and the heads
of a rank, and an exchange of the results. Backward, queries, keys, values, results and their
gradients are exchanged, and three gradients come back.

A kernel takes the time of its operations, five matmuls instead of two in the backward pass; masks
count exactly, by tiles. The slowest rank sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from symm_cp.schedule.layout import SequenceLayout, even_lengths, sequential
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    ALL_TO_ALL,
    CONSUME_AND_REDUCE_SCATTER,
    Variant,
)
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.steps import Compute, Copy, Step
from symm_cp.schedule.tiles import Tile, tiles, tiles_of_others

_WIDE = 4  # bytes of float32, in which partial results are merged and gradients are summed
_BACKWARD = 2.5  # times the operations of the forward pass
#: Seconds that the host takes to issue a pass on streams, by `backward`: for a call, and for each
#: rank (benchmarks/host_time.py). torch's launches on a real driver come on top.
_HOST = {
    False: {"pipeline": (180e-6, 18e-6), "together": (190e-6, 1e-6)},
    True: {"pipeline": (400e-6, 80e-6), "together": (460e-6, 20e-6)},
}
#: The key of each method in `Machine.calls`, the fixed costs of a call.
CALLS = {"allgather": "all_gather_attention", "ulysses": "ulysses_attention"}


@dataclass(frozen=True)
class AttentionWork:
    """A call of attention on all ranks: its sizes, how the sequences are spread, and its masks.

    `masks` holds one mask for all samples, or one for each. `item`: bytes of a `dtype` element.
    """

    batch: int
    heads: int
    kv_heads: int
    features: int
    value_features: int
    dtype: str
    item: int
    queries: SequenceLayout
    keys: SequenceLayout
    masks: tuple[Mask, ...]
    backward: bool = False

    @property
    def key(self) -> str:
        """The name of the work in lists of choices."""
        sizes = f"{self.batch}x{self.heads}x{self.kv_heads}x{self.queries.length}"
        name = "attention backward" if self.backward else "attention"
        return f"{name} {self.dtype} {sizes}x{self.keys.length}x{self.features}"

    def seconds(self, machine: Machine, *, device: str = "cpu", hosts: int = 1) -> dict[str, float]:
        """Returns the predicted seconds of each method for which there are enough heads."""
        found = {"allgather": self._by_keys(machine, device)}
        if self.heads >= self._ranks:
            found["ulysses"] = self._by_heads(machine)
        if hosts > 1:
            # Between hosts a ring passes shards on while kernels run; kernels wait for heads.
            network = machine.network * machine.link_reached
            passed, exchanged = self._between_hosts(hosts)
            found["allgather"] = max(found["allgather"], passed / network)
            if "ulysses" in found:
                found["ulysses"] += exchanged / network
        return {
            method: seconds + machine.calls.get(CALLS[method], 0.0)
            for method, seconds in found.items()
        }

    def seconds_on_streams(self, machine: Machine, *, on_device: bool = False) -> dict[str, float]:
        """Returns the predicted seconds of a pass by keys, as "pipeline" and "together".

        The time of the device or the host, whichever is longer; `on_device`: of the device only.
        """
        pattern = CONSUME_AND_REDUCE_SCATTER if self.backward else ALL_GATHER_AND_CONSUME
        found = {
            "pipeline": self._of_variant(machine, pattern.staged()),
            "together": self._of_variant(machine, pattern.staged(together=True)),
        }
        if not on_device:
            for way, (call, rank) in _HOST[self.backward].items():
                found[way] = max(found[way], call + rank * self._ranks)
        return found

    @property
    def _ranks(self) -> int:
        return self.keys.world_size

    def _by_keys(self, machine: Machine, device: str) -> float:
        pattern = CONSUME_AND_REDUCE_SCATTER if self.backward else ALL_GATHER_AND_CONSUME
        variant = pattern.direct() if device == "cpu" else pattern.staged()
        return self._of_variant(machine, variant)

    def _of_variant(self, machine: Machine, variant: Variant) -> float:
        row = self.batch * self.kv_heads * (self.features + self.value_features)

        def cost(rank: int, step: Step) -> float:
            if isinstance(step, Copy):
                sums, owner = step.dst.buffer == "partials", step.src.rank
                rows = self.keys.lengths[rank if sums else owner]
                nbytes = rows * row * (_WIDE if sums else self.item)
                remote = step.src.rank != step.dst.rank
                return machine.transfer(nbytes) if remote else machine.copy(nbytes)
            if not isinstance(step, Compute):
                return 0.0
            if step.kernel in ("reduce", "add"):
                return machine.reduce(self.keys.lengths[rank] * row * _WIDE, self._ranks)
            remote = any(region.rank != rank for region in step.reads)
            nbytes = self.keys.lengths[step.index] * row * self.item
            others = step.kernel == "consume others"
            kernels = self._kernels(
                machine, rank, None if others else step.index, merged=self._ranks > 1
            )
            return kernels + (machine.remote(nbytes) if remote else 0.0)

        schedules = variant.schedules(self._ranks)
        return simulate([schedules], cost, signal=machine.signal_seconds).total

    def _between_hosts(self, hosts: int) -> tuple[float, float]:
        """The bytes that a rank sends to other hosts, by each method."""
        queries, keys = max(self.queries.lengths), max(self.keys.lengths)
        of_keys = keys * self.kv_heads * (self.features + self.value_features)
        results = queries * self.heads * self.value_features
        inputs = queries * self.heads * self.features + of_keys
        passed = of_keys * (self.item + _WIDE * self.backward) * (hosts - 1)
        numbers = 2 * (inputs + results) if self.backward else inputs + results
        exchanged = numbers * self.item * (hosts - 1) / hosts
        return float(self.batch * passed), float(self.batch * exchanged)

    def _kernels(self, machine: Machine, rank: int, owner: int | None, *, merged: bool) -> float:
        """Seconds of a rank's tiles against the keys of `owner` (None: of all others), all heads.

        `merged`: each tile's result is merged.
        """
        total = 0.0
        each = self.batch if len(self.masks) == 1 else 1
        for mask in self.masks:
            place = self.queries, self.queries.lengths[rank]
            found = (
                tiles_of_others(self.keys, mask, rank, *place)
                if owner is None
                else tiles(self.keys, mask, rank, owner, *place)
            )
            for tile in found:
                total += self._kernel(machine, tile, each * self.heads)
                if merged:
                    rows = each * self.heads * (tile.q_end - tile.q_begin)
                    features = self.features if self.backward else self.value_features
                    total += machine.reduce(rows * features * _WIDE, 2)
        return total

    def _kernel(self, machine: Machine, tile: Tile, heads: int) -> float:
        flops = 2.0 * heads * tile.pairs * (self.features + self.value_features)
        seconds = machine.attention(flops * (_BACKWARD if self.backward else 1.0), self.dtype)
        return seconds + machine.kernel_seconds

    def _by_heads(self, machine: Machine) -> float:
        heads = even_lengths(self.heads, self._ranks)
        shared = -(-self.heads // self.kv_heads)  # query heads that share one key head
        ends = [sum(heads[: rank + 1]) for rank in range(self._ranks)]
        kv_heads = [
            -(-end // shared) - (end - each) // shared
            for end, each in zip(ends, heads, strict=True)
        ]
        of_query = [each * self.features for each in heads]
        of_result = [each * self.value_features for each in heads]
        of_keys = [each * (self.features + self.value_features) for each in kv_heads]
        there = [(self.queries, of_query), (self.keys, of_keys)]
        back = [(self.queries, of_result)]
        if self.backward:
            there += [(self.queries, of_result)] * 2
            back = [(self.queries, of_query), (self.keys, of_keys)]
        whole = [sequential(layout.length, 1) for layout in (self.queries, self.keys)]
        each = self.batch if len(self.masks) == 1 else 1
        kernels = sum(
            self._kernel(machine, tile, each * max(heads))
            for mask in self.masks
            for tile in tiles(whole[1], mask, 0, 0, whole[0], whole[0].length)
        )
        return self._exchange(machine, there, 1) + kernels + self._exchange(machine, back, -1)

    def _exchange(
        self,
        machine: Machine,
        parts: Sequence[tuple[SequenceLayout, Sequence[int]]],
        direction: int,
    ) -> float:
        """Seconds of an exchange; a part is a layout and each rank's elements of a position."""

        def nbytes(source: int, to: int) -> float:
            rows, heads = (source, to)[::direction]
            numbers = sum(layout.lengths[rows] * each[heads] for layout, each in parts)
            return float(self.batch * self.item * numbers)

        cost = _cost_of_exchange(machine, nbytes)
        schedules = ALL_TO_ALL.direct().schedules(self._ranks)
        return simulate([schedules], cost, signal=machine.signal_seconds).total


def _cost_of_exchange(
    machine: Machine, nbytes: Callable[[int, int], float]
) -> Callable[[int, Step], float]:
    def cost(rank: int, step: Step) -> float:
        if not isinstance(step, Copy):
            return 0.0
        if step.src.rank != rank:
            return machine.transfer(nbytes(step.src.rank, rank))
        to = step.dst.chunk if step.dst.buffer == "slot" else rank
        assert to is not None
        return machine.copy(nbytes(rank, to))

    return cost
