"""Attention over shards that are still in transit: one persistent kernel that polls for arrivals.

Every program takes blocks of queries, one after the other, and loops over all shards of the keys:
its own rank's first, then the peers' in the order in which they are pulled. Before it reads a
peer's shard it polls that shard's word, which the copy stream writes after the copy. So attention
starts at once, in one launch, with nothing to merge afterwards.

Source: FlashAttention-2 (Dao, 2023) for the loop over keys; arrival flags after Flux (Chang et al.,
2024), there for matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: The shapes and dtypes that the kernel supports.
DTYPES = (torch.bfloat16, torch.float16)
FEATURES = (64, 128)

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiling:
    """Queries and keys of a tile, warps, and loads in flight (pipeline stages)."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiling_of(features: int, capability: int) -> Tiling:
    """Returns the tiling for a number of features and a major compute capability.

    Two groups of 64 queries each. tests/cuda/test_compiled.py shows that their loops over keys stay
    in registers, and that tiles fit into the shared memory of the smallest GPUs.
    """
    if features == 128:
        # Only Hopper's matrix units read both operands from shared memory and add in few registers.
        return Tiling(128, 128, 8, 2) if capability == 9 else Tiling(128, 64, 8, 3)
    return Tiling(128, 128, 8, 3)


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    q,
    q_at,
    k_at,
    v_at,
    k_s,
    v_s,
    first,
    length,
    start,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds a tile of keys from row `first` on; MASKED unless every query sees all of them."""
    j = first + tl.arange(0, KEYS)
    there = j < length
    k_at += first * k_s
    v_at += first * v_s
    k = tl.load(k_at, mask=there[None, :], other=0.0) if MASKED else tl.load(k_at)
    score = tl.dot(q, k)
    if MASKED:
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (q_at[:, None] >= start + j[None, :])
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    # Rows that have seen no key yet need a finite anchor: -inf minus -inf is NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weight = tl.exp2(score * scale - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    total = total * shrink + tl.sum(weight, 1)
    v = tl.load(v_at, mask=there[:, None], other=0.0) if MASKED else tl.load(v_at)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_top, total


@triton.jit
def _attend_chunk(
    acc,
    top,
    total,
    q,
    q_at,
    q_first,
    q_last,
    keys,
    values,
    k_s,
    v_s,
    length,
    start,
    scale,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
):
    """Adds a chunk of keys: `length` rows from position `start`."""
    e = tl.arange(0, E)
    j = tl.arange(0, KEYS)
    k_at = keys + j[None, :] * k_s + e[:, None]
    v_at = values + j[:, None] * v_s + e[None, :]
    # The keys that the last query of the block sees, and the whole tiles that all queries see.
    count, whole = length, length
    if CAUSAL:
        count = tl.minimum(length, q_last - start + 1)
        whole = tl.maximum(tl.minimum(length, q_first - start + 1), 0)
    whole = whole // KEYS * KEYS
    for first in range(0, whole, KEYS):
        acc, top, total = _attend_tile(
            acc, top, total, q, q_at, k_at, v_at, k_s, v_s, first, length, start, scale,
            MASKED=False, CAUSAL=CAUSAL, KEYS=KEYS,
        )  # fmt: skip
    for first in range(whole, count, KEYS):
        acc, top, total = _attend_tile(
            acc, top, total, q, q_at, k_at, v_at, k_s, v_s, first, length, start, scale,
            MASKED=True, CAUSAL=CAUSAL, KEYS=KEYS,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend_shard(
    acc,
    top,
    total,
    q,
    q_at,
    q_first,
    q_last,
    keys,
    values,
    k_s,
    v_s,
    chunks,
    shard,
    scale,
    CHUNKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
):
    for chunk in range(CHUNKS):
        at = chunks + (shard * CHUNKS + chunk) * 3
        begin, length, start = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
        acc, top, total = _attend_chunk(
            acc, top, total, q, q_at, q_first, q_last, keys + begin * k_s, values + begin * v_s,
            k_s, v_s, length, start, scale, CAUSAL=CAUSAL, KEYS=KEYS, E=E,
        )  # fmt: skip
    return acc, top, total


# A launch that compiles delays the peers. So arguments that change from call to call, or would gain
# nothing, are not specialised for values of 1 and multiples of 16; addresses and strides are.
@triton.jit(do_not_specialize=["epoch", "batch_heads", "heads", "groups", "rows", "shards"])
def arrival_attention_kernel(
    query,
    key,
    value,
    pulled_key,
    pulled_value,
    out,
    lse,
    q_positions,
    chunks,
    words,
    word_step,
    epoch,
    batch_heads,
    heads,
    groups,
    rows,
    shards,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    pulled_shard,
    p_b,
    p_h,
    p_s,
    o_b,
    o_h,
    o_s,
    scale,
    CHUNKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
):
    """Each program computes blocks of rows in turn; arguments as in `arrival_attention`."""
    blocks = tl.cdiv(rows, ROWS)
    e = tl.arange(0, E)
    for block in range(tl.program_id(0), blocks * batch_heads, tl.num_programs(0)):
        # Blocks of late queries first: under a causal mask they have the most work.
        s = (blocks - 1 - block // batch_heads) * ROWS + tl.arange(0, ROWS)
        b, h = (block % batch_heads) // heads, (block % batch_heads) % heads
        b, h, shared = b.to(tl.int64), h.to(tl.int64), (h // groups).to(tl.int64)
        inside = s < rows
        q_at = tl.load(q_positions + s, mask=inside, other=0)
        q_first, q_last = tl.min(tl.where(inside, q_at, 2147483647)), tl.max(q_at)
        base = query + b * q_b + h * q_h
        q = tl.load(base + s.to(tl.int64)[:, None] * q_s + e[None, :], mask=inside[:, None])
        acc = tl.zeros([ROWS, E], dtype=tl.float32)
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        acc, top, total = _attend_shard(
            acc, top, total, q, q_at, q_first, q_last,
            key + b * k_b + shared * k_h, value + b * v_b + shared * v_h, k_s, v_s,
            chunks, 0, scale, CHUNKS=CHUNKS, CAUSAL=CAUSAL, KEYS=KEYS, E=E,
        )  # fmt: skip
        for shard in range(1, shards):
            # Waits for the shard: the acquire makes the copy visible that precedes the word.
            word = words + (shard - 1) * word_step
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") < epoch:
                pass
            offset = pulled_shard.to(tl.int64) * (shard - 1) + b * p_b + shared * p_h
            acc, top, total = _attend_shard(
                acc, top, total, q, q_at, q_first, q_last,
                pulled_key + offset, pulled_value + offset, p_s, p_s,
                chunks, shard, scale, CHUNKS=CHUNKS, CAUSAL=CAUSAL, KEYS=KEYS, E=E,
            )  # fmt: skip
        # Scores are in base 2.
        known = tl.where(total == 0.0, 1.0, total)
        result = (acc / known[:, None]).to(out.dtype.element_ty)
        at = out + b * o_b + h * o_h + s.to(tl.int64)[:, None] * o_s + e[None, :]
        tl.store(at, result, mask=inside[:, None])
        natural = tl.where(total == 0.0, float("-inf"), (top + tl.log2(known)) / 1.4426950408889634)
        tl.store(lse + (b * heads + h) * rows + s, natural, mask=inside)


@dataclass(frozen=True)
class Arrivals:
    """Peers' shards: where they are pulled to, and the words that signal their arrival.

    `keys` and `values` are (shards - 1, B, G, S, E), of the same strides, in the order of arrival.
    Shard i has arrived once word i * `step` of `words` (int32) is at least `epoch`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    words: torch.Tensor
    step: int
    epoch: int


