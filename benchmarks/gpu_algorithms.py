"""Which algorithm would 8 H100 take? The model behind the thresholds of fused ops on GPUs.

    python benchmarks/gpu_algorithms.py

No GPU is used. For each op and size it prints the microseconds of each algorithm, and the one
that the op takes without a table of `symm-cp tune` (ops/matmul/algorithms.py,
ops/attention/choice.py). `--layers` prints the fused matmuls of two Llamas instead, beside the
limit (the matmul or the transfer alone, whichever is longer) and torch's fused ops.

The figures are from NVIDIA's data sheet of the H100 SXM (dense bfloat16: 989 TFLOP/s, 3.35 TB/s,
NVLink 4 with 450 GB/s per direction). The share of a peak that is reached is an assumption: 0.8 for
links, and for attention by kernel (`ATTENTION`). GPUs compute products in *tiles*, one on a
multiprocessor at a time, so a shard with fewer tiles than the GPU has multiprocessors takes as long
as a shard with a tile for each (wave quantization, as NVIDIA's guide to matrix multiplication calls
it), unless a kernel of another stream takes the idle ones. torch's ops and our algorithm `lanes` do
that. Whether GPUs do is open: ten of torch's all-gather-matmuls on 8 H100, as others have measured
them (tests/bench/test_gpu_algorithms.py), took 1.00 to 1.52 (once 0.83) of the model's time if
kernels share multiprocessors, 0.72 to 1.29 if they do not. The tiles and the share of 0.65 were
fitted to them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.ops.attention.choice import by_size as algorithm_of_attention
from symm_cp.ops.matmul import algorithms
from symm_cp.schedule import Compute, Copy, Schedule, Signal, Step, Wait
from symm_cp.schedule.layout import head_tail, sequential
from symm_cp.schedule.mask import CAUSAL, NO_MASK
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    CONSUME_AND_REDUCE_SCATTER,
    PRODUCE_AND_ALL_REDUCE,
    PRODUCE_AND_REDUCE_SCATTER,
    Variant,
)
from symm_cp.schedule.patterns.pattern import Draft
from symm_cp.schedule.patterns.produce_and_all_reduce import in_one_shot
from symm_cp.schedule.simulate import simulate_shared
from symm_cp.schedule.tiles import tiles, tiles_of_others

PEAK, FLOPS, MULTIPROCESSORS = 989e12, 0.65 * 989e12, 132
MEMORY, LINK = 3.35e12, 0.8 * 450e9  # bytes a second
KERNEL, SIGNAL = 4e-6, 2e-6  # seconds
ITEM, WIDE = 2, 4  # bytes of bfloat16, and of float32, in which results are merged
DEVICE = torch.device("cuda")
#: Shares of the peak that attention reaches: cuDNN's kernel and FlashAttention-3 (up to 0.75 in
#: Shah et al., 2024), or FlashAttention-2, 1.6 times as slow, which torch takes unless told
#: otherwise (`sdpa_kernel`, `activate_flash_attention_impl`).
ATTENTION = {"cudnn": 0.65, "flash": 0.4}
#: Tiles of products: rows, columns, and speed relative to the first tile. Libraries take smaller
#: tiles where large tiles would leave multiprocessors idle.
TILES = ((128, 256, 1.0), (128, 128, 0.8), (64, 128, 0.5))
#: Seconds that the host takes to issue a pass of attention by a plan, by `backward`: for a call,
#: and for each rank (loopback.py --driver idle). A real driver's launches come on top.
HOST = {
    False: {"pipeline": (7e-6, 1.8e-6), "together": (9e-6, 0.0)},
    True: {"pipeline": (31e-6, 3e-6), "together": (36e-6, 0.0)},
}


@dataclass(frozen=True)
class Product:
    """A matmul: its tiles, the seconds of each on a multiprocessor, and the bytes that it moves."""

    tiles: int
    each: float
    nbytes: float

    @classmethod
    def of(cls, rows: int, inner: int, columns: int) -> Product:
        """The matmul of `rows` x `inner` with `inner` x `columns`, in the fastest tiles."""
        nbytes = (inner * columns + rows * (inner + columns)) * ITEM
        cuts = [
            cls(
                math.ceil(rows / height) * math.ceil(columns / width),
                2.0 * height * width * inner / (FLOPS / MULTIPROCESSORS * speed),
                nbytes,
            )
            for height, width, speed in TILES
        ]
        return min(cuts, key=lambda cut: cut.alone)

    @property
    def alone(self) -> float:
        """Its seconds on an idle GPU."""
        waves = math.ceil(self.tiles / MULTIPROCESSORS) * self.each
        return KERNEL + max(waves, self.nbytes / MEMORY)


class Gpu:
    """When the steps of one GPU end; `fills`: kernels of two streams share multiprocessors.

    Tiles go to the multiprocessor that is idle first, in the order in which kernels begin. Copies
    from peers share a link, kernels share the memory. Without `fills`, a kernel begins when the one
    before has ended.
    """

    def __init__(self, *, fills: bool) -> None:
        self.fills = fills
        self.free = [0.0] * MULTIPROCESSORS
        self.memory = self.link = 0.0

    def pull(self, nbytes: float, start: float) -> float:
        """Returns when a copy from a peer ends."""
        self.link = max(self.link, start) + nbytes / LINK
        return self.link

    def multiply(self, kernel: Product, start: float) -> float:
        """Returns when a matmul ends."""
        start = (start if self.fills else max(start, *self.free, self.memory)) + KERNEL
        free = [max(time, start) for time in self.free]
        tiles, end = kernel.tiles, start
        heapq.heapify(free)
        while tiles:
            # Once each multiprocessor is at most a tile behind another, all take turns.
            if tiles > MULTIPROCESSORS and max(free) - free[0] <= kernel.each:
                turns = tiles // MULTIPROCESSORS
                free = [time + turns * kernel.each for time in free]
                tiles -= turns * MULTIPROCESSORS
                end = max(end, *free)
            else:
                last = heapq.heapreplace(free, free[0] + kernel.each) + kernel.each
                end, tiles = max(end, last), tiles - 1
        self.free = free
        self.memory = max(self.memory, start) + kernel.nbytes / MEMORY
        return max(end, self.memory)


def copy(nbytes: float) -> float:
    """Seconds of a copy within a GPU's memory."""
    return 2 * nbytes / MEMORY


