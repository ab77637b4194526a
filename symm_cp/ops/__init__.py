"""The ops of `torch.ops.symm_mem`: one file or folder a family, each op declared once (op.py)."""

from symm_cp.ops import (
    attention,
    collectives,
    equal_inputs,
    experts,
    matmul,
)
from symm_cp.ops.heads import exchange_heads, normed_projection, projection
from symm_cp.ops.recurrent import halo, scan, states
from symm_cp.ops.registration import register, register_plans, register_without_native

__all__ = [
    "attention",
    "collectives",
    "equal_inputs",
    "exchange_heads",
    "experts",
    "halo",
    "matmul",
    "normed_projection",
    "projection",
    "register",
    "register_plans",
    "register_without_native",
    "scan",
    "states",
]
