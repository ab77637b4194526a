"""The operands of scaled matmuls, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from symm_cp.ops.scaled_mm import scaled_mm_out

# ScalarType arguments reach Python kernels as torch's numbers.
_DTYPES = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
}


def dtype_of(op: str, number: Any) -> torch.dtype | None:
    """Returns the dtype that a ScalarType argument names; raises `TypeError` for others."""
    if number is None or isinstance(number, torch.dtype):
        return number
    if number not in _DTYPES:
        raise TypeError(f"{op}: out_dtype number {number} is not a floating dtype")
    return _DTYPES[number]


def check_operands(op: str, a: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Raises `ValueError` unless `a` has rows, and the weight is a matrix."""
    if a.dim() < 2:
        raise ValueError(f"{op}: A must have at least 2 dimensions, has shape {list(a.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix, has shape {list(weight.shape)}")


def check_inner(op: str, name: str, a: torch.Tensor, weight: torch.Tensor, inner: int) -> None:
    """Raises `ValueError` unless the weight has `inner` rows."""
    if weight.shape[0] != inner:
        raise ValueError(
            f"{op}: {name} of shape {list(weight.shape)} needs {inner} rows to follow A of shape "
            f"{list(a.shape)}"
        )


def check_weight_scale(op: str, name: str, scale: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises `ValueError` unless the scale is one number, or one for each column."""
    if scale.numel() != 1 and list(scale.shape) != [1, weight.shape[1]]:
        raise ValueError(
            f"{op}: {name} of shape {list(scale.shape)} does not fit B of shape "
            f"{list(weight.shape)}: needs one number or {[1, weight.shape[1]]}"
        )


@dataclass(frozen=True)
class Weight:
    """A float8 weight, and what else `_scaled_mm` takes for it."""

    matrix: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    bias: torch.Tensor | None
    result_scale: torch.Tensor | None
    fast: bool

    def multiply(self, rows: torch.Tensor, row_scale: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the scaled product of rows to `out`, a matrix."""
        scaled_mm_out(
            rows,
            self.matrix,
            row_scale,
            self.scale,
            out,
            bias=self.bias,
            scale_result=self.result_scale,
            fast=self.fast,
        )
