"""MXFP8 and NVFP4: matrices with a scale for each block of a row of A or of a column of B.

They use the layouts of `torch.nn.functional.scaled_mm` without a swizzle. With K numbers in a row:

    format   A and B.mT                          scales of A and of B.mT
    MXFP8    (rows, K) float8_e4m3fn             (rows, K / 32) float8_e8m0fnu
    NVFP4    (rows, K / 2) float4_e2m1fn_x2      (rows, K / 16) float8_e4m3fn

Torch multiplies them on recent GPUs only. CPU tensors are dequantised here and multiplied in
float32, which gives the results but no speed; the ops refuse other devices. Source: OCP
Microscaling Formats (MX) 1.0; NVIDIA's NVFP4, without its second scale of the whole tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT4 = torch.float4_e2m1fn_x2


class Format(NamedTuple):
    """A format's name, the dtype of its matrices, and how many of their elements share a scale."""

    name: str
    dtype: torch.dtype
    block: int


#: By the dtype of the scales. An element of NVFP4 is two numbers.
FORMATS = {
    torch.float8_e8m0fnu: Format("MXFP8", torch.float8_e4m3fn, 32),
    torch.float8_e4m3fn: Format("NVFP4", FLOAT4, 8),
}


def are_blocks(op: str, name: str, scale: torch.Tensor, of: str, rows: torch.Tensor) -> bool:
    """Returns whether a scale's dtype makes it a block scale of rows.

    Raises `TypeError` for rows of another dtype and for float4 without block scales, `ValueError`
    for a shape that does not fit.
    """
    kind = FORMATS.get(scale.dtype)
    if kind is None and rows.dtype != FLOAT4:
        return False
    if kind is None or rows.dtype != kind.dtype:
        pairs = "; ".join(f"{k.dtype} with scales of {s} ({k.name})" for s, k in FORMATS.items())
        raise TypeError(
            f"{op}: {name} is {scale.dtype} and {of} is {rows.dtype}: block scales need {pairs}"
        )
    *lead, columns = rows.shape
    if columns % kind.block or list(scale.shape) != [*lead, columns // kind.block]:
        raise ValueError(
            f"{op}: {name} of shape {list(scale.shape)} does not fit {of} with rows of shape "
            f"{list(rows.shape)}: {kind.name} needs a scale for each {kind.block} elements of a "
            f"row, whose number must be divisible by {kind.block}"
        )
    return True


def multiply_blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    """Returns the product in float32 of A (M, K) and B (K, N) with scales of blocks."""
    return _dequantised(a, scale_a) @ _dequantised(b.mT, scale_b).mT


def _dequantised(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if rows.dtype == FLOAT4:  # the first number is in the lower half of the byte
        pairs = rows.contiguous().view(torch.uint8).int()
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        # Bits: sign, exponent (2), mantissa. No table, which plans of calls could not hold.
        sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
        normal = (mantissa + 2) << (exponent - 1).clamp(min=0)
        numbers = torch.where(exponent > 0, normal, mantissa) * (0.5 - sign)
    else:
        numbers = rows.float()
    factors = scale.float()
    each = numbers.shape[-1] // max(1, factors.shape[-1])
    return numbers * factors.repeat_interleave(each, -1)