def arrival_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arrivals: Arrivals,
    query_positions: torch.Tensor,
    chunks: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of `query` over all shards, and its log-sum-exp in float32.

    `query` is (B, H, S, E), `key` and `value` (B, G, S_k, E) for a divisor G of H; 16-bit, E of 64
    or 128, features contiguous; `scale` is positive. `query_positions` (S,) and `chunks` are int32.
    `chunks` lists for each shard, this rank's first, its chunks (begin in the shard, length,
    position of its first key).
    """
    B, H, S, E = query.shape
    G, shards = key.shape[1], chunks.shape[0]
    out = torch.empty_like(query)
    lse = query.new_empty((B, H, S), dtype=torch.float32)
    if query.numel() == 0:
        return out, lse
    if tiling is None or programs is None:
        gpu = torch.cuda.get_device_properties(query.device)
        tiling = tiling or tiling_of(E, gpu.major)
        programs = programs or gpu.multi_processor_count
    work = triton.cdiv(S, tiling.rows) * B * H
    assert arrivals.keys.stride() == arrivals.values.stride()
    # Offsets of rows are 32-bit integers.
    assert max(t.shape[-2] * t.stride(-2) for t in (key, value, arrivals.keys)) < 1 << 31
    scale = E**-0.5 if scale is None else scale
    arrival_attention_kernel[(min(programs, work),)](
        query, key, value, arrivals.keys, arrivals.values, out, lse, query_positions, chunks,
        arrivals.words, arrivals.step, arrivals.epoch, B * H, H, H // G, S, shards,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *arrivals.keys.stride()[:4], *out.stride()[:3], scale * _LOG2_E,
        CHUNKS=chunks.shape[1], CAUSAL=causal, ROWS=tiling.rows, KEYS=tiling.keys, E=E,
        num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def chunk_table(shards: Sequence[Sequence[tuple[int, int, int]]]) -> torch.Tensor:
    """Returns `chunks` of `arrival_attention`; shards with fewer chunks get empty ones."""
    most = max(len(shard) for shard in shards)
    rows = [[*shard, *[(0, 0, 0)] * (most - len(shard))] for shard in shards]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")