def reduce(nbytes: float, parts: int) -> float:
    """Seconds of a sum of `parts` parts of `nbytes` bytes each."""
    return (parts + 1) * nbytes / MEMORY


#: Of a kernel: its seconds, or a matmul.
Kernel: TypeAlias = "float | Product | Callable[[int, Compute], float]"


def of_schedule(
    schedules: Sequence[Schedule], kernel: Kernel, shard: float, partial: float, *, fills: bool
) -> float:
    """Seconds of a call of which each kernel is `kernel`; sizes in bytes."""
    gpus = [Gpu(fills=fills) for _ in schedules]

    def end(rank: int, step: Step, start: float) -> float:
        if isinstance(step, Copy):
            nbytes = partial if step.dst.buffer == "partials" else shard
            if step.src.rank != step.dst.rank:
                return gpus[rank].pull(nbytes, start)
            return start + copy(nbytes)
        if not isinstance(step, Compute):
            return start
        if step.kernel in ("reduce", "add"):
            return start + reduce(partial, len(schedules))
        if step.kernel == "barrier":
            return start + KERNEL
        if isinstance(kernel, Product):
            return gpus[rank].multiply(kernel, start)
        return start + (kernel(rank, step) if callable(kernel) else kernel)

    return simulate_shared([schedules], end, signal=SIGNAL).total


class Torchs(Draft):
    """The pipelines of torch's fused matmuls on two streams, as torch 2.13 makes them."""

    def barrier(self, lane: str, name: str) -> None:
        """All ranks wait for all."""
        self.add(lane, Compute("barrier", 0, (), ()), *self.signals(name), *self.waits(name))

    def follow(self, lane: str, other: str, name: str) -> None:
        """A stream waits for what another was given so far."""
        self.add(other, Signal(self.rank, name))
        self.add(lane, Wait(self.rank, name))

    def schedule(self) -> Schedule:
        """The steps of both streams."""
        lanes: dict[str, list[Step]] = {}
        for lane, step in self.order:
            lanes.setdefault(lane, []).append(step)
        named = {lane: tuple(steps) for lane, steps in lanes.items()}
        return Schedule("torch's", self.rank, self.world_size, named, self.slots)

    def gather(self) -> Schedule:
        """`_pipelined_all_gather_and_consume`."""
        self.barrier("compute", "begin")
        self.compute(Copy(self.own("input"), self.own("slot")))
        self.barrier("compute", "ready")
        self.follow("compute2", "compute", "begun")
        self.compute(Compute("consume", self.rank, (), ()))
        for turn, peer in enumerate(self.peers, 1):
            pull = Copy(self.of(peer, "slot"), self.own("gathered", peer))
            self.add("compute2" if turn % 2 else "compute", pull, Compute("consume", peer, (), ()))
        self.follow("compute", "compute2", "ended")
        self.barrier("compute", "end")
        return self.schedule()

    def scatter(self) -> Schedule:
        """`_pipelined_produce_and_all2all`, and the sum behind it."""
        self.barrier("compute", "begin")
        self.follow("compute2", "compute", "begun")
        for turn, peer in enumerate(self.peers, 1):
            lane, source = (
                "compute2" if turn % 2 else "compute",
                (self.rank - turn) % self.world_size,
            )
            self.add(lane, Compute("produce", peer, (), ()))
            self.barrier(lane, f"made{turn}")
            self.add(lane, Copy(self.of(source, "slot"), self.own("partials", source)))
            self.barrier(lane, f"pulled{turn}")
        self.compute(Compute("produce", self.rank, (), ()))
        self.follow("compute", "compute2", "ended")
        self.barrier("compute", "end")
        self.compute(Compute("reduce", 0, (), ()))
        return self.schedule()


