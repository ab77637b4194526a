"""Collectives that have independent work to hide behind are left to the copy engine."""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.emit import Emitter
from symm_cp.inductor.gather import MATMULS, flops, order_of
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import GATHER, SCATTER, WAIT, value

_GATHER = torch.ops.symm_mem._low_contention_all_gather.default
_SCATTER = torch.ops.symm_mem._low_contention_reduce_scatter.default
# Operations that a processor does, at least, while it moves a byte.
_FLOPS_A_BYTE = 8.0


def sink_collectives(graph: Graph, options: Options) -> None:
    """Replaces large collectives, and moves their waits to the first use."""
    order = order_of(graph)
    for node in [n for n in graph.nodes if n.target in (GATHER, SCATTER)]:
        waits = [user for user in node.users if user.target is WAIT]
        reason = _reason(node, waits, order, options)
        name, group = node.name, str(node.args[-1])
        if reason:
            record(Decision(name, group, None, reason))
            continue
        (wait,) = waits
        emitter = Emitter(graph, node)
        if node.target is GATHER:
            into = "_low_contention_all_gather"
            started = emitter.call(_GATHER, node.args[0], node.args[2])
        else:
            into = "_low_contention_reduce_scatter"
            started = emitter.call(_SCATTER, node.args[0], node.args[1], node.args[3])
        wait.replace_input_with(node, started)
        graph.erase_node(node)
        first = min(wait.users, key=order.__getitem__)
        first.prepend(wait)
        record(Decision(name, group, into, "independent matmuls hide it"))


def _reason(node: Node, waits: list[Node], order: dict[Node, int], options: Options) -> str:
    """Why a collective is left alone, or nothing."""
    if len(waits) != 1 or len(node.users) != 1 or not waits[0].users:
        return "nobody waits for it, or several do"
    source, result = value(node.args[0]), value(node)
    if source is None or result is None:
        return "its shape is not known when it is compiled"
    if source.device.type != "cpu":
        return "on CUDA its input has to be in symmetric memory"
    if node.target is SCATTER and node.args[1] not in ("sum", "avg"):
        return f"it reduces by {node.args[1]}"
    nbytes = max(source.numel(), result.numel()) * source.element_size()
    if nbytes < options.min_bytes:
        return f"{nbytes} bytes are too few (min_bytes={options.min_bytes})"
    first = min(order[user] for user in waits[0].users)
    hidden = sum(
        flops(other)
        for other in order
        if other.target in MATMULS and order[node] < order[other] < first
    )
    if math.isfinite(hidden) and hidden < _FLOPS_A_BYTE * nbytes:
        return "too little independent work stands between it and its first use"
    return ""
