"""How to change a program so that a gather is fused, with the same result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from symm_cp.inductor.axes import expose
from symm_cp.inductor.matmuls import MATMULS, left
from symm_cp.inductor.nodes import argument, aten, is_item, static_shape
from symm_cp.inductor.origins import VIEWS, Tracer

_DIMS = ("dim", "dims", "dim0", "dim1")
_SAME = {aten.clone.default, torch.ops.prims.convert_element_type.default}
#: Reductions along dimensions that are kept with size 1.
_REDUCTIONS = {
    aten.var_mean.correction,
    aten.var.correction,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
}


def _gathered_dim(tracer: Tracer, node: Node) -> int | None:
    """Returns the dimension of a gathered tensor that the ranks' parts are joined in."""
    traced = tracer[node]
    exposed = None if traced is None or not traced.ranks else expose(traced.axes, traced.ranks)
    return None if exposed is None else exposed[0]


def _dims_of(node: Node, ndim: int) -> set[int] | None:
    """Returns the dimensions that an op works along; None if it has no such argument."""
    if node.target is aten.index.Tensor:
        return {at for at, index in enumerate(node.args[1]) if index is not None}  # type: ignore[arg-type]
    given = [argument(node, name) for name in _DIMS if hasattr(node.target, "_schema")]
    dims = [dim for dim in given if dim is not None]
    flat = [each for dim in dims for each in (dim if isinstance(dim, list | tuple) else [dim])]
    return {int(dim) % ndim for dim in flat} if flat else None


def instead_of_moving(tracer: Tracer, node: Node) -> str:
    """Returns what to do about an op that takes or moves elements between a gather and a matmul."""
    gathered = node.args[0] if node.args else None
    dim = _gathered_dim(tracer, gathered) if isinstance(gathered, Node) else None
    ndim = len(static_shape(gathered) or ())
    dims = None if dim is None else _dims_of(node, ndim)
    if dims is None:
        return ""
    if dim not in dims:
        return ": move it before the collective"
    # Rows of the product are made of the same rows, columns are not.
    return "" if ndim - 1 in {dim, *dims} else ": apply it to the product of the matmul instead"


def through_rows(tracer: Tracer, wait: Node) -> str:
    """Returns the advice if a gather feeds a matmul through ops that work on each row by itself.

    Normalisations do: their result is the same if they run before the gather. Empty otherwise.
    """
    known: dict[Node, int] = {}
    for node in tracer.of(wait):
        dim = _gathered_dim(tracer, node)
        if dim is not None and dim != len(static_shape(node) or ()) - 1:
            known[node] = dim
    given, others = set(known), set[Node]()  # others: of several rows
    for node in wait.graph.nodes:
        inputs = [each for each in node.all_input_nodes if each in known]
        if not others.isdisjoint(node.all_input_nodes):
            others.add(node)
            continue
        if not inputs or node in known:
            continue
        if node.target in MATMULS and left(node) in known:
            names = ", ".join(dict.fromkeys(_names(left(node), known, given)))
            return (
                f"it feeds {node.name} through {names}, which works on each row by itself: apply "
                "it to the shard, before the collective; the result is the same"
            )
        if _works_on_rows(node, known):
            known[node] = known[inputs[0]]
        else:
            others.add(node)
    return ""


def _names(node: Node, known: dict[Node, int], given: set[Node]) -> Iterator[str]:
    """Yields the names of the program's ops between a gather and a node, first op first."""
    pending, between = [node], set[Node]()
    while pending:
        each = pending.pop()
        if each in known and each not in given and each not in between:
            between.add(each)
            pending += each.all_input_nodes
    for each in node.graph.nodes:
        if each in between and not is_item(each) and each.target not in VIEWS:
            op = each.meta.get("original_aten") or each.target
            yield getattr(getattr(op, "overloadpacket", op), "__name__", each.name)


def _works_on_rows(node: Node, known: dict[Node, int]) -> bool:
    """Whether each row of the result depends on the same row of the inputs alone."""
    (first, *_) = inputs = [each for each in node.all_input_nodes if each in known]
    dim, whole = known[first], static_shape(first) or ()
    if is_item(node):
        return True
    if node.target in VIEWS:
        shape = static_shape(node) or ()
        return dim == 0 and len(shape) == len(whole) and shape[0] == whole[0]
    if node.target in _REDUCTIONS:
        dims = _dims_of(node, len(whole))
        return bool(argument(node, "keepdim")) and dims is not None and dim not in dims
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags and node.target not in _SAME:
        return False
    shape = static_shape(node) or ()
    behind = len(shape) - dim  # dimensions from the gathered one on
    others = [static_shape(each) or () for each in node.all_input_nodes if each not in known]
    return all(known[each] == dim for each in inputs) and all(
        len(other) < behind or other[-behind] == 1 for other in others
    )
