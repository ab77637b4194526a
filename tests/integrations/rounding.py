"""What rounding costs a model: errors of one run say little where a tensor has a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def size(error: torch.Tensor) -> float:
    """The root of the mean square."""
    return float(error.double().square().mean().sqrt())


def largest(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest error of each name over several runs."""
    return {name: max(run[name] for run in runs) for name in runs[0]}
