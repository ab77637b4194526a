"""Exchanges of a sequence for heads next to projections become projections fused with them.

`exchange_heads` of products becomes `project_to_heads`; `exchange_heads` whose results are
multiplied (and the products added) becomes `project_from_heads`. A forward graph has the first for
queries, keys and values and the second behind attention, a backward graph the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, origin, permute, view
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import PLAIN, bias_of, left, why_too_small, why_unsupported
from symm_cp.inductor.nodes import aten, group_of, is_dynamic, is_item, static_shape
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import ARRANGES, VIEWS, Tracer, rearranged_by
from symm_cp.inductor.rewrite import Emitter, depends, explains_dynamic_shapes, hoist, order_of

_EXCHANGE = torch.ops.symm_mem.exchange_heads.default
_PROJECT = torch.ops.symm_mem.project_to_heads.default
_COLLECT = torch.ops.symm_mem.project_from_heads.default
#: Why an exchange without a projection next to it is left alone: not worth a line of the report.
_NO_PROJECTION = "no projection"


def fuse_projections(graph: Graph, options: Options) -> None:
    """Fuses exchanges of heads with the matmuls before or behind them; records each decision."""
    exchanges = graph.find_nodes(op="call_function", target=_EXCHANGE)
    tracer = Tracer(graph, PLAIN, items_of={_EXCHANGE}) if exchanges else None
    for node in exchanges:
        assert tracer is not None
        name, group = node.name, group_of(node)
        fuse, into = (
            (_fuse_before, "project_to_heads")
            if node.args[1]
            else (_fuse_behind, "project_from_heads")
        )
        reason = fuse(graph, tracer, node, options)
        if not reason:
            record(Decision(name, group, into, "with the projections next to it"))
        elif reason is not _NO_PROJECTION:
            text = f"called by the program; not fused with its projections: {reason}"
            record(Decision(name, group, "exchange_heads", text))


def _heads_of_rows(shape: tuple[int, ...]) -> Axes | None:
    """Returns how the heads (B, H, S, E) are arranged from rows (B * S, H * E)."""
    batch, heads, rows, features = shape
    by_row = view(origin((batch * rows, heads * features)), (batch, rows, heads, features))
    return None if by_row is None else permute(by_row, (0, 2, 1, 3))


@explains_dynamic_shapes
def _fuse_before(graph: Graph, tracer: Tracer, node: Node, options: Options) -> str:
    """Fuses an exchange with matmuls whose products it sends; returns why not, or an empty text."""
    tensors: Sequence[Node] = node.args[0]  # type: ignore[assignment]
    shapes = [static_shape(tensor) or () for tensor in tensors]
    products = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        traced = tracer[tensor]
        if traced is None or traced.source.target not in PLAIN or len(traced.dtypes) > 1:
            continue
        if tracer.uses(traced.source) == [(tensor, node)] and traced.axes == _heads_of_rows(shape):
            products.append(traced.source)
    if not products:
        return _NO_PROJECTION
    if len(products) < len(tensors):
        return "not all of its tensors are products of matmuls alone"
    if len({shape[3] for shape in shapes}) > 1 or is_dynamic(shapes[0][3]):
        return "its tensors have heads of different sizes"
    if reason := why_not_projected(products, options):
        return reason
    batch, _, rows, features = shapes[0]
    fused = project(Emitter(graph, node), products, (batch, rows), features, *node.args[2:])
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    return ""


def why_not_projected(products: list[Node], options: Options) -> str:
    """Returns why products of matmuls cannot become one projection, or an empty text."""
    if len({source_of(product) for product in products}) > 1:
        return "its tensors are projections of different inputs"
    biases = [bias_of(product) for product in products]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        return "only some of the projections have a bias"
    for product, bias in zip(products, biases, strict=True):
        if bias is not None and static_shape(bias) != (static_shape(product) or ())[1:]:
            return "a projection adds more than a bias"
    return _why_not(products, options)


def project(
    emitter: Emitter, products: list[Node], shape: tuple[int, int], features: int, *options: Any
) -> Node:
    """Inserts the fused projection; `shape` is the batch and this rank's positions."""
    rows = left(products[0])
    whole = (*shape, (static_shape(rows) or ())[1])
    source = source_of(products[0])
    x = source if static_shape(source) == whole else emitter.reshape(rows, whole)
    weights = [product.args[-1] for product in products]
    biases = [bias for product in products if (bias := bias_of(product)) is not None]
    return emitter.call(_PROJECT, x, weights, biases, features, *options)


def _why_not(matmuls: list[Node], options: Options) -> str:
    reasons = (why_unsupported(matmul) for matmul in matmuls)
    return next(filter(None, reasons), "") or why_too_small(matmuls, options)


def source_of(matmul: Node) -> Node:
    """Returns the tensor that was reshaped to the rows of a matmul."""
    rows = left(matmul)
    while rows.target in VIEWS:
        rows = rows.args[0]  # type: ignore[assignment]
    return rows


