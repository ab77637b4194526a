"""Which matmul a collective is next to: nothing lies between them that computes.

The passes fuse what they can follow exactly. This looks further, through whatever only moves or
casts elements, so that `strict` and `explain` tell of a collective that could not be followed to
the matmul that it feeds or that feeds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch.fx import Graph, Node

from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import GATHER, SCATTER

_MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "_int_mm",
    "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
}  # fmt: skip
_MOVES = {
    "view", "reshape", "_unsafe_view", "view_as", "_reshape_alias", "flatten", "unflatten",
    "as_strided", "clone", "alias", "contiguous", "detach", "copy", "copy_", "lift_fresh_copy",
    "to", "_to_copy", "convert_element_type", "view_element_type", "split", "split_with_sizes",
    "split_with_sizes_copy", "chunk", "unbind", "slice", "select", "narrow", "unsqueeze",
    "squeeze", "permute", "transpose", "t", "numpy_T", "expand", "repeat", "cat", "stack",
    "index", "index_select", "gather", "take", "flip", "rev", "roll", "constant_pad_nd",
    "slice_scatter", "select_scatter", "wait_tensor",
}  # fmt: skip
_C10D = "_c10d_functional"
_NOT_COLLECTIVE = {"wait_tensor"}


def _packet(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _only_moves(node: Node) -> bool:
    return node.target is operator.getitem or _packet(node) in _MOVES


def _path(start: Node, further: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The nodes from a neighbour of `start` to the nearest matmul; none without one."""
    todo = [[node] for node in further(start)]
    seen: set[Node] = set()
    for path in todo:  # grows
        node = path[-1]
        if _packet(node) in _MATMULS:
            return path
        if node not in seen and _only_moves(node):
            seen.add(node)
            todo += [[*path, following] for following in further(node)]
    return []


def fed_by(node: Node) -> list[Node]:
    """The nodes from a user of a tensor to the nearest matmul that it feeds; none without one."""
    return _path(node, lambda one: one.users)


def feeding(node: Node) -> list[Node]:
    """The nodes from an input of a collective to the nearest matmul that feeds it.

    Sums are passed, too: those of products are fused.
    """

    def inputs(one: Node) -> Iterable[Node]:
        return one.all_input_nodes

    found = _path(node, inputs)
    sums = [one for one in node.all_input_nodes if _packet(one) == "add"]
    return found or next((path for one in sums if (path := [one, *_path(one, inputs)])[1:]), [])


def record_others(graph: Graph) -> None:
    """Records the collectives next to a matmul that have no fused form at all."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != _C10D or node.target in (GATHER, SCATTER):
            continue
        name = _packet(node)
        path = [] if name in _NOT_COLLECTIVE else fed_by(node) or feeding(node)
        if path:
            group = str(node.args[-1])
            reason = f"{path[-1].name} is next to it, and there is no fused op for {name}"
            record(Decision(node.name, group, None, reason, critical=True))
