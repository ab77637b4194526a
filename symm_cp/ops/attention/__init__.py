"""Attention over keys and values that are spread over ranks.

In reading order:

    reference   the forward pass of all ranks in one process
    masks       masks as callers give them, and as a `Mask` for each sample (schedule/mask.py)
    options     the options of the ops, from which their schemas are made
    spec        what a call computes: the options, checked (checks, spread, masks), as one
                `AttentionSpec`
    methods     how attention is split over ranks: by keys, by heads, or both over a mesh (choice)
    op          `fused_all_gather_attention` and its backward op: schema, kernels, fakes, gradient
    attend      attention of one rank's queries to the keys of a group, given the spec
    ulysses     attention by heads: exchanges of heads before and after `attend` (ops/heads/)
    mesh_calls  how a rank that fails on a mesh of two dimensions stops its row and its column
    pipeline    gathers keys and values, reduce-scatters their gradients
    tiles       attention and its gradients tile by tile, merged by log-sum-exp
    kernels     torch's kernels for one tile
    scoring     scores beyond torch's kernels: positions, soft caps, biases, dropout (philox)
    native_tiles  this project's kernels for one tile, on CPU and by matmuls (tiles_by_matmuls)
    few_tokens  attention of few tokens on CPU: one exchange, one pass
    flex        attention with any `mask_mod` and `score_mod`: eager, and as an op in graphs
    layouts     layouts of sequences as inputs of graphs
    sequence    `_gather_sequence`, which gives graphs a tensor of all positions
    gather_kv   `all_gather_kv`, for attention that needs all keys at once
    spread_cache  attention of new tokens to a cache that is spread over ranks
    spread_cache_heads  the same, with each rank's heads of the result

To add a mask kind:

1. a field of `Mask` and an argument of its rule, `sees` (schedule/mask.py), which determines the
   tiles that a rank computes and the keys that it sends;
2. a field of `MaskOptions`, its part in `as_mask_mod`, its check and reading in `masks_of`
   (masks.py); the ops' schemas and the masks of models (`SequenceMask`) follow from the field;
3. an argument of `all_gather_attention` (context_parallel/attention.py);
4. values in `KINDS` of tests/schedule/test_tiles.py, a draw in tests/ops/test_mask_rule.py, a case
   in tests/ops/test_attention_masks.py.

Models of transformers use the kind once integrations/transformers/masks.py maps their mask
functions to it; until then attention evaluates these functions tile by tile.

A change of the scores is a field of the spec and of `Scoring`. `op` passes options on unread. Only
tensors that require gradients (sinks, bias) need code in `op` as well.
"""

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
