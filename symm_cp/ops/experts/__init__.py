"""Sends tokens to experts that are divided among the ranks, and results back."""

from symm_cp.ops.experts.fused import dispatch_matmul, matmul_combine
from symm_cp.ops.experts.op import Routing, combine, dispatch

__all__ = ["Routing", "combine", "dispatch", "dispatch_matmul", "matmul_combine"]
