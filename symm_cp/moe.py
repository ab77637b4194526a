"""Mixtures of experts that the ranks of a group divide among them.

`dispatch` and `combine` send rows; `dispatch_matmul` and `matmul_combine` multiply them as well.
"""

from symm_cp.ops.experts import Routing, combine, dispatch, dispatch_matmul, matmul_combine

__all__ = ["Routing", "combine", "dispatch", "dispatch_matmul", "matmul_combine"]
