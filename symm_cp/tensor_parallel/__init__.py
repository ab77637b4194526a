"""Tensor parallelism whose communication is fused into the matmuls: whole models, and styles.

`apply(model, mesh)` splits a model of transformers as its own plan says; `load` and `save` read and
write its checkpoints part by part. For other models there are styles for torch's
`parallelize_module`.

By default activations are split by sequence between blocks, and by features inside a block.
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
