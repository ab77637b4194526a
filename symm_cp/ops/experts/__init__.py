"""Tokens sent to experts that the ranks divide among them, and results sent back."""

from symm_cp.ops.experts.fused import dispatch_matmul, matmul_combine
from symm_cp.ops.experts.op import Routing, combine, dispatch

__all__ = ["Routing", "combine", "dispatch", "dispatch_matmul", "matmul_combine"]
