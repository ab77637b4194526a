"""In which numbers tensors are summed."""

from __future__ import annotations

import torch


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers are added up: float32 for the 16-bit types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
