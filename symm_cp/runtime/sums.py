"""Sums over the first dimension: the last step of a reduce-scatter."""

from __future__ import annotations

import torch

from symm_cp import devices, kernels


def add_rows(rows: torch.Tensor, out: torch.Tensor, *, mean: bool = False) -> None:
    """Writes `rows[0] + rows[1] + ...` to `out`, added in that order, in float32 for 16-bit types.

    `rows` is (W, ...) for `out` of shape (...); each row is contiguous.
    """
    if out.numel() == 0:
        return
    kind = devices.kind_for(rows.device)
    if kind is not None and kind.triton:
        kernels.add_rows(rows, out, mean=mean)
        return
    wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    if mean:
        total /= rows.shape[0]
    out.copy_(total)
