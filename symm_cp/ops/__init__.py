"""The ops of the `symm_mem` namespace: one file or folder a family."""

from __future__ import annotations

from symm_cp.ops import (
    attention,
    collectives,
    common,
    delta_rule,
    equal_inputs,
    exchange_heads,
    halo,
    head_projection,
    low_contention,
    matmul,
    matmul_all_reduce,
    matmul_derivatives,
    matmul_grad,
    scaled_all_reduce,
    scaled_matmul,
    scan,
    transforms,
    unsupported,
)


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
