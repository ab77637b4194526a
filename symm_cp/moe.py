"""Mixtures of experts that the ranks of a group divide among them: `dispatch` and `combine`."""

from symm_cp.ops.experts import Routing, combine, dispatch

__all__ = ["Routing", "combine", "dispatch"]
