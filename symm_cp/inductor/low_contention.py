"""Collectives that have independent work to hide behind are left to the copy engine."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.emit import Emitter
from symm_cp.inductor.gather import MATMULS, flops
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import GATHER, SCATTER, WAIT, is_dynamic, static_shape, value
from symm_cp.ops import override

_GATHER = torch.ops.symm_mem._low_contention_all_gather.default
_SCATTER = torch.ops.symm_mem._low_contention_reduce_scatter.default
# Operations that are done, at least, while a byte is moved: by a processor in its memory, and by a
# GPU over NVLink (an H100: 990 TFLOP/s in bfloat16, 450 GB/s).
_FLOPS_A_BYTE = {"cpu": 8.0, "cuda": 2200.0}


def sink_collectives(graph: Graph, options: Options) -> None:
    """Replaces large collectives, and moves what waits for them behind the work that hides them."""
    for node in [n for n in graph.nodes if n.target in (GATHER, SCATTER)]:
        waits = [user for user in node.users if user.target is WAIT]
        name, group = node.name, str(node.args[-1])
        reason = _reason(node, waits, options)
        found = None if reason else _hidden_until(node, waits[0])
        if reason or found is None:
            reason = reason or "too little independent work follows it"
            record(Decision(name, group, None, reason))
            continue
        last, dependent = found
        emitter = Emitter(graph, node)
        if node.target is GATHER:
            into = "_low_contention_all_gather"
            started = emitter.call(_GATHER, node.args[0], node.args[2])
        else:
            into = "_low_contention_reduce_scatter"
            started = emitter.call(_SCATTER, node.args[0], node.args[1], node.args[3])
        waits[0].replace_input_with(node, started)
        graph.erase_node(node)
        for later in reversed(dependent):
            last.append(later)
        record(Decision(name, group, into, f"hidden by the work up to {last.name}"))


def _reason(node: Node, waits: list[Node], options: Options) -> str:
    """Why a collective is left alone, or nothing."""
    if len(waits) != 1 or len(node.users) != 1 or not waits[0].users:
        return "nobody waits for it, or several do"
    source, shapes = value(node.args[0]), (static_shape(node.args[0]), static_shape(node))  # type: ignore[arg-type]
    if source is None or any(s is None or any(map(is_dynamic, s)) for s in shapes):
        return "its shape is not known when it is compiled"
    if source.device.type not in _FLOPS_A_BYTE:
        return f"it is on {source.device.type}"
    if source.device.type == "cuda" and not override.installed():
        # torch's kernels would move the bytes by multiprocessors, and share one workspace.
        return "on CUDA it needs symm_cp.override_cuda_ops()"
    if node.target is SCATTER and node.args[1] not in ("sum", "avg"):
        return f"it reduces by {node.args[1]}"
    nbytes = _bytes(node)
    if nbytes < options.min_bytes:
        return f"{nbytes} bytes are too few (min_bytes={options.min_bytes})"
    return ""


def _bytes(node: Node) -> int:
    source, result = value(node.args[0]), value(node)
    assert source is not None
    assert result is not None
    return int(max(source.numel(), result.numel())) * source.element_size()


def _hidden_until(node: Node, wait: Node) -> tuple[Node, list[Node]] | None:
    """The matmul by which enough independent work is done, and what depends on `wait` before it."""
    needed = _FLOPS_A_BYTE[value(node).device.type] * _bytes(node)  # type: ignore[union-attr]
    dependent: dict[Node, None] = {}
    work, current = 0.0, node.next
    while current.op != "output":
        if current is wait or any(given in dependent for given in current.all_input_nodes):
            dependent[current] = None
        elif current.target in MATMULS:
            work += flops(current)
            if work >= needed:
                return current, list(dependent)
        current = current.next
    return None
