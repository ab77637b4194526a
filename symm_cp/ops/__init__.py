"""The ops of `torch.ops.symm_mem`: one file or folder a family, each op declared once (op.py)."""

from symm_cp.ops import (
    attention,
    collectives,
    delta_rule,
    equal_inputs,
    exchange_heads,
    halo,
    head_projection,
    matmul,
    scan,
)
from symm_cp.ops.registration import register, register_without_native

__all__ = [
    "attention",
    "collectives",
    "delta_rule",
    "equal_inputs",
    "exchange_heads",
    "halo",
    "head_projection",
    "matmul",
    "register",
    "register_without_native",
    "scan",
]
