"""Attention over keys and values that are spread over ranks.

In reading order:

    spec        what a call computes: the options of the ops, checked, as one `AttentionSpec`
    op          `fused_all_gather_attention` and its backward op: schema, kernels, fakes, gradient
    pipeline    gathers keys and values, reduce-scatters their gradients
    tiles       attention and its gradients tile by tile, merged by log-sum-exp
    kernels     torch's kernels for one tile
    arrival     on CUDA: one kernel that starts before the peers' keys have arrived
    flex        the same with any `mask_mod` and `score_mod`: eager, and as an op in graphs
    layouts     layouts of sequences as inputs of graphs
    sequence    what graphs know of the whole sequence: ops that gather, and that give positions
    gather_kv   `all_gather_kv`, for attention that needs all keys at once

A new mask kind is an option and a check in `spec`, a rule in schedule/tiles.py (in `tiles`, too, if
the kernels need an elementwise mask for it) and an argument of context_parallel/attention.py. A
change of the scores by a number (a soft cap) is a field of the spec, which `tiles` hands to
`kernels`. `op` passes options on without knowing them, and `arrival` refuses a spec with fields
that it does not know. Only tensors that want gradients (sinks, a bias) need `op` as well.
"""

from __future__ import annotations

from symm_cp.ops.attention import gather_kv, op, sequence
from symm_cp.ops.attention.flex import graph
from symm_cp.ops.attention.spec import set_rotate_method

__all__ = ["register", "set_rotate_method"]


def register() -> None:
    """Registers the kernels of all attention ops with torch."""
    op.register()
    gather_kv.register()
    graph.register()
    sequence.register()
