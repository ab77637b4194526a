"""The sum of W equally long rows, each read once: the arithmetic of a reduce-scatter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


# `count` and `pitch` are specialised: only if Triton knows that they are multiples of 16 does it
# load and store 16 bytes at a time. They are, but for odd shapes.
@triton.jit
def _add_rows(
    rows,
    out,
    count,
    pitch,
    W: tl.constexpr,
    MEAN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(rows + at, mask=inside, other=0).to(WIDE)
    for row in tl.static_range(1, W):
        # In 64 bits: all rows together may be larger than 2 GiB.
        total += tl.load(rows + row * pitch.to(tl.int64) + at, mask=inside, other=0).to(WIDE)
    if MEAN:
        total = total / W
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_rows(rows: torch.Tensor, out: torch.Tensor, *, mean: bool = False) -> None:
    """Writes `rows[0] + rows[1] + ...` to `out`, added in that order, in float32 for 16-bit types.

    `rows` is (W, ...) for a contiguous `out` of shape (...); each row is contiguous.
    """
    count = out.numel()
    if count == 0:
        return
    wide = {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.bfloat16: tl.float32,
        torch.float16: tl.float32,
    }.get(rows.dtype, tl.int64)
    grid = (triton.cdiv(count, _BLOCK),)
    pitch, W = rows.stride(0), rows.shape[0]
    _add_rows[grid](
        rows, out, count, pitch, W=W, MEAN=mean, WIDE=wide, BLOCK=_BLOCK, enable_fp_fusion=True
    )
