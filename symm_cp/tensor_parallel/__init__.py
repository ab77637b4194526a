"""Styles for torch's `parallelize_module` whose communication is fused into the matmuls.

Between the blocks of a model, activations are split by sequence; inside a block, by features.
Column-wise linears gather a sequence shard while they multiply; row-wise linears reduce-scatter
their products by sequence::

    plan = {
        "layers.*.attention": FusedColwiseGroup(("wq", "wk", "wv"), multiple_of=head_dim),
        "layers.*.attention.wo": FusedRowwiseParallel(),
        "layers.*.feed_forward": FusedColwiseGroup(("w1", "w3")),
        "layers.*.feed_forward.w2": FusedRowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)

The model's code does not change, except that it must take its head count and sequence length from
the projections (`q.shape`), as with torch's own styles. Weights become DTensors, sharded as torch's
`ColwiseParallel` and `RowwiseParallel` shard them; outputs are plain local tensors.

Parameters outside these linears (norms, embeddings) process a part of the sequence on each rank, so
their gradients must be summed over the ranks; torch's `SequenceParallel` does so for norms.
"""

from __future__ import annotations

from symm_cp.tensor_parallel.application import apply
from symm_cp.tensor_parallel.checkpoint import load, save
from symm_cp.tensor_parallel.style import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
)

__all__ = [
    "FusedColwiseGroup",
    "FusedColwiseParallel",
    "FusedRowwiseParallel",
    "apply",
    "load",
    "save",
]
