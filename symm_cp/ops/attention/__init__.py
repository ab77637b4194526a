"""Attention over keys and values that are spread over ranks.

In reading order:

    mesh_calls  what ranks tell each other that fail on a mesh of two dimensions
    choice      the faster method, by the simulator
    options     the options of the ops, as their schemas have them
    spec        what a call computes: the options, checked (checks, spread, masks), as one
                `AttentionSpec`
    methods     how attention is split over ranks: by keys, by heads, or both over a mesh
    op          `fused_all_gather_attention` and its backward op: schema, kernels, fakes, gradient
    attend      attention of one rank's queries to the keys of a group, given the spec
    ulysses     the same by heads: an exchange of heads around it (ops/heads/)
    pipeline    gathers keys and values, reduce-scatters their gradients
    tiles       attention and its gradients tile by tile, merged by log-sum-exp
    kernels     torch's kernels for one tile
    scored      what tiles need that torch's kernels lack: positions, soft caps, biases, dropout
    native_tiles  this project's kernels for one tile (scoring, philox; tiles_by_matmuls)
    arrival     on CUDA: one kernel that starts before the peers' keys have arrived
    flex        the same with any `mask_mod` and `score_mod`: eager, and as an op in graphs
    layouts     layouts of sequences as inputs of graphs
    sequence    what graphs know of the whole sequence: ops that gather, and that give positions
    gather_kv   `all_gather_kv`, for attention that needs all keys at once

A new mask kind is an option with a check, two rules in schedule/tiles.py (its tiles, and in
`seen_by_peers` the keys that peers are sent; in `tiles`, too, if the kernels need an elementwise
mask for it), an example in tests/schedule/test_tiles.py and an argument of
context_parallel/attention.py. A change of the scores is a field of the spec and of `Scoring`, which
`scored` fills. `op` passes options on without knowing them, and `arrival` refuses a spec with
fields that it does not know. Only tensors that want gradients (sinks, bias) need `op` as well.
"""

from __future__ import annotations

from symm_cp.ops.attention import gather_kv, op, sequence
from symm_cp.ops.attention.flex import graph
from symm_cp.ops.attention.methods import set_rotate_method

__all__ = ["register", "set_rotate_method"]


def register() -> None:
    """Registers the kernels of all attention ops with torch."""
    op.register()
    gather_kv.register()
    graph.register()
    sequence.register()
