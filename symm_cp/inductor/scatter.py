"""Matmuls whose product is reduce-scattered become fused matmul-reduce-scatters."""

from __future__ import annotations

import itertools
import math

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, lead, sizes
from symm_cp.inductor.emit import Emitter
from symm_cp.inductor.gather import MATMULS, flops, left, right
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import SCATTER, WAIT, Traced, Tracer, aten, static_shape, value

_FUSED = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
_FUSED_SUM = torch.ops.symm_mem._fused_matmuls_reduce_scatter.default


def fuse_scatters(graph: Graph, options: Options) -> None:
    """Replaces what it can, and records what became of each reduce-scatter."""
    tracer = Tracer(graph, MATMULS)
    for wait in [node for node in graph.nodes if node.target is WAIT]:
        scatter = wait.args[0]
        if not isinstance(scatter, Node) or scatter.target is not SCATTER:
            continue
        traced = tracer[scatter.args[0]]
        group, name = str(scatter.args[3]), scatter.name
        if traced is None or traced.ranks is not None:
            record(Decision(name, group, None, "what is scattered is no matmul's product"))
            continue
        matmul = traced.source
        reason = _reason(tracer, scatter, traced, options)
        reason = reason or _rewrite(graph, scatter, wait, traced)
        fused = None if reason else "fused_matmul_reduce_scatter"
        record(Decision(name, group, fused, reason or matmul.name, critical=True))


def _reason(tracer: Tracer, scatter: Node, traced: Traced, options: Options) -> str:
    """Why a product is not fused with its reduce-scatter, or nothing."""
    matmul = traced.source
    if [user for _, user in tracer.uses(matmul)] != [scatter] or len(scatter.users) != 1:
        return f"{matmul.name} is used elsewhere, too"
    tensor = value(left(matmul))
    if tensor is None or not tensor.is_floating_point():
        return "its input is not of a floating-point dtype"
    if matmul.target is aten._scaled_mm.default:
        return "scaled matmuls are not fused with a reduce-scatter by this pass yet"
    if matmul.target is aten.addmm.default and any(
        matmul.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")
    ):
        return "addmm scales its terms"
    bits = [dtype.itemsize for dtype in traced.dtypes]
    if any(b > a for a, b in itertools.pairwise(bits)):
        return f"its product is reduced as {traced.dtypes[-1]}, which is wider than it is"
    if scatter.args[1] not in ("sum", "avg"):
        return f"it reduces by {scatter.args[1]}"
    return options.too_small(tensor.device, flops(matmul))


def _rewrite(graph: Graph, scatter: Node, wait: Node, traced: Traced) -> str:
    matmul, world_size = traced.source, int(scatter.args[2])  # type: ignore[arg-type]
    reduce_op, group = scatter.args[1], scatter.args[3]
    found = lead(traced.axes, 0, world_size)
    shape = static_shape(matmul)
    if found is None or shape is None:
        return "the scattered dimension is not one of the product's"
    ranks, want = found
    A, B, bias = left(matmul), right(matmul), None
    M, N = shape
    K = static_shape(A)[1]  # type: ignore[index]
    leads = 1
    if ranks.dim == 0:
        leads = M // ranks.end
    elif ranks.end != N:
        return "the scattered dimension is inside of the columns of the product"
    emitter = Emitter(graph, scatter)
    full = [M, N]
    dim = ranks.dim
    if leads > 1:
        A = emitter.reshape(A, [leads, M // leads, K])
        full, dim = [leads, M // leads, N], 1
    if matmul.target is aten.addmm.default:
        bias = emitter.call(aten.expand.default, matmul.args[0], full)
    if bias is None:
        result = emitter.call(_FUSED, A, B, reduce_op, dim, group)
    else:
        result = emitter.call(_FUSED_SUM, [A], [B], bias, reduce_op, dim, group)
    have = _kept(ranks, leads, M, N)
    arranged = emitter.rearrange(result, have, want)
    if arranged is None:
        return "the scattered product cannot be arranged"
    assert math.prod(sizes(want)) * world_size == M * N
    for dtype in traced.dtypes[1:]:
        arranged = emitter.cast(arranged, dtype)
    wait.replace_all_uses_with(arranged)
    graph.erase_node(wait)
    graph.erase_node(scatter)
    return ""


def _kept(ranks: Factor, leads: int, rows: int, columns: int) -> Axes:
    """The axes of the scattered product, in terms of the whole one."""
    if ranks.dim == 1:
        return ((Factor(0, 1, rows),), (Factor(1, 1, ranks.stride),))
    inner = (Factor(0, 1, ranks.stride),)
    outer = (Factor(0, ranks.end, leads),)
    last = (Factor(1, 1, columns),)
    axes = (outer, inner, last) if leads > 1 else (inner, last)
    return tuple(tuple(f for f in dim if f.size != 1) for dim in axes)
