"""How tensors are summed: in which numbers, and over the first dimension of one."""

from __future__ import annotations

import torch

from symm_cp import devices, kernels
from symm_cp.tensors.dtypes import wide


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
    total = rows[0].to(wide(rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    if mean:
        total /= rows.shape[0]
    out.copy_(total)
