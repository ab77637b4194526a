"""Matmuls whose product is reduce-scattered become fused matmul-reduce-scatters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, lead, origin, sizes
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import SCALED, scaled_options
from symm_cp.inductor.nodes import (
    SCATTER,
    WAIT,
    aten,
    device_of,
    group_of,
    is_dynamic,
    static_shape,
)
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import Traced, Tracer
from symm_cp.inductor.rewrite import (
    DynamicShapeError,
    Emitter,
    explains_dynamic_shapes,
    replace_collective,
)
from symm_cp.inductor.sums import SUMS_OF_MATMULS, operands_of, reduced_products, sum_of_biases
from symm_cp.ops.common import op_for

_FUSED_SUM = torch.ops.symm_mem._fused_matmuls_reduce_scatter.default


def fuse_scatters(graph: Graph, options: Options) -> None:
    """Fuses matmuls with reduce-scatters, and records a decision for each reduce-scatter."""
    tracer = Tracer(graph, SUMS_OF_MATMULS, first_columns=True)
    for scatter in graph.find_nodes(op="call_function", target=SCATTER):
        if all(user.target is not WAIT for user in scatter.users):
            continue
        name, group = scatter.name, group_of(scatter)
        terms, reason, critical = reduced_products(tracer, scatter, options)
        traced = tracer[scatter.args[0]]
        into, text = None, " + ".join(term.name for term in terms)
        if terms and traced is not None and not reason:
            reason = _rewrite(graph, scatter, traced, terms)
            scaled = "scaled_" if terms[0].target is SCALED else ""
            into = None if reason else f"fused_{scaled}matmul_reduce_scatter"
        record(Decision(name, group, into, reason or text, critical))


@explains_dynamic_shapes
def _rewrite(graph: Graph, scatter: Node, traced: Traced, terms: list[Node]) -> str:
    """Replaces matmuls and their reduce-scatter; returns why it could not, or an empty text."""
    world_size = int(scatter.args[2])  # type: ignore[arg-type]
    cut = lead(traced.axes, 0, world_size)
    shape = static_shape(traced.source)
    if cut is None or shape is None:
        return "the scattered dimension is not one of the product's"
    ranks, want = cut
    if traced.end is not None:  # of the columns
        factors = [factor for axis in traced.axes for factor in axis]
        shape = *shape[:-1], math.prod(f.size for f in factors if f.dim == len(shape) - 1)
    is_last = ranks.dim == len(shape) - 1
    if is_last and ranks.end != shape[-1]:
        return "the scattered dimension is inside the columns of the product"
    on_gpu = device_of(scatter) != "cpu"
    if is_last and terms[0].target is SCALED and ranks.stride % 16 and on_gpu:
        return "the columns for each rank are not divisible by 16, as kernels on GPUs require"
    product_shape, dim, have = _by_columns(shape, ranks) if is_last else _by_rows(shape, ranks)
    emitter = Emitter(graph, scatter)
    result = _emit(emitter, scatter, terms, product_shape, dim, traced.end)
    arranged = emitter.rearrange(emitter.reshape(result, sizes(have)), have, want)
    if arranged is None:
        return "the scattered product cannot be arranged"
    assert math.prod(sizes(want)) * world_size == math.prod(shape)
    for dtype in traced.dtypes[1:]:
        arranged = emitter.cast(arranged, dtype)
    replace_collective(graph, scatter, arranged)
    return ""


def _by_columns(shape: tuple[int, ...], ranks: Factor) -> tuple[list[int], int, Axes]:
    """Returns shape and scattered dimension of the fused op's product, and its result's axes."""
    *rows, columns = shape
    have = (*origin(rows), (Factor(ranks.dim, 1, ranks.stride),))
    return [math.prod(rows), columns], 1, _without_ones(have)


def _by_rows(shape: tuple[int, ...], ranks: Factor) -> tuple[list[int], int, Axes]:
    """Like `_by_columns`, for a scattered dimension of rows, which the ranks' factor may cut."""
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
    emitter: Emitter,
    scatter: Node,
    terms: list[Node],
    product_shape: list[int],
    dim: int,
    end: Any,
) -> Node:
    """Inserts the fused op for products of `product_shape`, the columns up to `end` if not None."""
    reduce_op, group = scatter.args[1], scatter.args[3]
    lefts, rights = operands_of(emitter, terms, product_shape[:-1])
    biases = sum_of_biases(emitter, terms)
    if end is not None:
        rights = [emitter.call(aten.slice.Tensor, each, -1, 0, end) for each in rights]
    if end is not None and biases is not None:
        biases = emitter.call(aten.slice.Tensor, biases, -1, 0, end)
    is_scaled = terms[0].target is SCALED
    if any(map(is_dynamic, product_shape)) and (is_scaled or biases is not None):
        raise DynamicShapeError("its rows are unknown at compile time")
    if is_scaled:
        operands = lefts[0], rights[0]
        return _emit_scaled(emitter, scatter, terms[0], operands, product_shape, dim, end)
    if len(terms) == 1 and biases is None:
        op = op_for("fused_matmul_reduce_scatter", scatter.meta["val"].device)
        return emitter.call(op, lefts[0], rights[0], reduce_op, dim, group)
    if biases is not None:
        biases = emitter.call(aten.expand.default, biases, product_shape)
    return emitter.call(_FUSED_SUM, lefts, rights, biases, reduce_op, dim, group)


def _emit_scaled(
    emitter: Emitter,
    scatter: Node,
    matmul: Node,
    operands: tuple[Node, Node | None],
    product_shape: list[int],
    dim: int,
    end: Any,
) -> Node:
    reduce_op, group = scatter.args[1], scatter.args[3]
    scale, weight_scale = matmul.args[2:4]
    if math.prod(static_shape(scale) or ()) != 1:
        assert isinstance(scale, Node)
        scale = emitter.reshape(scale, [*product_shape[:-1], 1])
    if end is not None and math.prod(static_shape(weight_scale) or ()) != 1:
        weight_scale = emitter.call(aten.slice.Tensor, weight_scale, -1, 0, end)
    op = op_for("fused_scaled_matmul_reduce_scatter", operands[0].meta["val"].device)
    options = scaled_options(matmul)
    scales = scale, weight_scale
    return emitter.call(op, *operands, *scales, reduce_op, dim, dim, group, product_shape, *options)
