"""Tokens sent to experts that the ranks divide among them, and results sent back."""

from symm_cp.ops.experts.op import Routing, combine, dispatch

__all__ = ["Routing", "combine", "dispatch"]