def _matmul_of(tracer: Tracer, item: Node) -> tuple[Node | None, str]:
    """Returns the one matmul that takes all heads of a position as a row, or why there is none."""
    batch, heads, rows, features = static_shape(item) or ()
    heads_last = permute(origin((batch, heads, rows, features)), (0, 2, 1, 3))
    wanted = view(heads_last, (batch * rows, heads * features))
    found = {
        user
        for operand, user in tracer.uses(item)
        if user.target in PLAIN
        and left(user) is operand
        and tracer.arrangement(operand).axes == wanted
        and len(tracer.arrangement(operand).dtypes) == 1
    }
    if len(found) == 1:
        return found.pop(), ""
    return None, "several matmuls take its result" if found else _NO_PROJECTION


@explains_dynamic_shapes
def _fuse_behind(graph: Graph, tracer: Tracer, node: Node, options: Options) -> str:
    """Fuses an exchange with the matmuls of its results; returns why not, or an empty text."""
    items = {user.args[1]: user for user in node.users if is_item(user)}
    tensors: Sequence[Node] = node.args[0]  # type: ignore[assignment]
    matmuls = []
    for index in range(len(tensors)):
        if index not in items:
            return _NO_PROJECTION
        matmul, reason = _matmul_of(tracer, items[index])
        if matmul is None:
            return reason
        matmuls.append(matmul)
    total, reason = total_of(matmuls, options)
    if total is None:
        return reason
    weights: list[Any] = [matmul.args[-1] for matmul in matmuls]
    if depends(weights, [node], order_of(graph)):
        return "a weight depends on its result"
    hoist(node, weights)
    emitter = Emitter(graph, node)
    out, local = collect(emitter, tensors, matmuls, *node.args[2:])
    for index, tensor in enumerate(local):
        batch, heads, rows, features = static_shape(items[index]) or ()
        heads_last = emitter.reshape(tensor, [batch, rows, heads, features])
        arranged = emitter.call(aten.permute.default, heads_last, [0, 2, 1, 3])
        items[index].replace_all_uses_with(arranged)
    replace_total(total, emitter.reshape(out, static_shape(total) or ()), matmuls)
    return ""


def collect(
    emitter: Emitter, tensors: Sequence[Node], matmuls: list[Node], *options: Any
) -> tuple[Node, list[Node]]:
    """Inserts the fused exchange and projections; returns their sum, and their inputs."""
    fused = emitter.call(_COLLECT, tensors, [matmul.args[-1] for matmul in matmuls], *options)
    local = emitter.item(fused, 1)
    return emitter.item(fused, 0), [emitter.item(local, index) for index in range(len(matmuls))]


def total_of(matmuls: list[Node], options: Options) -> tuple[Node | None, str]:
    """Returns the sum of matmuls that one `project_from_heads` can compute, or why none can."""
    if reason := _why_not(matmuls, options):
        return None, reason
    if len(matmuls) > 1 and any(bias_of(matmul) is not None for matmul in matmuls):
        return None, "a product that is summed has a bias"
    total = _sum_of(matmuls)
    return total, "" if total else "the products of its results are not just added"


def replace_total(total: Node, result: Node, matmuls: list[Node]) -> None:
    """Replaces the sum of matmuls by a result, to which it adds their bias."""
    bias = bias_of(matmuls[0])
    if bias is not None:
        result = Emitter(total.graph, total).call(aten.add.Tensor, result, bias)
    total.replace_all_uses_with(result)
    total.graph.erase_node(total)


def _sum_of(matmuls: list[Node]) -> Node | None:
    """Returns the sum of these matmuls and of nothing else; a single matmul itself."""
    terms = list(matmuls)
    while len(terms) > 1:
        terms = [_last_view(term) for term in terms]
        adding = [
            user
            for term in terms
            for user in term.users
            if user.target is aten.add.Tensor
            and not user.kwargs
            and all(operand in terms and len(operand.users) == 1 for operand in user.args)  # type: ignore[union-attr]
        ]
        if not adding:
            return None
        first = adding[0]
        terms = [first, *(term for term in terms if term not in first.args)]
    return terms[0]


def _last_view(term: Node) -> Node:
    """Follows a product through ops that only reshape its rows into batches."""
    while len(term.users) == 1:
        (user,) = term.users
        shapes = user.target in ARRANGES and rearranged_by(user) is term
        if not shapes or not user.meta["val"].is_contiguous():
            break
        term = user
    return term


def last_sum(term: Node) -> Node:
    """Follows a product through sums, as long as nothing else uses it."""
    while True:
        term = _last_view(term)
        user = next(iter(term.users), None)
        if user is None or len(term.users) > 1 or user.target is not aten.add.Tensor:
            return term
        term = user
