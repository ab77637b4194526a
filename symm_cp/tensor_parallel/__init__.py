"""Styles for torch's `parallelize_module` whose communication is fused into the matmuls.

Between the blocks of a model activations are split by sequence; inside a block they are split by
features. Column-wise linears take a sequence shard and gather it while they multiply; row-wise
linears scatter the sum of their products by sequence::

    plan = {
        "layers.*.attention": FusedColwiseGroup(("wq", "wk", "wv"), multiple_of=head_dim),
        "layers.*.attention.wo": FusedRowwiseParallel(),
        "layers.*.feed_forward": FusedColwiseGroup(("w1", "w3")),
        "layers.*.feed_forward.w2": FusedRowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)

The model's code stays as it is, except that it takes its head count and its sequence length from
the projections (`q.shape`), as with torch's own styles. Weights become DTensors, sharded as torch's
`ColwiseParallel` and `RowwiseParallel` shard them; outputs are plain local tensors.

Parameters outside of these linears (norms, embeddings) see a part of the sequence on each rank, so
their gradients have to be summed over the ranks; torch's `SequenceParallel` does it for norms.
"""

from __future__ import annotations

from symm_cp.tensor_parallel.style import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
)

__all__ = ["FusedColwiseGroup", "FusedColwiseParallel", "FusedRowwiseParallel"]
