"""Matmuls whose product is reduce-scattered become fused matmul-reduce-scatters."""

from __future__ import annotations

import itertools
import math

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, lead, origin, sizes, view
from symm_cp.inductor.emit import DynamicShapeError, Emitter
from symm_cp.inductor.gather import MATMULS, flops, left, right, unsupported
from symm_cp.inductor.neighbours import feeding
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import (
    SCATTER,
    WAIT,
    Traced,
    Tracer,
    argument,
    aten,
    is_dynamic,
    static_shape,
    value,
)

_FUSED = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
_FUSED_SCALED = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default
_SCALED = aten._scaled_mm.default
_FUSED_SUM = torch.ops.symm_mem._fused_matmuls_reduce_scatter.default


def fuse_scatters(graph: Graph, options: Options) -> None:
    """Replaces what it can, and records what became of each reduce-scatter."""
    tracer = Tracer(graph, MATMULS | {aten.add.Tensor})
    for wait in [node for node in graph.nodes if node.target is WAIT]:
        scatter = wait.args[0]
        if not isinstance(scatter, Node) or scatter.target is not SCATTER:
            continue
        traced = tracer[scatter.args[0]]
        group, name = str(scatter.args[3]), scatter.name
        terms = None if traced is None or traced.ranks else _terms(tracer, traced.source)
        if traced is None or terms is None:
            why = "what is scattered is no matmul's product"
            if path := feeding(scatter):
                why = f"what is scattered is not just {path[-1].name}, arranged in another way"
            record(Decision(name, group, None, why, critical=bool(path)))
            continue
        reason = _unused_elsewhere(tracer, scatter, traced.source)
        reason = reason or _reason(scatter, traced, terms, options)
        try:
            reason = reason or _rewrite(graph, scatter, wait, traced, terms)
        except DynamicShapeError as error:
            reason = str(error)
        scaled = "scaled_" if terms[0].target is _SCALED else ""
        fused = None if reason else f"fused_{scaled}matmul_reduce_scatter"
        text = reason or " + ".join(term.name for term in terms)
        record(Decision(name, group, fused, text, critical=True))


def _terms(tracer: Tracer, node: Node) -> list[Node] | None:
    """The matmuls that a node is the sum of."""
    if node.target in MATMULS:
        return [node] if right(node) is not None else None
    shape = static_shape(node)
    if shape is None or node.kwargs or len(node.args) != 2:
        return None
    found: list[Node] = []
    for operand in node.args:
        traced = tracer[operand]
        if traced is None or traced.ranks or len(traced.dtypes) > 1:
            return None
        # The same elements in the same order.
        if static_shape(operand) != shape or (  # type: ignore[arg-type]
            traced.axes != view(origin(static_shape(traced.source) or ()), shape)
        ):
            return None
        terms = _terms(tracer, traced.source)
        if terms is None:
            return None
        if [user for _, user in tracer.uses(traced.source)] != [node]:
            return None
        found += terms
    return found


def _unused_elsewhere(tracer: Tracer, scatter: Node, source: Node) -> str:
    if [user for _, user in tracer.uses(source)] != [scatter]:
        return f"{source.name} is used elsewhere, too"
    return ""


def _reason(scatter: Node, traced: Traced, terms: list[Node], options: Options) -> str:
    """Why products are not fused with their reduce-scatter, or nothing."""
    bits = [dtype.itemsize for dtype in traced.dtypes]
    if any(b > a for a, b in itertools.pairwise(bits)):
        return f"its product is reduced as {traced.dtypes[-1]}, which is wider than it is"
    if scatter.args[1] not in ("sum", "avg"):
        return f"it reduces by {scatter.args[1]}"
    for matmul in terms:
        reason = unsupported(matmul)
        if not reason and matmul.target is _SCALED:
            if len(terms) > 1:
                reason = "it is a sum of scaled matmuls"
            if argument(matmul, "bias") is not None:
                reason = "its bias is added on every rank, and the fused op would add it once"
        if reason:
            return reason
    tensor = value(terms[0])
    assert tensor is not None
    return options.too_small(tensor.device, sum(map(flops, terms)))


