"""Matmuls whose product is reduce-scattered become fused matmul-reduce-scatters."""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, lead, origin, sizes
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import SCALED, bias_of, left, right
from symm_cp.inductor.nodes import SCATTER, WAIT, argument, aten, is_dynamic, static_shape
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import Traced, Tracer
from symm_cp.inductor.rewrite import DynamicShapeError, Emitter
from symm_cp.inductor.sums import (
    SUMS_OF_MATMULS,
    is_product,
    terms_of,
    why_no_product,
    why_not_fused,
)
from symm_cp.ops.common import op_for

_FUSED_SUM = torch.ops.symm_mem._fused_matmuls_reduce_scatter.default


def fuse_scatters(graph: Graph, options: Options) -> None:
    """Fuses matmuls with reduce-scatters, and records a decision for each of these."""
    tracer = Tracer(graph, SUMS_OF_MATMULS)
    for wait in [node for node in graph.nodes if node.target is WAIT]:
        scatter = wait.args[0]
        if not isinstance(scatter, Node) or scatter.target is not SCATTER:
            continue
        traced = tracer[scatter.args[0]]
        group, name = str(scatter.args[3]), scatter.name
        terms = None
        if traced is not None and not traced.ranks:
            terms = terms_of(tracer, traced.source, is_product)
        if traced is None or terms is None:
            reason, critical = why_no_product(scatter, traced)
            record(Decision(name, group, None, reason, critical))
            continue
        reason = why_not_fused(tracer, scatter, traced, terms, options)
        try:
            reason = reason or _rewrite(graph, scatter, wait, traced, terms)
        except DynamicShapeError as error:
            reason = str(error)
        scaled = "scaled_" if terms[0].target is SCALED else ""
        into = None if reason else f"fused_{scaled}matmul_reduce_scatter"
        text = reason or " + ".join(term.name for term in terms)
        record(Decision(name, group, into, text, critical=True))


def _rewrite(graph: Graph, scatter: Node, wait: Node, traced: Traced, terms: list[Node]) -> str:
    """Replaces matmuls and their reduce-scatter; returns why it could not, or an empty text."""
    world_size = int(scatter.args[2])  # type: ignore[arg-type]
    cut = lead(traced.axes, 0, world_size)
    shape = static_shape(traced.source)
    if cut is None or shape is None:
        return "the scattered dimension is not one of the product's"
    ranks, want = cut
    is_last = ranks.dim == len(shape) - 1
    if is_last and ranks.end != shape[-1]:
        return "the scattered dimension is inside the columns of the product"
    if is_last and terms[0].target is SCALED and ranks.stride % 16 and _device(scatter) != "cpu":
        return "the columns for each rank are not divisible by 16, as kernels on GPUs require"
    product_shape, dim, have = _by_columns(shape, ranks) if is_last else _by_rows(shape, ranks)
    emitter = Emitter(graph, scatter)
    result = _emit(emitter, scatter, terms, product_shape, dim)
    arranged = emitter.rearrange(emitter.reshape(result, sizes(have)), have, want)
    if arranged is None:
        return "the scattered product cannot be arranged"
    assert math.prod(sizes(want)) * world_size == math.prod(shape)
    for dtype in traced.dtypes[1:]:
        arranged = emitter.cast(arranged, dtype)
    wait.replace_all_uses_with(arranged)
    graph.erase_node(wait)
    # A checkpoint may save the result before the wait; waiting for a finished result is free.
    scatter.replace_all_uses_with(arranged)
    graph.erase_node(scatter)
    return ""


def _device(node: Node) -> str:
    device: str = node.meta["val"].device.type
    return device


def _by_columns(shape: tuple[int, ...], ranks: Factor) -> tuple[list[int], int, Axes]:
    """Returns shape and scattered dimension of the fused op's product, and its result's axes."""
    *rows, columns = shape
    have = (*origin(rows), (Factor(ranks.dim, 1, ranks.stride),))
    return [math.prod(rows), columns], 1, _without_ones(have)


def _by_rows(shape: tuple[int, ...], ranks: Factor) -> tuple[list[int], int, Axes]:
    """As `_by_columns`, for a scattered dimension of rows, which the ranks' factor may cut."""
    *rows, columns = shape
    outer_size = rows[ranks.dim] // ranks.end
    leads, all_rows = math.prod(rows[: ranks.dim]) * outer_size, math.prod(rows)
    inner = ((Factor(ranks.dim, 1, ranks.stride),), *origin(shape)[ranks.dim + 1 :])
    if leads == 1:
        return [all_rows, columns], 0, _without_ones((*origin(rows)[: ranks.dim], *inner))
    outer = (*origin(rows)[: ranks.dim], (Factor(ranks.dim, ranks.end, outer_size),))
    return [leads, all_rows // leads, columns], 1, _without_ones((*outer, *inner))


def _without_ones(axes: Axes) -> Axes:
    return tuple(tuple(factor for factor in axis if factor.size != 1) for axis in axes)


def _emit(
    emitter: Emitter, scatter: Node, terms: list[Node], product_shape: list[int], dim: int
) -> Node:
    """Inserts the fused op for products of a shape."""
    reduce_op, group = scatter.args[1], scatter.args[3]
    lefts = [emitter.reshape(left(term), [*product_shape[:-1], _inner(term)]) for term in terms]
    rights = [right(term) for term in terms]
    biases = [bias for term in terms if (bias := bias_of(term)) is not None]
    is_scaled = terms[0].target is SCALED
    if any(map(is_dynamic, product_shape)) and (is_scaled or biases):
        raise DynamicShapeError("its rows are unknown at compile time")
    if is_scaled:
        return _emit_scaled(emitter, scatter, terms[0], lefts[0], product_shape, dim)
    if len(terms) == 1 and not biases:
        op = op_for("fused_matmul_reduce_scatter", lefts[0].meta["val"].device).default
        return emitter.call(op, lefts[0], rights[0], reduce_op, dim, group)
    addend = None
    for bias in biases:
        addend = bias if addend is None else emitter.call(aten.add.Tensor, addend, bias)
    if addend is not None:
        addend = emitter.call(aten.expand.default, addend, product_shape)
    return emitter.call(_FUSED_SUM, lefts, rights, addend, reduce_op, dim, group)


def _emit_scaled(
    emitter: Emitter, scatter: Node, matmul: Node, x: Node, product_shape: list[int], dim: int
) -> Node:
    reduce_op, group = scatter.args[1], scatter.args[3]
    scale, weight_scale = matmul.args[2:4]
    if math.prod(static_shape(scale) or ()) != 1:
        assert isinstance(scale, Node)
        scale = emitter.reshape(scale, [*product_shape[:-1], 1])
    return emitter.call(
        op_for("fused_scaled_matmul_reduce_scatter", x.meta["val"].device).default,
        x,
        right(matmul),
        scale,
        weight_scale,
        reduce_op,
        dim,
        dim,
        group,
        product_shape,
        argument(matmul, "bias"),
        argument(matmul, "scale_result"),
        argument(matmul, "out_dtype"),
        bool(argument(matmul, "use_fast_accum")),
    )


def _inner(matmul: Node) -> int:
    """Returns the length of the dimension that a matmul sums over."""
    shape = static_shape(left(matmul))
    assert shape is not None
    return shape[-1]
