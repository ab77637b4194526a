"""The ops of the `symm_mem` namespace: one file or folder a family."""

from __future__ import annotations

from symm_cp.ops import (
    attention,
    collectives,
    common,
    equal_inputs,
    low_contention,
    matmul,
    matmul_all_reduce,
    matmul_derivatives,
    matmul_grad,
    scaled_all_reduce,
    scaled_matmul,
    transforms,
    unsupported,
)
from symm_cp.ops.heads import exchange_heads
from symm_cp.ops.heads import projection as head_projection
from symm_cp.ops.recurrent import delta_rule, halo, scan


def register() -> None:
    """Registers all kernels with torch."""
    matmul.register()
    matmul_all_reduce.register()
    matmul_grad.register()
    matmul_derivatives.register()
    scaled_matmul.register()
    scaled_all_reduce.register()
    collectives.register()
    equal_inputs.register()
    exchange_heads.register()
    head_projection.register()
    low_contention.register()
    attention.register()
    halo.register()
    scan.register()
    delta_rule.register()
    transforms.register()
    unsupported.register()


def register_without_native() -> None:
    """Has ops whose kernels are native say why the native part is missing."""
    common.register_without_native()