@dataclass(frozen=True)
class Matmul:
    """A fused matmul: the `rows` of a rank, and the features of its two matrices.

    `op` is "gather", "scatter", "all-reduce", or "gradient", the weight gradient of a gather.
    """

    op: str
    rows: int
    inner: int
    columns: int

    def seconds(self, ranks: int, *, fills: bool = True) -> dict[str, float]:
        """Returns the seconds of each algorithm; `fills`: see `Gpu`."""
        if self.op in ("gather", "scatter"):
            pattern = ALL_GATHER_AND_CONSUME if self.op == "gather" else PRODUCE_AND_REDUCE_SCATTER
            by_shards = {
                algorithm: self._piped(pattern.staged(lanes=lanes).schedules(ranks), fills=fills)
                for algorithm, lanes in (("shards", False), ("lanes", True))
            }
            return {**by_shards, "whole": self._whole(ranks)}
        if self.op == "gradient":
            one = self._gradient(1)
            schedules = ALL_GATHER_AND_CONSUME.staged().schedules(ranks)
            return {"shards": self._piped(schedules, one), "whole": self._whole(ranks)}
        form, partial = PRODUCE_AND_ALL_REDUCE.staged, self._partial
        by_parts = of_schedule(form().schedules(ranks), self._product, partial, partial, fills=True)
        one_shot = in_one_shot(partial * ranks, ranks)
        summed = partial * ranks if one_shot else partial
        variant = form(one_shot=True) if one_shot else form(whole=True)
        at_once = Product.of(ranks * self.rows, self.inner, self.columns)
        whole = of_schedule(variant.schedules(ranks), at_once, summed, summed, fills=True)
        return {"shards": by_parts, "whole": whole}

    def torchs(self, ranks: int, *, fills: bool) -> float:
        """Returns the seconds of torch's op."""
        drafts = [Torchs(rank, ranks, 2) for rank in range(ranks)]
        made = [d.gather() if self.op == "gather" else d.scatter() for d in drafts]
        return self._piped(made, fills=fills)

    def limit(self, ranks: int) -> float:
        """Returns the seconds of the matmul or of the transfer alone, whichever takes longer."""
        shard = self._shard if self.op == "gather" else self._partial
        at_once = Product.of(ranks * self.rows, self.inner, self.columns)
        return max(at_once.alone, (ranks - 1) * shard / LINK)

    @property
    def _shard(self) -> float:
        return self.rows * self.inner * ITEM

    @property
    def _partial(self) -> float:
        return self.rows * self.columns * ITEM

    @property
    def _product(self) -> Product:
        return Product.of(self.rows, self.inner, self.columns)

    def _piped(
        self, schedules: Sequence[Schedule], kernel: Kernel | None = None, *, fills: bool = True
    ) -> float:
        """Seconds of a pipeline whose kernels are products of shards."""
        kernel = self._product if kernel is None else kernel
        return of_schedule(schedules, kernel, self._shard, self._partial, fills=fills)

    def _whole(self, ranks: int) -> float:
        """Seconds of the gather or scatter alone, and of one product."""
        if self.op == "scatter":
            schedules = PRODUCE_AND_REDUCE_SCATTER.staged().schedules(ranks)
            moved = self._piped(schedules, copy(self._partial))
            return moved + Product.of(ranks * self.rows, self.inner, self.columns).alone
        moved = self._piped(ALL_GATHER_AND_CONSUME.staged(keep=True).schedules(ranks), 0.0)
        if self.op == "gradient":
            return moved + self._gradient(ranks)
        return moved + Product.of(ranks * self.rows, self.inner, self.columns).alone

    def by_size(self) -> str:
        """Returns the algorithm that the op takes without a measurement."""
        if self.op == "gradient":
            return algorithms.for_gradient(DEVICE, self.rows, self.columns)
        by_size = algorithms.for_gather if self.op == "gather" else algorithms.for_sum
        algorithm = by_size(DEVICE, self.rows, self.columns)
        if self.op == "all-reduce" or algorithm == "whole":
            return algorithm
        return (
            "lanes" if algorithms.in_lanes(self.rows, self.columns, MULTIPROCESSORS) else "shards"
        )

    def _gradient(self, shards: int) -> float:
        """Seconds of the weight gradient of some ranks' rows."""
        seconds = Product.of(self.inner, shards * self.rows, self.columns).alone
        # Each product is rounded to a buffer, then added to a float32 sum: five times the bytes of
        # the result in all (a copy moves two).
        return seconds + (copy(2.5 * self.inner * self.columns * ITEM) if shards == 1 else 0.0)


