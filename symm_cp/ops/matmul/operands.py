"""The operands of matmuls, plain and float8 with scales, and their checks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from symm_cp.ops.common import device_behind
from symm_cp.ops.matmul.block_scales import FLOAT4, FORMATS, are_blocks
from symm_cp.tensors.dtypes import (
    FLOAT8,
    SCALED_RESULTS,
    SUMMABLE,
    multiplied,
    names,
    summable,
)

#: The names that functions for users have for the arguments of the ops that they call.
WORDS = {"A": "a", "B": "weight", "A_scale": "a_scale", "B_scale": "weight_scale"}
WORDS_OF_GATHERS = {
    "A": "shard",
    "B": "weights",
    "Bs": "weights",
    "A_scale": "shard_scale",
    "B_scales": "weight_scales",
}


class Operand(NamedTuple):
    """The properties of a tensor that a prepared call uses."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """Returns a tensor's properties; a fake tensor has the device that it stands for."""
        return cls(tensor.shape, tensor.dtype, device_behind(tensor))

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)


def check_rows(op: str, name: str, a: torch.Tensor | Operand) -> None:
    """Raises `ValueError` unless a tensor has rows and columns."""
    if a.dim() < 2:
        raise ValueError(f"{op}: {name} must have at least 2 dimensions, has shape {list(a.shape)}")


def check_matrix(
    op: str,
    name: str,
    b: torch.Tensor | Operand,
    a: torch.Tensor | Operand,
    inner: int | None = None,
    of_a: str = "A",
) -> None:
    """Raises `ValueError` unless `b` is a matrix on the device of `a`, of `inner` rows if given."""
    if b.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix, has shape {list(b.shape)}")
    if inner is not None and b.shape[0] != inner:
        raise ValueError(
            f"{op}: {name} of shape {list(b.shape)} needs {inner} rows to follow {of_a} of shape "
            f"{list(a.shape)}"
        )


def check_device(
    op: str, name: str, b: torch.Tensor | Operand, a: torch.Tensor | Operand, of_a: str = "A"
) -> None:
    """Raises `ValueError` unless `b` is on the device of `a`."""
    if b.device != a.device:
        raise ValueError(f"{op}: {name} is on {b.device} and {of_a} on {a.device}")


def check_multiplied(op: str, name: str, a: torch.Tensor | Operand) -> None:
    """Raises `TypeError` for a dtype that has no matmuls on the tensor's device."""
    if not summable(a.dtype):
        raise TypeError(
            f"{op}: {name} is {a.dtype}: needs {SUMMABLE} (for float8 there are the scaled ops)"
        )
    device = device_behind(a)
    if a.dtype not in multiplied(device):
        raise TypeError(
            f"{op}: {name} is {a.dtype}, which has no matmuls on {device}: needs "
            f"{names(multiplied(device))}"
        )


def check_matrices(
    op: str,
    a: torch.Tensor | Operand,
    bs: Sequence[torch.Tensor | Operand],
    inner: int,
    names: tuple[str, str] = ("A", "B"),
) -> None:
    """Raises unless `a` is at least 2-D and every B a matrix of `inner` rows, of a's dtype.

    `names` are the names of the arguments.
    """
    of_a, of_b = names
    check_rows(op, of_a, a)
    check_multiplied(op, of_a, a)
    for index, b in enumerate(bs):
        name = f"{of_b}[{index}]"
        check_matrix(op, name, b, a, inner, of_a)
        if b.dtype != a.dtype:
            raise TypeError(f"{op}: {name} is {b.dtype} and {of_a} is {a.dtype}: they must agree")
        check_device(op, name, b, a, of_a)


def check_terms(
    op: str,
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, str, list[int]]:
    """Raises unless the products As[i] @ Bs[i], an addend and a bias of its rows can be added up.

    Returns a tensor that has the sum's dtype and device, its name in messages, and the sum's
    shape.
    """
    if len(lefts) != len(rights):
        raise ValueError(
            f"{op}: got {len(lefts)} A tensors and {len(rights)} B tensors; counts must match"
        )
    for left, right in zip(lefts, rights, strict=True):
        check_matrices(op, left, [right], left.shape[-1] if left.dim() else 0)
    terms = [
        (f"A[{i}] @ B[{i}]", [*left.shape[:-1], right.shape[1]], left)
        for i, (left, right) in enumerate(zip(lefts, rights, strict=True))
    ]
    if addend is not None:
        terms.insert(0, ("addend", [*addend.shape], addend))
    if not terms:
        raise ValueError(f"{op}: needs a product or an addend")
    name, shape, first = terms[0]
    name = name if first is addend else "A"
    if bias is not None:
        terms.append(("bias", [*bias.shape], bias))
    for what, own, tensor in terms[1:]:
        needed = shape[-1:] if tensor is bias else shape
        if own != needed:
            raise ValueError(f"{op}: {what} has shape {own}, must have {needed}")
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{op}: {what} is {tensor.dtype} and {name} is {first.dtype}: they must agree"
            )
        check_device(op, what, tensor, first, name)
    return first, name, shape


