"""Which algorithm would 8 H100 take? The model behind the thresholds of fused ops on GPUs.

    python benchmarks/gpu_algorithms.py

No GPU is used. For each op and size it prints the microseconds of each algorithm, and the one
that the op takes without a table of `symm-cp tune` (ops/matmul/algorithms.py,
ops/attention/choice.py).

The figures are from NVIDIA's data sheet of the H100 SXM (dense bfloat16: 989 TFLOP/s, 3.35 TB/s,
NVLink 4 with 450 GB/s per direction). The share of a peak that is reached is an assumption: 0.65
for attention (FlashAttention-3, Shah et al. 2024, reports up to 0.75), 0.8 for links. GPUs compute
products in *tiles*, one on a multiprocessor at a time, so a shard with fewer tiles than the GPU has
multiprocessors takes as long as a shard with a tile for each (wave quantization, as NVIDIA's guide
to matrix multiplication calls it). The tiles and the share of 0.65 were fitted to ten
all-gather-matmuls that others have measured on 8 H100 (tests/bench/test_gpu_algorithms.py).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.ops.attention.choice import by_size as algorithm_of_attention
from symm_cp.ops.matmul import algorithms
from symm_cp.schedule import Compute, Copy, Step
from symm_cp.schedule.layout import head_tail, sequential
from symm_cp.schedule.mask import CAUSAL, NO_MASK
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    CONSUME_AND_REDUCE_SCATTER,
    PRODUCE_AND_ALL_REDUCE,
    PRODUCE_AND_REDUCE_SCATTER,
    Variant,
)
from symm_cp.schedule.patterns.produce_and_all_reduce import in_one_shot
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.tiles import tiles, tiles_of_others

FLOPS, MULTIPROCESSORS = 0.65 * 989e12, 132
MEMORY, LINK = 3.35e12, 0.8 * 450e9  # bytes a second
KERNEL, SIGNAL = 4e-6, 2e-6  # seconds
ITEM, WIDE = 2, 4  # bytes of bfloat16, and of float32, in which results are merged
DEVICE = torch.device("cuda")
#: Tiles of products: rows, columns, and speed relative to the first tile. Libraries take smaller
#: tiles where large tiles would leave multiprocessors idle.
TILES = ((128, 256, 1.0), (128, 128, 0.8), (64, 128, 0.5))
#: Seconds that the host takes to issue a pass of attention by a plan, by `backward`: for a call,
#: and for each rank (host_time.py with SYMM_CP_ATTENTION). A real driver's launches come on top.
HOST = {
    False: {"pipeline": (7e-6, 1.8e-6), "together": (9e-6, 0.0)},
    True: {"pipeline": (31e-6, 3e-6), "together": (36e-6, 0.0)},
}


def product(rows: int, inner: int, columns: int) -> float:
    """Seconds of a matmul of `rows` x `inner` with `inner` x `columns`."""
    waves = (
        math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / MULTIPROCESSORS)
        * (2.0 * height * width * inner / (FLOPS / MULTIPROCESSORS * speed))
        for height, width, speed in TILES
    )
    moved = (inner * columns + rows * (inner + columns)) * ITEM / MEMORY
    return KERNEL + max(min(waves), moved)


def copy(nbytes: float) -> float:
    """Seconds of a copy within a GPU's memory."""
    return 2 * nbytes / MEMORY


def reduce(nbytes: float, parts: int) -> float:
    """Seconds of a sum of `parts` parts of `nbytes` bytes each."""
    return (parts + 1) * nbytes / MEMORY


def of_schedule(
    variant: Variant,
    ranks: int,
    kernel: float | Callable[[int, Compute], float],
    shard: float,
    partial: float,
) -> float:
    """Seconds of a schedule, of which each kernel takes `kernel` seconds; sizes in bytes."""

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Copy):
            nbytes = partial if step.dst.buffer == "partials" else shard
            return nbytes / LINK if step.src.rank != step.dst.rank else copy(nbytes)
        if not isinstance(step, Compute):
            return 0.0
        if step.kernel in ("reduce", "add"):
            return reduce(partial, ranks)
        return kernel(rank, step) if callable(kernel) else kernel

    return simulate([variant.schedules(ranks)], cost, signal=SIGNAL).total


