"""Matmuls by tiles: one persistent kernel that waits for shards, or signals finished parts.

`arrival_matmul` multiplies shards that are still in transit. Its programs take the tiles of the own
shard first, then tiles of the peers' shards in the order of their pulls, and poll a shard's word
before they read the shard. A program waits for that word alone, never for another program, so it
does not matter how many of them run at a time; and the copy stream writes the word, behind a pull
by copy engine, so neither needs a multiprocessor that this kernel keeps.

`counted_matmul` computes the partial sums for all ranks, in the order in which the peers pull them.
Its programs count the tiles of each peer's part that they have stored; the program that completes
a part raises its word to the epoch, for which a stream waits before it signals the peer. The
counter is back at 0 then. This kernel waits for nothing.

Words hold the number of the call and only grow, so nothing is reset between calls. Threads copy
to shared memory (cp.async), and an acquire orders such copies; TMA would need a proxy fence as
well.

Source: Flux (Chang et al., 2024); for the order of tiles, Triton's tutorial on matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: The dtypes that the kernels multiply.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a tile, elements of the inner dimension at a time, warps, stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def tiling_of(dtype: torch.dtype, capability: int) -> Tiling:
    """Returns the tiling for a dtype and a major compute capability.

    tests/cuda/test_compiled.py shows that tiles fit into shared memory and loops into registers.
    """
    if capability in (9, 10) and dtype.itemsize == 2:
        return Tiling(128, 256, 64, 8, 3)
    return Tiling(128, 128, 64 // dtype.itemsize, 8, 4)


@dataclass(frozen=True)
class Words:
    """Where a kernel and a stream of one rank signal each other: word i * `step` of `words`.

    Word i belongs to the i-th peer, and is raised to `epoch`. Behind it lies the kernel's counter.
    """

    words: torch.Tensor
    step: int
    epoch: int


@triton.jit
def _store_tile(
    tile,
    a,
    weight,
    out,
    rows,
    columns,
    inner,
    a_s,
    w_k,
    w_n,
    out_s,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes a tile of the product of `a` (rows, inner) and `weight` (inner, columns)."""
    # Eight blocks of rows at a time share the columns of the weight in the cache.
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = tile // (8 * across) * 8
    height = tl.minimum(down - first, 8)
    i = (first + tile % (8 * across) % height) * ROWS + tl.arange(0, ROWS)
    j = tile % (8 * across) // height * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    # Rows and columns out of range wrap around: only the inner dimension needs masks.
    a_at = a + (i % rows).to(tl.int64)[:, None] * a_s + k[None, :]
    w_at = weight + k.to(tl.int64)[:, None] * w_k + (j % columns).to(tl.int64)[None, :] * w_n
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, inner, INNER):
        there = k < inner - begin
        x = tl.load(a_at, mask=there[None, :], other=0.0)
        w = tl.load(w_at, mask=there[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        a_at += INNER
        w_at += INNER * w_k
    out_at = out + i.to(tl.int64)[:, None] * out_s + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


# A launch that compiles delays the peers: arguments that change between calls are not specialised.
@triton.jit(do_not_specialize=["epoch", "rank", "ranks", "rows", "first_place"])
def arrival_matmul_kernel(
    own,
    pulled,
    weight,
    out,
    words,
    word_step,
    epoch,
    rank,
    ranks,
    first_place,
    rows,
    columns,
    inner,
    own_s,
    pulled_shard,
    pulled_s,
    w_k,
    w_n,
    out_s,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program computes tiles in turn; arguments as in `arrival_matmul`."""
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = out + rank.to(tl.int64) * rows * out_s
    for tile in range(first, tiles, programs):
        _store_tile(
            tile, own, weight, mine, rows, columns, inner, own_s, w_k, w_n, out_s,
            ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, PRECISION=PRECISION,
        )  # fmt: skip
    # The program's next tile is one of a peer's shard.
    first += tl.cdiv(tl.maximum(tiles - first, 0), programs) * programs
    for tile in range(first, tiles * ranks, programs):
        turn = tile // tiles - 1
        # Waits for the shard: the acquire makes the copy visible that precedes the word.
        word = words + turn * word_step
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") < epoch:
            pass
        place = pulled + ((first_place + turn) % ranks).to(tl.int64) * pulled_shard
        theirs = out + ((rank + 1 + turn) % ranks).to(tl.int64) * rows * out_s
        _store_tile(
            tile % tiles, place, weight, theirs, rows, columns, inner, pulled_s, w_k, w_n, out_s,
            ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, PRECISION=PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["epoch", "rank", "ranks", "rows"])
def counted_matmul_kernel(
    a,
    weight,
    partials,
    own,
    words,
    word_step,
    epoch,
    rank,
    ranks,
    rows,
    columns,
    inner,
    a_s,
    w_k,
    w_n,
    partial_of_rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program computes tiles in turn; arguments as in `counted_matmul`."""
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    first, programs, others = tl.program_id(0), tl.num_programs(0), tiles * (ranks - 1)
    for tile in range(first, others, programs):
        turn = tile // tiles
        to = ((rank + 1 + turn) % ranks).to(tl.int64)
        _store_tile(
            tile % tiles, a + to * rows * a_s, weight, partials + to * partial_of_rank,
            rows, columns, inner, a_s, w_k, w_n, columns,
            ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, PRECISION=PRECISION,
        )  # fmt: skip
        # One thread counts for the program when all threads have stored. The program that counts
        # the last tile has seen the others' counts, so its word publishes their tiles, too.
        tl.debug_barrier()
        word = words + turn * word_step
        if tl.atomic_add(word + 1, 1, sem="acq_rel", scope="gpu") == tiles - 1:
            tl.atomic_xchg(word + 1, 0, sem="relaxed", scope="gpu")
            tl.atomic_xchg(word, epoch, sem="release", scope="sys")
    first += tl.cdiv(tl.maximum(others - first, 0), programs) * programs
    for tile in range(first, tiles * ranks, programs):
        _store_tile(
            tile - others, a + rank.to(tl.int64) * rows * a_s, weight, own,
            rows, columns, inner, a_s, w_k, w_n, columns,
            ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, PRECISION=PRECISION,
        )  # fmt: skip


def arrival_matmul(
    shard: torch.Tensor,
    pulled: torch.Tensor,
    first_place: int,
    weight: torch.Tensor,
    out: torch.Tensor,
    rank: int,
    arrivals: Words,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Writes the product of all ranks' shards and a weight to `out`, in rank order.

    `shard` is (M, K), `weight` (K, N) of any strides, `out` (W * M, N); rows are contiguous, no
    size is 0. The i-th peer's shard comes to place (`first_place` + i) mod W of `pulled`, which is
    (places, M, K).
    """
    (M, K), N = shard.shape, weight.shape[1]
    ranks = out.shape[0] // M
    tiling, programs = _fitting(shard, out.shape, tiling, programs)
    arrival_matmul_kernel[(programs,)](
        shard, pulled, weight, out, arrivals.words, arrivals.step, arrivals.epoch, rank, ranks,
        first_place, M, N, K, shard.stride(0), *pulled.stride()[:2], *weight.stride(),
        out.stride(0), **_options(tiling, shard.dtype),
    )  # fmt: skip


def counted_matmul(
    a: torch.Tensor,
    weight: torch.Tensor,
    partials: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    counts: Words,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Writes the peers' parts of a product to `partials`, which is (W, M, N), and its own to `own`.

    `a` is (W * M, K), `weight` (K, N) of any strides, `own` (M, N); rows are contiguous, no size
    but K is 0. Raises the i-th peer's word when that peer's part is complete. Words are int32;
    behind each lies a counter that must be 0 before the first call.
    """
    (M, N), K = own.shape, a.shape[1]
    tiling, programs = _fitting(a, (a.shape[0], N), tiling, programs)
    counted_matmul_kernel[(programs,)](
        a, weight, partials, own, counts.words, counts.step, counts.epoch, rank, a.shape[0] // M,
        M, N, K, a.stride(0), *weight.stride(), partials.stride(0), **_options(tiling, a.dtype),
    )  # fmt: skip


def _fitting(
    a: torch.Tensor, product: Sequence[int], tiling: Tiling | None, programs: int | None
) -> tuple[Tiling, int]:
    if tiling is None or programs is None:
        gpu = torch.cuda.get_device_properties(a.device)
        tiling = tiling or tiling_of(a.dtype, gpu.major)
        programs = programs or gpu.multi_processor_count
    work = triton.cdiv(product[0], tiling.rows) * triton.cdiv(product[1], tiling.columns)
    return tiling, min(programs, work)


def _options(tiling: Tiling, dtype: torch.dtype) -> dict[str, int | str | bool]:
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "INNER": tiling.inner,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        "enable_fp_fusion": True,
    }
