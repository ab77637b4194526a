"""The operands of scaled matmuls, and their checks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symm_cp.ops.common import device_behind
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


_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def dtype_of(op: str, number: Any) -> torch.dtype | None:
    """Returns the dtype that a ScalarType argument names; raises `TypeError` for others."""
    if number is None or isinstance(number, torch.dtype):
        return number
    if number not in _DTYPES:
        raise TypeError(f"{op}: out_dtype number {number} is not a floating dtype")
    return _DTYPES[number]


def check_operands(op: str, a: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Raises unless `a` has rows, the weight is a matrix, and both are float8 on one device."""
    if a.dim() < 2:
        raise ValueError(f"{op}: A must have at least 2 dimensions, has shape {list(a.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix, has shape {list(weight.shape)}")
    for what, matrix in (("A", a), (name, weight)):
        if matrix.dtype not in _FLOAT8:
            raise TypeError(f"{op}: {what} is {matrix.dtype}: must be float8")
    if weight.device != a.device:
        raise ValueError(f"{op}: {name} is on {weight.device} and A on {a.device}")


def check_inner(op: str, name: str, a: torch.Tensor, weight: torch.Tensor, inner: int) -> None:
    """Raises `ValueError` unless the weight has `inner` rows."""
    if weight.shape[0] != inner:
        raise ValueError(
            f"{op}: {name} of shape {list(weight.shape)} needs {inner} rows to follow A of shape "
            f"{list(a.shape)}"
        )


def check_row_scale(op: str, a: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises `ValueError` unless the scale of A is one number, or one for each row."""
    if scale.numel() != 1 and list(scale.shape) != [*a.shape[:-1], 1]:
        raise ValueError(
            f"{op}: A_scale of shape {list(scale.shape)} does not fit A of shape "
            f"{list(a.shape)}: needs one number or {[*a.shape[:-1], 1]}"
        )


def check_weight_scale(op: str, name: str, scale: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises `ValueError` unless the scale is one number, or one for each column."""
    if scale.numel() != 1 and list(scale.shape) != [1, weight.shape[1]]:
        raise ValueError(
            f"{op}: {name} of shape {list(scale.shape)} does not fit B of shape "
            f"{list(weight.shape)}: needs one number or {[1, weight.shape[1]]}"
        )


def check_result(op: str, dtype: torch.dtype) -> None:
    """Raises `TypeError` unless `_scaled_mm` has results of a dtype."""
    if dtype not in (*_WIDE, *_FLOAT8):
        names = ", ".join(str(known)[6:] for known in _WIDE)
        raise TypeError(f"{op}: out_dtype={dtype} must be {names} or float8")


def partial_dtype_of(out_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which partial sums for results of a dtype are exchanged."""
    # Sums of float8 numbers would lose nearly all digits: float8 results are reduced in float32.
    return torch.float32 if out_dtype.itemsize == 1 else out_dtype


def check_kernel(
    op: str,
    name: str,
    a: torch.Tensor,
    weight: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    columns: Sequence[int],
) -> None:
    """Raises what cuBLAS would in the middle of a call; CPUs multiply whatever passed before.

    `dtype` is that of the product, `columns` are the numbers of the weight's columns that are
    multiplied at a time.
    """
    device = device_behind(a)
    if device.type in ("cpu", "meta"):
        return
    if device.type == "cuda" and not _has_float8(device):
        raise NotImplementedError(f"{op}: {device} has no float8 matmuls: needs capability 8.9")
    for what, scale in scales.items():
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {what} is {scale.dtype}: must be float32 on {device}")
        if device_behind(scale) != device:
            raise ValueError(f"{op}: {what} is on {device_behind(scale)} and A on {device}")
        if scale.numel() != 1 and dtype in _FLOAT8:
            raise TypeError(
                f"{op}: {what} has {scale.numel()} scales and the product is {dtype}: on {device} "
                "only one number scales float8 products"
            )
    if a.dtype == weight.dtype == torch.float8_e5m2:
        raise TypeError(f"{op}: A and {name} are both float8_e5m2, which {device} cannot multiply")
    if any(size % 16 for size in (weight.shape[0], *columns)):
        raise ValueError(
            f"{op}: {name} of shape {list(weight.shape)}, multiplied {list(columns)} columns at a "
            f"time: on {device} rows and columns must be divisible by 16"
        )
    if weight.numel() and weight.stride(0) != 1:
        raise ValueError(
            f"{op}: {name} has strides {list(weight.stride())}: must be column-major on {device}, "
            "the transpose of a contiguous matrix"
        )


@functools.cache
def _has_float8(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():  # a fake tensor's device
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def check_bias(
    op: str, name: str, bias: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raises unless `_scaled_mm` adds a bias to products of a weight in a dtype."""
    if bias is None:
        return
    columns = weight.shape[1]
    if bias.numel() != columns:
        raise ValueError(f"{op}: {name} of shape {list(bias.shape)} must have {columns} elements")
    device = device_behind(weight)
    needed = torch.float16 if dtype == torch.float16 else torch.bfloat16
    if device.type in ("cpu", "meta"):
        return
    if dtype == torch.float32 or bias.dtype != needed:
        raise TypeError(
            f"{op}: {name} is {bias.dtype} for products in {dtype}: on {device} a bias must be "
            "float16 for float16, bfloat16 for others, and none for float32"
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
