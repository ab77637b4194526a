"""What the variants are called in tables."""

from __future__ import annotations

DENSE, FUSED, COMPUTE = "one process", "fused", "compute alone"


def unfused_over(backend: str) -> str:
    """Returns the name of the variant with collectives over a backend of torch.distributed."""
    return f"unfused ({backend})"