@dataclass(frozen=True)
class Attention:
    """A pass of attention over a sequence on several ranks, by keys, with a kernel of torch's."""

    tokens: int
    heads: int
    kv_heads: int
    causal: bool = True
    backward: bool = False
    features: int = 128
    kernel: str = "cudnn"

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

        schedules = variant.schedules(ranks)
        return of_schedule(schedules, kernel, shard, shard * WIDE / ITEM, fills=True)

    def _kernels(self, ranks: int, rank: int, owner: int | None) -> float:
        """Seconds of a rank's tiles against the keys of `owner` (None: of all others)."""
        layout = (head_tail if self.causal else sequential)(self.tokens, ranks)
        mask = CAUSAL if self.causal else NO_MASK
        if owner is None:
            found = tiles_of_others(layout, mask, rank)
        else:
            found = tiles(layout, mask, rank, owner)
        total, speed = 0.0, ATTENTION[self.kernel] * PEAK
        for tile in found:
            operations = 4.0 * self.heads * tile.pairs * self.features
            # Five matmuls instead of two. Each tile's result is merged.
            total += KERNEL + operations * (2.5 if self.backward else 1.0) / speed
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
        for tokens, causal, backward, kernel in itertools.product(
            (256, 1024, 4096, 8192), (False, True), (False, True), ATTENTION
        ):
            pass_ = Attention(tokens * ranks, of_queries, of_keys, causal, backward, kernel=kernel)
            yield pass_, ranks


def layer(hidden: int, feed: int, heads: int, kv_heads: int, tokens: int, W: int) -> list[Matmul]:
    """The fused matmuls of a layer of a Llama with heads of 128 features."""
    rows = tokens // W
    return [
        Matmul("gather", rows, hidden, (heads + 2 * kv_heads) * 128 // W),
        Matmul("scatter", rows, heads * 128 // W, hidden),
        Matmul("gather", rows, hidden, 2 * feed // W),
        Matmul("scatter", rows, feed // W, hidden),
    ]


#: Layers of 8,192 tokens on 8 ranks.
LAYERS = {
    "Llama-3 8B": layer(4096, 14336, 32, 8, 8192, 8),
    "Llama-3 70B": layer(8192, 28672, 64, 8, 8192, 8),
}


def of_layer(matmuls: Sequence[Matmul], ranks: int = 8) -> dict[str, float]:
    """Returns the seconds of a layer's matmuls: limit, each algorithm, torch's in both models."""
    rows = [
        {
            "limit": matmul.limit(ranks),
            **matmul.seconds(ranks),
            "torch's": matmul.torchs(ranks, fills=True),
            "torch's, not shared": matmul.torchs(ranks, fills=False),
        }
        for matmul in matmuls
    ]
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", action="store_true", help="the fused matmuls of two Llamas")
    if parser.parse_args().layers:
        for name, matmuls in LAYERS.items():
            for part in ([matmul] for matmul in matmuls):
                print(
                    part[0], ", ".join(f"{n} {s * 1e6:.0f} us" for n, s in of_layer(part).items())
                )
            print(name, ", ".join(f"{n} {s * 1e6:.0f} us" for n, s in of_layer(matmuls).items()))
        return
    for case, ranks in cases():
        seconds = case.seconds(ranks)
        times = ", ".join(f"{algorithm} {each * 1e6:.1f} us" for algorithm, each in seconds.items())
        cost = seconds[case.by_size()] / min(seconds.values())
        print(f"{ranks} ranks, {case}: {times}: {case.by_size()}, {cost:.2f} of the faster")


if __name__ == "__main__":
    main()
