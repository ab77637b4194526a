"""Attention over keys and values that are spread over ranks; README.md says what is where."""

from __future__ import annotations

from symm_cp.ops.attention import (  # these declare ops
    gather_kv,
    op,
    sequence,
    spread_cache,
    spread_cache_heads,
)
from symm_cp.ops.attention.flex import graph
from symm_cp.ops.attention.methods import set_rotate_method

__all__ = [
    "gather_kv",
    "graph",
    "op",
    "sequence",
    "set_rotate_method",
    "spread_cache",
    "spread_cache_heads",
]
