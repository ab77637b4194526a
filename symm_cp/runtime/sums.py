"""In which numbers tensors are summed."""

from __future__ import annotations

import torch


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
