"""Advice on how to change a program so that its collectives take less time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Node

from symm_cp.inductor.matmuls import bias_of
from symm_cp.inductor.nodes import is_dynamic, static_shape

#: Fewer rows, as in decoding, are not worth sharding.
_FEW_ROWS = 64

_SEQUENCE_PARALLEL = (
    "with sequence parallelism a reduce-scatter would move half of the bytes here, an all-gather "
    "before the next matmul the other half, and each rank would hold and compute 1/W of the "
    "tensors between them"
)
_EXPERTS = (
    "for tokens and their experts, symm_cp.moe.dispatch and combine count, sort and exchange in "
    "one call each"
)
_BIAS = "every rank adds its bias: add it after the all-reduce if it should count once"

# Advice, by a part of the reason why a collective was not fused.
_BY_REASON = {
    "is used elsewhere": "use the reduced tensor there, or compute that use from other inputs",
    "wider than its own dtype": "reduce first, cast the result",
    "added on every rank": "add the bias after the collective",
    "rearranged": "move the ops between the matmul and the collective behind the collective",
    "not followed": "move the ops between the collective and the matmul before the collective",
    "several tensors at once": "call the collective once for each tensor",
    "no fused op exists for all_to_all": (
        "if it exchanges a sequence for heads, symm_cp.sequence_to_heads and heads_to_sequence "
        "copy straight to where the heads belong"
    ),
    "part of what is computed at once": (
        "project queries, keys and values by a matmul each: products of one input are "
        "exchanged together"
    ),
    "equal runs of heads": (
        "to exchange a sequence for heads, give rank r the r-th of W equal runs of heads, as "
        "symm_cp.sequence_to_heads does"
    ),
    "exchanges whole rows": _EXPERTS,
    "is next to it, which has no fused form": _EXPERTS,
    "Unsafe side effect": (
        "with activation checkpointing, set "
        "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True, as torchtitan "
        "does: otherwise the checkpointed module runs uncompiled"
    ),
    "no fused op exists for broadcast": "broadcast constant tensors once, outside of the graph",
}


def on_reason(reason: str) -> str:
    """Returns advice on a reason not to fuse, or to break a graph; empty if there is none."""
    return next((advice for part, advice in _BY_REASON.items() if part in reason), "")


def on_sum(node: Node, terms: Iterable[Node]) -> str:
    """Returns advice on a fused all-reduce of products; empty if there is none."""
    biases = [bias for term in terms if (bias := bias_of(term)) is not None]
    # DTensor divides its bias by W, so that bias is computed: no placeholder.
    if node.args[1] == "sum" and any(bias.op == "placeholder" for bias in biases):
        return _BIAS
    rows = math.prod((static_shape(node) or ())[:-1])
    group = _group(str(node.args[2]))
    ranks = 1 if group is None else group.size()
    even = is_dynamic(rows) or rows % ranks == 0
    return _SEQUENCE_PARALLEL if ranks > 1 and even and rows >= _FEW_ROWS else ""


def on_group(name: str) -> str:
    """Returns advice on a group for CPU tensors; empty if there is none."""
    group = _group(name)
    try:
        backend = "" if group is None else group._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        return ""  # for CUDA tensors only
    if backend in ("", "symm_cp"):
        return ""
    return f"over the backend 'symm_cp' instead of {backend!r} they would run in shared memory"


def _group(name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None
