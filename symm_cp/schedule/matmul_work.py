"""Predicts how long a fused matmul takes by shards, and as one matmul.

By shards, each rank's shard is multiplied when it arrives, or is sent when it is computed. As one
matmul, shards are gathered first, or partial sums are scattered last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from symm_cp.schedule.machine import Machine
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    PRODUCE_AND_ALL_REDUCE,
    PRODUCE_AND_REDUCE_SCATTER,
)
from symm_cp.schedule.patterns.produce_and_all_reduce import in_one_shot
from symm_cp.schedule.work import Work

#: A matmul as (rows of the result, inner dimension, columns of the result).
Product: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class MatmulWork:
    """The work of a call: `products` for one rank's shard. `item`: bytes of a `dtype` element.

    Each peer reads `shard` bytes of a rank, or a rank computes partial sums of `partial` bytes for
    each peer; with `everywhere`, all ranks get the sum. `accumulated` is the size of the results to
    which each shard's product is added.
    """

    op: str
    dtype: str
    item: int
    products: tuple[Product, ...]
    shard: int = 0
    partial: int = 0
    accumulated: int = 0
    everywhere: bool = False

    @property
    def key(self) -> str:
        """Names the work in the file of measurements."""
        shapes = ",".join("x".join(map(str, product)) for product in self.products)
        return f"{self.op} {self.dtype} {shapes}"

    def seconds(self, machine: Machine, ranks: int, *, device: str = "cpu") -> dict[str, float]:
        """Returns the predicted seconds of each way."""
        one, all_at_once = (self._kernels(machine, times) for times in (1, ranks))
        if self.everywhere:
            return self._seconds_of_all_reduce(machine, ranks, one, all_at_once, device)
        if self.partial:
            produce = PRODUCE_AND_REDUCE_SCATTER
            scatter = produce.direct() if device == "cpu" else produce.staged()
            copy = machine.copy(self.partial)
            by_shards = Work(self.op, scatter, lambda _: one, partial=self.partial)
            whole = Work(self.op, scatter, lambda _: copy, partial=self.partial)
        else:
            consume = ALL_GATHER_AND_CONSUME
            gather = consume.direct if device == "cpu" else consume.staged
            by_shards = Work(self.op, gather(), lambda _: one, shard=self.shard)
            whole = Work(self.op, gather(keep=True), _nothing, self.shard, fresh=ranks * self.shard)
        return {
            "shards": by_shards.predict(machine, ranks).total,
            "whole": whole.predict(machine, ranks).total + all_at_once,
        }

    def _seconds_of_all_reduce(
        self, machine: Machine, ranks: int, one: float, all_at_once: float, device: str
    ) -> dict[str, float]:
        reduce, nbytes = PRODUCE_AND_ALL_REDUCE, self.partial * ranks
        form = reduce.direct if device == "cpu" else reduce.staged
        one_shot = in_one_shot(nbytes, ranks)
        way = {"one_shot" if one_shot else "whole": True}
        summed = nbytes if one_shot else self.partial
        by_shards = Work(self.op, form(), lambda _: one, self.partial, self.partial)
        whole = Work(self.op, form(**way), lambda _: all_at_once, summed, summed)
        return {
            "shards": by_shards.predict(machine, ranks).total,
            "whole": whole.predict(machine, ranks).total,
        }

    def _kernels(self, machine: Machine, shards: int) -> float:
        total = 0.0
        for rows, inner, columns in self.products:
            # The dimension that grows with the shards: the summed dimension, or rows.
            whole = (rows, shards * inner) if self.accumulated else (shards * rows, inner)
            total += machine.product(*whole, columns, self.dtype, self.item)
        if self.accumulated and shards == 1:
            # Adding to the result reads it again. In 16 bits, each product is also rounded to a
            # buffer, then added to a float32 sum: five times the bytes of the result in all (a
            # copy moves two), and the sum's memory is new in each call.
            total += machine.copy(self.accumulated * (2.5 if self.item == 2 else 0.5))
            total += machine.fresh(self.accumulated) if self.item == 2 else 0.0
        return total


def _nothing(machine: Machine) -> float:
    return 0.0
