"""Collectives with independent matmuls to overlap with become low-contention ones."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import MATMULS, flops
from symm_cp.inductor.nodes import GATHER, SCATTER, WAIT, group_of, is_dynamic, static_shape, value
from symm_cp.inductor.options import Options
from symm_cp.inductor.rewrite import Emitter
from symm_cp.ops.common import op_for

# Floating-point operations of a matmul that take at least as long as a collective takes for a byte
# of its larger side. CPU: measured with two ranks on an Intel Xeon (benchmarks/results/matmul.json,
# collectives.json): 200 GFLOP/s a rank in float32, 64 MiB gathered in 8.7 ms. CUDA: data sheet of
# an H100: 990 TFLOP/s in bfloat16, 450 GB/s over NVLink.
_FLOPS_PER_BYTE = {"cpu": 26.0, "cuda": 2200.0}


def sink_collectives(graph: Graph, options: Options) -> None:
    """Replaces large collectives, and moves their waits behind matmuls that take as long."""
    for node in [n for n in graph.nodes if n.target in (GATHER, SCATTER)]:
        name, group = node.name, group_of(node)
        waits = [user for user in node.users if user.target is WAIT]
        reason = _why_not(node, waits, options)
        overlap = None if reason else _overlap(node, waits[0])
        if overlap is None:
            record(Decision(name, group, None, reason or "too little independent work follows it"))
            continue
        last, dependent = overlap
        emitter = Emitter(graph, node)
        args: tuple[Any, ...]
        if node.target is GATHER:
            into, args = "_low_contention_all_gather", (node.args[0], node.args[2])
        else:
            into = "_low_contention_reduce_scatter"
            args = (node.args[0], node.args[1], node.args[3])
        started = emitter.call(op_for(into, node.meta["val"].device), *args)
        waits[0].replace_input_with(node, started)
        graph.erase_node(node)
        for later in reversed(dependent):
            last.append(later)
        record(Decision(name, group, into, f"hidden by the work up to {last.name}"))


def _why_not(node: Node, waits: list[Node], options: Options) -> str:
    """Returns why a collective is left alone, or an empty text."""
    if len(waits) != 1 or len(node.users) != 1 or not waits[0].users:
        return "its result is not used after exactly one wait"
    source, shapes = value(node.args[0]), (static_shape(node.args[0]), static_shape(node))
    if source is None or any(shape is None or any(map(is_dynamic, shape)) for shape in shapes):
        return "its shape is unknown at compile time"
    device = source.device.type
    if device not in _FLOPS_PER_BYTE:
        return f"it is on {device}"
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


def _overlap(node: Node, wait: Node) -> tuple[Node, list[Node]] | None:
    """Finds the matmul at whose end enough independent work is done.

    Also returns the nodes before it that depend on `wait`.
    """
    result = value(node)
    assert result is not None
    needed = _FLOPS_PER_BYTE[result.device.type] * _bytes(node)
    dependent: dict[Node, None] = {}
    work, current = 0.0, node.next
    while current.op != "output":
        if current is wait or any(operand in dependent for operand in current.all_input_nodes):
            dependent[current] = None
        elif current.target in MATMULS:
            work += flops(current)
            if work >= needed:
                return current, list(dependent)
        current = current.next
    return None
