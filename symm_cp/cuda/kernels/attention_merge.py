"""Merging of attention over two sets of keys by log-sum-exp, in place.

Source: FlashAttention (Dao et al., 2022), as in csrc/attention/merge_op.cpp for CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16


# Tiles begin at any row: only arguments that widen loads and stores of features are specialised.
@triton.jit(do_not_specialize=["lse", "part_lse", "heads", "rows"])
def _merge(
    out,
    lse,
    part,
    part_lse,
    heads,
    rows,
    out_b,
    out_h,
    out_s,
    lse_b,
    lse_h,
    lse_s,
    part_b,
    part_h,
    part_s,
    plse_b,
    plse_h,
    plse_s,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One dimension: the other dimensions of a grid are limited to 65,535.
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(rows, ROWS)
    bh = program // blocks
    b, h = bh // heads, bh % heads
    s = program % blocks * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, FEATURES)
    seen = s < rows
    there = seen[:, None] & (e < E)[None, :]
    lse_at = lse + b * lse_b + h * lse_h + s * lse_s
    old = tl.load(lse_at, mask=seen, other=0.0)
    new = tl.load(part_lse + b * plse_b + h * plse_h + s * plse_s, mask=seen, other=0.0)
    # A part with -inf has seen no key and changes nothing; if both are -inf, no key was seen yet.
    top = tl.maximum(old, new)
    top = tl.where(top == float("-inf"), 0.0, top)
    old_weight, new_weight = tl.exp(old - top), tl.exp(new - top)
    total = old_weight + new_weight
    merged = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    scale = tl.where(total == 0.0, 1.0, total)
    out_at = out + b * out_b + h * out_h + s[:, None] * out_s + e[None, :]
    part_at = part + b * part_b + h * part_h + s[:, None] * part_s + e[None, :]
    before = tl.load(out_at, mask=there, other=0.0).to(old.dtype)
    after = tl.load(part_at, mask=there, other=0.0).to(old.dtype)
    # Output with weight zero may be any value, even NaN: no key contributed to it.
    before = tl.where((old_weight == 0.0)[:, None], 0.0, before * (old_weight / scale)[:, None])
    after = tl.where((new_weight == 0.0)[:, None], 0.0, after * (new_weight / scale)[:, None])
    tl.store(out_at, (before + after).to(out.dtype.element_ty), mask=there)
    tl.store(lse_at, merged, mask=seen)


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges attention over further keys, `part` with `part_lse`, into `out` and `lse`.

    `out` and `part` are (B, H, S, E) with contiguous features, the log-sum-exps (B, H, S) in
    float32 (float64 for float64). A log-sum-exp of -inf means that the row saw no key.
    """
    B, H, S, E = out.shape
    if out.numel() == 0:
        return
    assert out.stride(3) == 1
    assert part.stride(3) == 1
    grid = (triton.cdiv(S, _ROWS) * B * H,)
    _merge[grid](
        out,
        lse,
        part,
        part_lse,
        H,
        S,
        *out.stride()[:3],
        *lse.stride(),
        *part.stride()[:3],
        *part_lse.stride(),
        E=E,
        FEATURES=triton.next_power_of_2(E),
        ROWS=_ROWS,
        enable_fp_fusion=True,
    )
