"""The ops of the `symm_mem` namespace: one file a family."""

from __future__ import annotations

from symm_cp.ops import (
    attention,
    autocast,
    collectives,
    flex_graph,
    gather_kv,
    low_contention,
    matmul,
    matmul_derivatives,
    matmul_grad,
    scaled_matmul,
    transforms,
)


def register() -> None:
    """Registers all kernels with torch."""
    matmul.register()
    matmul_grad.register()
    matmul_derivatives.register()
    scaled_matmul.register()
    collectives.register()
    low_contention.register()
    attention.register()
    gather_kv.register()
    flex_graph.register()
    autocast.register()
    transforms.register()
