"""Attention over keys and values that are spread over ranks."""

from __future__ import annotations

from symm_cp.ops.attention import gather_kv, op
from symm_cp.ops.attention.flex import graph
from symm_cp.ops.attention.op import set_rotate_method

__all__ = ["register", "set_rotate_method"]


def register() -> None:
    """Registers the kernels of all attention ops with torch."""
    op.register()
    gather_kv.register()
    graph.register()
