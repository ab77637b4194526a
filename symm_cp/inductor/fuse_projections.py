"""Exchanges of a sequence for heads next to projections become projections fused with them.

`exchange_heads` of matmuls' products becomes `project_to_heads`, and matmuls of what it returns, or
the sum of several, `project_from_heads`: in a forward graph those of queries, keys and values, and
that behind attention; in a backward graph the same the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import bias_of, left, why_too_small, why_unsupported
from symm_cp.inductor.nodes import aten, is_dynamic, is_item, number_of, static_shape, value
from symm_cp.inductor.options import Options
from symm_cp.inductor.rewrite import DynamicShapeError, Emitter, depends, hoist, order_of

_EXCHANGE = torch.ops.symm_mem.exchange_heads.default
_PROJECT = torch.ops.symm_mem.project_to_heads.default
_COLLECT = torch.ops.symm_mem.project_from_heads.default
_MATMULS = (aten.mm.default, aten.addmm.default)
#: Ops that change shapes only.
_SHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
#: Ops that move nothing: where elements lie follows from the strides of the result.
_VIEWS = _SHAPES | {
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}


def fuse_projections(graph: Graph, options: Options) -> None:
    """Fuses exchanges of heads with the matmuls before or behind them; records what it did."""
    for node in [n for n in graph.nodes if n.target is _EXCHANGE]:
        to_heads = node.args[1]
        try:
            fuse = _fuse_before if to_heads else _fuse_behind
            reason = fuse(graph, node, options)
        except DynamicShapeError as error:
            reason = str(error)
        into = "project_to_heads" if to_heads else "project_from_heads"
        if reason is None:
            record(Decision(node.name, str(node.args[2]), into, "with the projections next to it"))
        elif reason:
            text = f"called by the program; not fused with its projections: {reason}"
            record(Decision(node.name, str(node.args[2]), "exchange_heads", text))


def strides_of(node: Node) -> list[int] | None:
    """Strides with numbers for unknown sizes, as in `static_shape`; None where they are unknown."""
    fake = value(node)
    if fake is None or fake.storage_offset() != 0:
        return None
    numbers = [number_of(step) for step in fake.stride()]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def is_laid_out(node: Node, want: Sequence[int]) -> bool:
    """Whether a result has these strides, in dimensions that are longer than 1."""
    shape, strides = static_shape(node), strides_of(node)
    if shape is None or strides is None or len(shape) != len(want):
        return False
    triples = zip(shape, strides, want, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in triples)


def _side_by_side(node: Node) -> bool:
    """Whether (B, H, S, E) has the heads of a position in one run of memory, without gaps."""
    shape = static_shape(node)
    if shape is None or len(shape) != 4:
        return False
    _, heads, rows, features = shape
    return is_laid_out(node, (rows * heads * features, features, heads * features, 1))


def _product(tensor: Node) -> Node | None:
    """Returns the matmul of which a tensor is a view that nothing else uses."""
    while tensor.target in _VIEWS and len(tensor.users) == 1:
        tensor = tensor.args[0]  # type: ignore[assignment]
    alone = len(tensor.users) == 1
    return tensor if tensor.target in _MATMULS and alone else None


def _fuse_before(graph: Graph, node: Node, options: Options) -> str | None:
    """Fuses an exchange of products; None if it did, else why not (empty: there are none)."""
    tensors: Sequence[Node] = node.args[0]  # type: ignore[assignment]
    products = [_product(tensor) for tensor in tensors]
    found = [product for product in products if product is not None]
    if not found:
        return ""
    if len(found) < len(tensors) or not all(map(_side_by_side, tensors)):
        return "not all of its tensors are products of matmuls alone"
    shapes = [static_shape(tensor) or () for tensor in tensors]
    if len({shape[3] for shape in shapes}) > 1 or is_dynamic(shapes[0][3]):
        return "its tensors have heads of different sizes"
    if reason := why_not_projected(found, options):
        return reason
    batch, _, rows, features = shapes[0]
    fused = project(Emitter(graph, node), found, (batch, rows), features, *node.args[2:])
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    return None


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
    """Inserts the projection that multiplies and exchanges; `shape`: batch and positions here."""
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
    """Returns what was shaped as the rows of a matmul."""
    rows = left(matmul)
    while rows.target in _SHAPES:
        rows = rows.args[0]  # type: ignore[assignment]
    return rows


def _views_of(node: Node) -> Iterator[Node]:
    yield node
    for user in node.users:
        if user.target in _VIEWS:
            yield from _views_of(user)


def _matmul_of(item: Node) -> tuple[Node, str]:
    """Returns the one matmul that takes all heads of a position as a row, or why there is none."""
    batch, heads, rows, features = static_shape(item) or ()
    columns = heads * features
    found = {
        user
        for view in _views_of(item)
        for user in view.users
        if user.target in _MATMULS
        and left(user) is view
        and static_shape(view) == (batch * rows, columns)
        and is_laid_out(view, (columns, 1))
    }
    if len(found) != 1:
        return item, "" if not found else "several matmuls take its result"
    return found.pop(), ""


def _fuse_behind(graph: Graph, node: Node, options: Options) -> str | None:
    """Fuses an exchange with the matmuls of its results; as `_fuse_before`."""
    items: dict[int, Node] = {}
    for user in node.users:
        if is_item(user):
            items[user.args[1]] = user  # type: ignore[index]
    tensors: Sequence[Node] = node.args[0]  # type: ignore[assignment]
    if sorted(items) != list(range(len(tensors))):
        return ""
    matmuls = []
    for index in range(len(tensors)):
        if not _side_by_side(items[index]):
            return "its results are arranged otherwise"
        matmul, reason = _matmul_of(items[index])
        if matmul is items[index]:
            return reason
        matmuls.append(matmul)
    total, reason = total_of(matmuls, options)
    if total is None:
        return reason
    weights = [matmul.args[-1] for matmul in matmuls]
    if depends(weights, [node], order_of(graph)):  # type: ignore[arg-type]
        return "a weight depends on its result"
    hoist(node, weights)  # type: ignore[arg-type]
    emitter = Emitter(graph, node)
    out, local = collect(emitter, tensors, matmuls, *node.args[2:])
    for index, item in items.items():
        batch, heads, rows, features = static_shape(item) or ()
        heads_last = emitter.reshape(local[index], [batch, rows, heads, features])
        item.replace_all_uses_with(emitter.call(aten.permute.default, heads_last, [0, 2, 1, 3]))
    replace_total(total, emitter.reshape(out, static_shape(total) or ()), matmuls)
    return None


def collect(
    emitter: Emitter, tensors: Sequence[Node], matmuls: list[Node], *options: Any
) -> tuple[Node, list[Node]]:
    """Inserts what exchanges, multiplies and adds; returns the sum, and what was multiplied."""
    fused = emitter.call(_COLLECT, tensors, [matmul.args[-1] for matmul in matmuls], *options)
    local = emitter.item(fused, 1)
    return emitter.item(fused, 0), [emitter.item(local, index) for index in range(len(matmuls))]


def total_of(matmuls: list[Node], options: Options) -> tuple[Node | None, str]:
    """Returns the sum of matmuls that can be collected as one, or why there is none."""
    if reason := _why_not(matmuls, options):
        return None, reason
    if len(matmuls) > 1 and any(bias_of(matmul) is not None for matmul in matmuls):
        return None, "a product that is summed has a bias"
    total = _sum_of(matmuls)
    return total, "" if total else "the products of its results are not just added"


def replace_total(total: Node, result: Node, matmuls: list[Node]) -> None:
    """Replaces the sum of matmuls by what was collected, to which it adds their bias."""
    bias = bias_of(matmuls[0])
    if bias is not None:
        result = Emitter(total.graph, total).call(aten.add.Tensor, result, bias)
    total.replace_all_uses_with(result)
    total.graph.erase_node(total)


def _sum_of(matmuls: list[Node]) -> Node | None:
    """Returns what adds up matmuls and nothing else; the matmul itself if it is one."""
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
    """Follows a product through what only shapes its rows in batches."""
    while len(term.users) == 1:
        (user,) = term.users
        if user.target not in _VIEWS or not user.meta["val"].is_contiguous():
            break
        term = user
    return term


def last_sum(term: Node) -> Node:
    """Follows a product through all sums that it alone is a term of."""
    while True:
        term = _last_view(term)
        user = next(iter(term.users), None)
        if user is None or len(term.users) > 1 or user.target is not aten.add.Tensor:
            return term
        term = user