# --- float8 with scales ------------------------------------------------------------------------

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


def result_dtype(op: str, number: Any, a: torch.Tensor) -> torch.dtype:
    """Returns the dtype that a ScalarType argument names, by default A's dtype.

    Raises `TypeError` unless `_scaled_mm` has results of that dtype.
    """
    dtype = number
    if number is None:
        dtype = a.dtype
    elif not isinstance(number, torch.dtype):
        dtype = _DTYPES.get(number)
        if dtype is None:
            raise TypeError(f"{op}: out_dtype number {number} is not a floating dtype")
    if dtype not in (*SCALED_RESULTS, *FLOAT8):
        raise TypeError(f"{op}: out_dtype={dtype} must be {names(SCALED_RESULTS)} or float8")
    assert isinstance(dtype, torch.dtype)
    return dtype


def partial_dtype_of(out_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which partial sums for results of a dtype are exchanged."""
    # Sums of float8 numbers would lose nearly all digits: float8 results are reduced in float32.
    return torch.float32 if out_dtype in FLOAT8 else out_dtype


def check_float8(op: str, a: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Raises unless `a` has rows, the weight is a matrix, and both are float8 on one device.

    float4 passes too: it needs scales of blocks, which `are_blocks` checks.
    """
    check_rows(op, "A", a)
    check_matrix(op, name, weight, a)
    for each, matrix in (("A", a), (name, weight)):
        if matrix.dtype not in (*FLOAT8, FLOAT4):
            raise TypeError(f"{op}: {each} is {matrix.dtype}: must be float8")
    check_device(op, name, weight, a)


def check_row_scale(op: str, a: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises unless the scale of A is one number, or one for each row or block of a row."""
    if not are_blocks(op, "A_scale", scale, "A", a):
        _check_scale(op, "A_scale", scale, "A", a, [*a.shape[:-1], 1])


def check_weight_scale(op: str, name: str, scale: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises unless the scale is one number, or one for each column or block of a column."""
    if not are_blocks(op, name, scale, "B.mT", weight.mT):
        _check_scale(op, name, scale, "B", weight, [1, weight.shape[1]])


def _check_scale(
    op: str, name: str, scale: torch.Tensor, of: str, scaled: torch.Tensor, shape: list[int]
) -> None:
    if scale.numel() != 1 and list(scale.shape) != shape:
        raise ValueError(
            f"{op}: {name} of shape {list(scale.shape)} does not fit {of} of shape "
            f"{list(scaled.shape)}: needs one number or {shape}"
        )


def check_product(
    op: str,
    name: str,
    a: torch.Tensor,
    weight: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    columns: Sequence[int] | None = None,
) -> None:
    """Raises unless A and B have scales of one kind, and where cuBLAS would raise mid-call.

    `dtype` is the product's; `columns` lists the numbers of the weight's columns that are
    multiplied at a time, by default all.
    """
    if len({FORMATS.get(scale.dtype) for scale in scales.values()}) > 1:
        dtypes = " and ".join(f"{what} is {scale.dtype}" for what, scale in scales.items())
        raise TypeError(f"{op}: {dtypes}: both or none must be scales of blocks, of one format")
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
        if scale.numel() != 1 and dtype in FLOAT8:
            raise TypeError(
                f"{op}: {what} has {scale.numel()} scales and the product is {dtype}: on {device} "
                "only one number scales float8 products"
            )
    if a.dtype == weight.dtype == torch.float8_e5m2:
        raise TypeError(f"{op}: A and {name} are both float8_e5m2, which {device} cannot multiply")
    at_a_time = [weight.shape[1]] if columns is None else list(columns)
    if any(size % 16 for size in (weight.shape[0], *at_a_time)):
        raise ValueError(
            f"{op}: {name} of shape {list(weight.shape)}, multiplied {at_a_time} columns at a "
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
