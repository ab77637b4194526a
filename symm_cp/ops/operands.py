"""Checks of what is multiplied."""

from __future__ import annotations

import torch

from symm_cp.ops.common import SUMMABLE, device_behind, summable
from symm_cp.tensors.dtypes import REDUCIBLE

# What GPUs' matmuls take. CPUs multiply integers as well.
_MULTIPLIED = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


def check_multiplied(op: str, name: str, a: torch.Tensor) -> None:
    """Raises `TypeError` for a dtype of which there are no matmuls on the tensor's device."""
    if not summable(a.dtype):
        raise TypeError(
            f"{op}: {name} is {a.dtype}: needs {SUMMABLE} (for float8 there are the scaled ops)"
        )
    device = device_behind(a)
    integer_on_cpu = device.type in ("cpu", "meta") and a.dtype in REDUCIBLE
    if a.dtype not in _MULTIPLIED and not integer_on_cpu:
        names = ", ".join(str(dtype)[6:] for dtype in _MULTIPLIED)
        raise TypeError(
            f"{op}: {name} is {a.dtype}, of which there are no matmuls on {device}: needs {names}"
        )


def check_matrices(
    op: str,
    a: torch.Tensor,
    bs: list[torch.Tensor],
    inner: int,
    names: tuple[str, str] = ("A", "B"),
) -> None:
    """Raises unless `a` is at least 2-D and every B a matrix of `inner` rows, of a's dtype.

    `names` are those of the arguments.
    """
    of_a, of_b = names
    if a.dim() < 2:
        raise ValueError(f"{op}: {of_a} must have at least 2 dimensions, has shape {list(a.shape)}")
    check_multiplied(op, of_a, a)
    for index, b in enumerate(bs):
        if b.dim() != 2:
            raise ValueError(f"{op}: {of_b}[{index}] must be a matrix, has shape {list(b.shape)}")
        if b.shape[0] != inner:
            raise ValueError(
                f"{op}: {of_b}[{index}] of shape {list(b.shape)} needs {inner} rows to follow "
                f"{of_a} of shape {list(a.shape)}"
            )
        if b.dtype != a.dtype:
            raise TypeError(
                f"{op}: {of_b}[{index}] is {b.dtype} and {of_a} is {a.dtype}: they must agree"
            )
        if b.device != a.device:
            raise ValueError(f"{op}: {of_b}[{index}] is on {b.device} and {of_a} on {a.device}")