def _rewrite(graph: Graph, scatter: Node, wait: Node, traced: Traced, terms: list[Node]) -> str:
    world_size = int(scatter.args[2])  # type: ignore[arg-type]
    found = lead(traced.axes, 0, world_size)
    shape = static_shape(traced.source)
    if found is None or shape is None:
        return "the scattered dimension is not one of the product's"
    ranks, want = found
    *rows, N = shape
    M, last = math.prod(rows), len(rows)
    emitter = Emitter(graph, scatter)
    if ranks.dim == last:
        if ranks.end != N:
            return "the scattered dimension is inside of the columns of the product"
        full, dim = [M, N], 1
        have: Axes = (*origin(rows), (Factor(last, 1, ranks.stride),))
    else:
        leads = math.prod(rows[: ranks.dim]) * (rows[ranks.dim] // ranks.end)
        full, dim = [leads, M // leads, N], 1
        if leads == 1:
            full, dim = [M, N], 0
        outer = [*origin(rows)[: ranks.dim], (Factor(ranks.dim, ranks.end, full[0]),)]
        if leads > 1:
            outer[-1] = (Factor(ranks.dim, ranks.end, rows[ranks.dim] // ranks.end),)
        else:
            outer.pop()
        inner = (Factor(ranks.dim, 1, ranks.stride),)
        have = (*outer, inner, *(origin(shape)[ranks.dim + 1 :]))
    have = tuple(tuple(factor for factor in axis if factor.size != 1) for axis in have)
    result = _call(emitter, scatter, terms, full, dim)
    arranged = emitter.rearrange(emitter.reshape(result, sizes(have)), have, want)
    if arranged is None:
        return "the scattered product cannot be arranged"
    assert math.prod(sizes(want)) * world_size == M * N
    for dtype in traced.dtypes[1:]:
        arranged = emitter.cast(arranged, dtype)
    wait.replace_all_uses_with(arranged)
    graph.erase_node(wait)
    # A checkpoint may keep what is not waited for yet; to wait for a result that is there is free.
    scatter.replace_all_uses_with(arranged)
    graph.erase_node(scatter)
    return ""


def _call(emitter: Emitter, scatter: Node, terms: list[Node], full: list[int], dim: int) -> Node:
    """Emits the fused op, for products of shape `full`."""
    reduce_op, group = scatter.args[1], scatter.args[3]
    As = [emitter.reshape(left(m), [*full[:-1], _inner(m)]) for m in terms]
    Bs = [right(m) for m in terms]
    first = terms[0]
    biased = any(m.target is aten.addmm.default for m in terms)
    if any(map(is_dynamic, full)) and (first.target is _SCALED or biased):
        raise DynamicShapeError("its rows are not known when it is compiled")
    if first.target is _SCALED:
        scale = first.args[2]
        if math.prod(static_shape(scale) or ()) != 1:  # type: ignore[arg-type]
            scale = emitter.reshape(scale, [*full[:-1], 1])  # type: ignore[arg-type]
        scales = (scale, first.args[3])
        rest = [argument(first, name) for name in _SCALED_OPTIONS]
        return emitter.call(
            _FUSED_SCALED, As[0], Bs[0], *scales, reduce_op, dim, dim, group, full, *rest
        )
    biases = [m.args[0] for m in terms if m.target is aten.addmm.default]
    if len(terms) == 1 and not biases:
        return emitter.call(_FUSED, As[0], Bs[0], reduce_op, dim, group)
    addend = None
    for bias in biases:
        addend = bias if addend is None else emitter.call(aten.add.Tensor, addend, bias)
    if addend is not None:
        addend = emitter.call(aten.expand.default, addend, full)
    return emitter.call(_FUSED_SUM, As, Bs, addend, reduce_op, dim, group)


def _inner(matmul: Node) -> int:
    shape = static_shape(left(matmul))
    assert shape is not None
    return shape[-1]


_SCALED_OPTIONS = ("bias", "scale_result", "out_dtype")
