"""Fused matmuls: with an all-gather before them, a reduce-scatter or an all-reduce after them.

    gather       all-gather-matmul
    scatter      matmul-reduce-scatter, of one product or a sum of products
    all_reduce   matmul-all-reduce; with scales
    backward     gradient ops: they gather shards again while they multiply
    derivatives  the gradients of all these ops, to any order
    products     sums of products of shards
    operands     checks of operands and scales
    algorithms         whether a matmul runs shard by shard or as one
    scaled_mm    products of float8 operands with scales; scaled_gather, scaled_scatter: the ops

Gradients communicate through the same pipelines: an all-gather-matmul has a matmul-reduce-scatter
and a weight gradient that gathers the shards again (rather than keep the gathered input alive); a
matmul-reduce-scatter gathers its gradient once for both operands. Ops with scales have no gradient,
like torch's `_scaled_mm`: float8 training computes its own gradients with scaled ops.
"""

from symm_cp.ops.matmul import backward
from symm_cp.ops.matmul.all_reduce import matmul_all_reduce, scaled_matmul_all_reduce
from symm_cp.ops.matmul.gather import all_gather_matmul
from symm_cp.ops.matmul.scaled_gather import scaled_all_gather_matmul
from symm_cp.ops.matmul.scaled_scatter import scaled_matmul_reduce_scatter
from symm_cp.ops.matmul.scatter import matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "backward",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_all_gather_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