@dataclass(frozen=True)
class Matmul:
    """A fused matmul: the `rows` of a rank, and the features of its two matrices.

    `op` is "gather", "scatter", "all-reduce", or "gradient", the weight gradient of a gather.
    """

    op: str
    rows: int
    inner: int
    columns: int

    def seconds(self, ranks: int) -> dict[str, float]:
        """Returns the seconds of each way."""
        one, at_once = self._product(1), self._product(ranks)
        if self.op in ("gather", "gradient"):
            shard = self.rows * self.inner * ITEM
            gather = ALL_GATHER_AND_CONSUME
            by_shards = of_schedule(gather.staged(), ranks, one, shard, 0.0)
            whole = of_schedule(gather.staged(keep=True), ranks, 0.0, shard, 0.0) + at_once
            return {"shards": by_shards, "whole": whole}
        partial = self.rows * self.columns * ITEM
        if self.op == "scatter":
            scatter = PRODUCE_AND_REDUCE_SCATTER.staged()
            by_shards = of_schedule(scatter, ranks, one, 0.0, partial)
            whole = of_schedule(scatter, ranks, copy(partial), 0.0, partial) + at_once
            return {"shards": by_shards, "whole": whole}
        form = PRODUCE_AND_ALL_REDUCE.staged
        by_shards = of_schedule(form(), ranks, one, partial, partial)
        one_shot = in_one_shot(partial * ranks, ranks)
        summed = partial * ranks if one_shot else partial
        variant = form(one_shot=True) if one_shot else form(whole=True)
        whole = of_schedule(variant, ranks, at_once, summed, summed)
        return {"shards": by_shards, "whole": whole}

    def by_size(self) -> str:
        """Returns the algorithm that the op takes without a measurement."""
        if self.op == "gather":
            return algorithms.for_gather(DEVICE, self.rows, self.columns)
        if self.op == "gradient":
            return algorithms.for_gradient(DEVICE, self.rows, self.columns)
        return algorithms.for_sum(DEVICE, self.rows, self.columns)

    def _product(self, shards: int) -> float:
        if self.op != "gradient":
            return product(shards * self.rows, self.inner, self.columns)
        seconds = product(self.inner, shards * self.rows, self.columns)
        # Each product is rounded to a buffer, then added to a float32 sum: five times the bytes of
        # the result in all (a copy moves two).
        return seconds + (copy(2.5 * self.inner * self.columns * ITEM) if shards == 1 else 0.0)


@dataclass(frozen=True)
class Attention:
    """A pass of attention over a sequence on several ranks, by keys."""

    tokens: int
    heads: int
    kv_heads: int
    causal: bool = True
    backward: bool = False
    features: int = 128

    def seconds(self, ranks: int) -> dict[str, float]:
        """Returns the seconds of each way: of the device or the host, whichever is longer."""
        pattern = CONSUME_AND_REDUCE_SCATTER if self.backward else ALL_GATHER_AND_CONSUME
        seconds = {
            "pipeline": self._of_schedule(pattern.staged(), ranks),
            "together": self._of_schedule(pattern.staged(together=True), ranks),
        }
        for algorithm, (call, rank) in HOST[self.backward].items():
            seconds[algorithm] = max(seconds[algorithm], call + rank * ranks)
        return seconds

    def by_size(self) -> str:
        """Returns the algorithm that the op takes without a measurement."""
        gathered = 2 * self.tokens * self.kv_heads * self.features * ITEM
        return algorithm_of_attention(self.heads, self.kv_heads, gathered)

    def _of_schedule(self, variant: Variant, ranks: int) -> float:
        rows = self.tokens // ranks
        shard = 2 * rows * self.kv_heads * self.features * ITEM

        def kernel(rank: int, step: Compute) -> float:
            others = step.kernel == "consume others"
            return self._kernels(ranks, rank, None if others else step.index)

        return of_schedule(variant, ranks, kernel, shard, shard * WIDE / ITEM)

    def _kernels(self, ranks: int, rank: int, owner: int | None) -> float:
        """Seconds of a rank's tiles against the keys of `owner` (None: of all others)."""
        layout = (head_tail if self.causal else sequential)(self.tokens, ranks)
        mask = CAUSAL if self.causal else NO_MASK
        if owner is None:
            found = tiles_of_others(layout, mask, rank)
        else:
            found = tiles(layout, mask, rank, owner)
        total = 0.0
        for tile in found:
            operations = 4.0 * self.heads * tile.pairs * self.features
            # Five matmuls instead of two. Each tile's result is merged.
            total += KERNEL + operations * (2.5 if self.backward else 1.0) / FLOPS
            rows = tile.q_end - tile.q_begin
            total += reduce(self.heads * rows * self.features * WIDE, 2)
        return total


def cases() -> Iterator[tuple[Matmul | Attention, int]]:
    """Yields the grid of ops, with the number of ranks."""
    rows = (1, 64, 128, 256, 512, 1024, 2048, 4096)
    for op, ranks in itertools.product(("gather", "scatter", "all-reduce", "gradient"), (2, 4, 8)):
        for inner, columns, count in itertools.product(
            (1024, 4096, 8192, 14336), (1024, 4096, 8192, 14336), rows
        ):
            if op != "all-reduce" or inner == columns:
                yield Matmul(op, count, inner, columns), ranks
    heads = ((8, 8), (32, 32), (32, 16), (32, 8), (64, 8), (8, 1))
    for (of_queries, of_keys), ranks in itertools.product(heads, (2, 4, 8)):
        for tokens, causal, backward in itertools.product(
            (256, 1024, 4096, 8192), (False, True), (False, True)
        ):
            yield Attention(tokens * ranks, of_queries, of_keys, causal, backward), ranks


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for case, ranks in cases():
        seconds = case.seconds(ranks)
        times = ", ".join(f"{algorithm} {each * 1e6:.1f} us" for algorithm, each in seconds.items())
        cost = seconds[case.by_size()] / min(seconds.values())
        print(f"{ranks} ranks, {case}: {times}: {case.by_size()}, {cost:.2f} of the faster")


if __name__ == "__main__":
    main()
