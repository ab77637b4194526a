"""Sums of matmuls, or of other nodes, that a collective reduces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch.fx import Node

from symm_cp.inductor.axes import origin, view
from symm_cp.inductor.matmuls import (
    MATMULS,
    SCALED,
    bias_of,
    inner,
    left,
    right,
    why_too_small,
    why_unsupported,
)
from symm_cp.inductor.neighbours import FOR_EXPERTS, feeding, is_of_experts
from symm_cp.inductor.nodes import SCATTER, argument, aten, static_shape
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import Traced, Tracer
from symm_cp.inductor.rewrite import Emitter

ADD = aten.add.Tensor
#: Ops at which a trace that looks for sums of matmuls ends.
SUMS_OF_MATMULS = MATMULS | {ADD}


def is_product(node: Node) -> bool:
    """Tells whether a node multiplies by one matrix."""
    return node.target in MATMULS and right(node) is not None


def terms_of(tracer: Tracer, node: Node, is_term: Callable[[Node], bool]) -> list[Node] | None:
    """Returns the terms whose sum a node is, or the node if it is a term; None for other nodes.

    The terms and partial sums have no other users.
    """
    if node.target != ADD:
        return [node] if is_term(node) else None
    shape = static_shape(node)
    if shape is None or node.kwargs or len(node.args) != 2:
        return None
    all_terms: list[Node] = []
    for operand in node.args:
        traced = tracer[operand]
        if traced is None or traced.ranks or len(traced.dtypes) > 1:
            return None
        # The same elements in the same order.
        in_order = view(origin(static_shape(traced.source) or ()), shape)
        if static_shape(operand) != shape or traced.axes != in_order:
            return None
        if users_of(tracer, traced.source) != [node]:
            return None
        terms = terms_of(tracer, traced.source, is_term)
        if terms is None:
            return None
        all_terms += terms
    return all_terms


def users_of(tracer: Tracer, source: Node) -> list[Node]:
    """Returns the users of a source, except for nodes that rearrange it."""
    return [user for _, user in tracer.uses(source)]


def reduced_products(
    tracer: Tracer, reduction: Node, options: Options
) -> tuple[list[Node], str, bool]:
    """Returns the matmuls whose sum a collective reduces (empty if it reduces something else).

    Also returns why they cannot be fused with it, if they cannot, and whether a matmul is next to
    it.
    """
    traced = tracer[reduction.args[0]]
    terms = None if traced is None else terms_of(tracer, traced.source, is_product)
    if traced is not None and terms is not None:
        return terms, _why_not_fused(tracer, reduction, traced, terms, options), True
    if traced is not None and traced.source.target in MATMULS:
        return [], why_unsupported(traced.source), True
    if path := feeding(reduction):
        name = path[-1].name
        if is_of_experts(path[-1]):
            return [], f"{name} feeds it, which has no fused form{FOR_EXPERTS}", True
        reason = f"the reduced tensor is not only {name}, rearranged"
        # Sums of elements may be moved afterwards, but each rank gets only some of the sums.
        instead = "rearrange its operands instead"
        if reduction.target is not SCATTER:
            instead = "move the ops between them behind the collective"
        return [], f"{reason}: {instead}", True
    return [], "the reduced tensor is not the product of a matmul", False


def _why_not_fused(
    tracer: Tracer, reduction: Node, traced: Traced, terms: list[Node], options: Options
) -> str:
    """Returns why products are not fused with the reduction of their sum, or an empty text."""
    if users_of(tracer, traced.source) != [reduction]:
        name = traced.source.name
        return f"{name} is used elsewhere, too: use the reduced tensor there if you can"
    item_sizes = [dtype.itemsize for dtype in traced.dtypes]
    if any(after > before for before, after in itertools.pairwise(item_sizes)):
        dtype = f"{traced.dtypes[-1]}, which is wider than its own dtype"
        return f"its product is reduced as {dtype}: reduce first, then cast"
    if reduction.args[1] not in ("sum", "avg"):
        return f"it reduces by {reduction.args[1]}"
    for matmul in terms:
        reason = why_unsupported(matmul)
        if not reason and matmul.target is SCALED:
            if len(terms) > 1:
                reason = "it is a sum of scaled matmuls"
            if argument(matmul, "bias") is not None:
                reason = (
                    "its bias is added on every rank, and the fused op would add it once: add it "
                    "after the collective"
                )
        if reason:
            return reason
    return why_too_small(terms, options)


def operands_of(
    emitter: Emitter, terms: list[Node], rows: Sequence[int]
) -> tuple[list[Node], list[Node | None]]:
    """Returns the left operands of matmuls, with rows of this shape, and the right operands."""
    lefts = [emitter.reshape(left(term), [*rows, inner(term)]) for term in terms]
    return lefts, [right(term) for term in terms]


def sum_of_biases(emitter: Emitter, terms: list[Node]) -> Node | None:
    """Returns the sum of the biases of matmuls; None if none has a bias."""
    total = None
    for term in terms:
        bias = bias_of(term)
        if bias is not None:
            total = bias if total is None else emitter.call(ADD, total, bias)
    return total
