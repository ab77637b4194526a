"""The dtypes that the ops can sum or multiply; the only such list."""

from __future__ import annotations

import torch

from symm_cp.native import wire

#: The dtypes whose elements can be summed, and their names in native reductions. Complex numbers
#: are summed as pairs of these.
REDUCIBLE: dict[torch.dtype, wire.DType] = {
    torch.uint8: wire.DType.UINT8,
    torch.int8: wire.DType.INT8,
    torch.int16: wire.DType.INT16,
    torch.int32: wire.DType.INT32,
    torch.int64: wire.DType.INT64,
    torch.float16: wire.DType.FLOAT16,
    torch.float32: wire.DType.FLOAT32,
    torch.float64: wire.DType.FLOAT64,
    torch.bfloat16: wire.DType.BFLOAT16,
}
SUMMABLE = "an integer, a complex or a floating dtype of at least 16 bits"

#: The real floating dtypes of matmuls, attention and recurrences, widest first.
FLOATING = tuple(
    sorted((d for d in REDUCIBLE if d.is_floating_point), key=lambda d: (-d.itemsize, str(d)))
)
#: Sums of these are rounded once: they are accumulated in float32.
NARROW = tuple(dtype for dtype in FLOATING if dtype.itemsize == 2)
#: The dtypes of operands that `torch._scaled_mm` takes, and returns.
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
#: The other dtypes of results of `torch._scaled_mm`.
SCALED_RESULTS = tuple(dtype for dtype in FLOATING if dtype.itemsize <= 4)

_MULTIPLIED = (*FLOATING, torch.complex64, torch.complex128)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Returns the names of dtypes for messages."""
    return ", ".join(map(dtype_name, dtypes))


def one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Returns the names of dtypes as alternatives."""
    return f"{names(dtypes[:-1])} or {names(dtypes[-1:])}"


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, as it is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, of which a single number may have any stride."""
    numbers = real(tensor)
    return numbers.as_strided((numbers.numel(),), (1,)).view(torch.uint8)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers are added up: float32 for the 16-bit types."""
    return torch.float32 if dtype in NARROW else dtype


def summable(dtype: torch.dtype) -> bool:
    """Returns whether elements of a dtype can be added up."""
    return dtype.to_real() in REDUCIBLE


def multiplied(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of matmuls on a device: GPUs multiply no integers."""
    integers = tuple(d for d in REDUCIBLE if not d.is_floating_point)
    return (*_MULTIPLIED, *integers) if device.type in ("cpu", "meta") else _MULTIPLIED
