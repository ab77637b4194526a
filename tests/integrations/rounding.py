"""Rounding errors of models: one run says little about tensors of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def size(error: torch.Tensor) -> float:
    """Returns the root mean square."""
    return float(error.double().square().mean().sqrt())


def largest(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns each name's largest error over several runs."""
    return {name: max(run[name] for run in runs) for name in runs[0]}
