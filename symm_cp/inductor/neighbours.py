"""Which matmul a collective is next to: only ops that move or cast elements lie between them.

The passes fuse where they can follow each element. This module looks further, through any op that
only moves or casts elements, so that `strict` and `explain` also report collectives next to a
matmul where no pass could follow the elements.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from symm_cp.inductor.decisions import Decision, record, recorded
from symm_cp.inductor.nodes import ALL_TO_ALL, GATHER, SCATTER, argument, group_of
from symm_cp.inductor.rewrite import is_ours

MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "_int_mm",
    "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
}  # fmt: skip
# Matmuls of experts, where each expert multiplies its own rows.
GROUPED = {"_grouped_mm", "_scaled_grouped_mm"}
# Attention that no pass fuses with gathered keys; below also torch's kernels, which passes fuse.
_UNFUSED_ATTENTION = {"flex_attention", "_varlen_attn"}
ATTENTION = _UNFUSED_ATTENTION | {
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention",
                 "cudnn_attention")
}  # fmt: skip
MOVES = {
    "view", "reshape", "_unsafe_view", "view_as", "_reshape_alias", "flatten", "unflatten",
    "as_strided", "clone", "alias", "contiguous", "detach", "copy", "copy_", "lift_fresh_copy",
    "to", "_to_copy", "convert_element_type", "view_element_type", "split", "split_with_sizes",
    "split_with_sizes_copy", "chunk", "unbind", "slice", "select", "narrow", "unsqueeze",
    "squeeze", "permute", "transpose", "t", "numpy_T", "expand", "repeat", "cat", "stack",
    "index", "index_select", "gather", "take", "flip", "rev", "roll", "constant_pad_nd",
    "slice_scatter", "select_scatter", "wait_tensor", "wait_tensors",
}  # fmt: skip
# Matches ops of `symm_mem` that compute as well; the other ops are plain collectives.
_COMPUTES = re.compile("fused|matmul|attention|project")
_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
#: What to do instead, by a part of the name of a collective without a fused form.
_INSTEAD = {
    "all_to_all": "; if it exchanges a sequence for heads, call symm_cp.sequence_to_heads and "
    "heads_to_sequence, which copy straight to where the heads belong",
    "broadcast": "; broadcast constant tensors once, outside of the graph",
}
#: What to do instead of exchanging tokens by an all-to-all; ends a reason not to fuse.
FOR_EXPERTS = (
    ": for tokens and their experts, symm_cp.moe.dispatch and combine count, sort and exchange"
)
_NOT_COLLECTIVES = {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd"}  # 2.15 has the second


def _packet(node: Node) -> str:
    if isinstance(node.target, HigherOrderOperator):
        return str(node.target.name())
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _only_moves(node: Node) -> bool:
    return node.target is operator.getitem or _packet(node) in MOVES


def _path(
    start: Node, neighbours: Callable[[Node], Iterable[Node]], ends: set[str] = MATMULS
) -> list[Node]:
    """Returns the nodes from a neighbour of `start` to the nearest of `ends`; empty without one."""
    paths = [[node] for node in neighbours(start)]
    seen: set[Node] = set()
    for path in paths:  # grows: breadth first
        node = path[-1]
        if _packet(node) in ends:
            return path
        if node not in seen and _only_moves(node):
            seen.add(node)
            paths += [[*path, following] for following in neighbours(node)]
    return []


def _users(node: Node) -> Iterable[Node]:
    return node.users


def _inputs(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


def fed_by(node: Node) -> list[Node]:
    """Returns the nodes from a user of a tensor to the nearest matmul that it feeds, if any."""
    return _path(node, _users)


def why_attention_is_not_fused(node: Node) -> str:
    """Returns why the attention that a gathered tensor feeds is not fused; empty without one."""
    path = _path(node, _users, ATTENTION)
    if not path:
        return ""
    name = _packet(path[-1]).removeprefix("_")
    if _packet(path[-1]) in _UNFUSED_ATTENTION:
        where = "which is fused only within symm_cp.context_parallel, on keys that are not gathered"
        return f"it feeds {name}, {where}"
    return f"it feeds {name}, but not as all keys or values of an attention that is fused"


def feeding(node: Node) -> list[Node]:
    """Returns the nodes from an input of a collective to the nearest matmul that feeds it, if any.

    Also looks through a sum, because sums of products are fused.
    """
    if path := _path(node, _inputs):
        return path
    for addition in node.all_input_nodes:
        if _packet(addition) == "add" and (path := _path(addition, _inputs)):
            return [addition, *path]
    return []


def is_of_experts(matmul: Node) -> bool:
    """Tells whether a matmul is of experts: no pass fuses a collective with these."""
    return _packet(matmul) in GROUPED


def record_called(graph: Graph) -> None:
    """Records the ops of `symm_mem` that the program itself calls, unless a pass has done so.

    Ops without a group are left out: no other rank takes part in them.
    """
    known = recorded()
    for node in graph.nodes:
        called = getattr(node.target, "namespace", "") == "symm_mem" and not is_ours(node)
        if called and node.name not in known and argument(node, "group_name") is not None:
            name = _packet(node)
            fused_into, runs_as = (name, None) if _COMPUTES.search(name) else (None, name)
            reason = "called by the program"
            record(Decision(node.name, group_of(node), fused_into, reason, runs_as=runs_as))


def record_others(graph: Graph) -> None:
    """Records the collectives that no pass has recorded."""
    known = recorded()
    for node in graph.nodes:
        is_collective = getattr(node.target, "namespace", "") in _NAMESPACES
        if not is_collective or _packet(node) in _NOT_COLLECTIVES or node.name in known:
            continue
        path = fed_by(node) or feeding(node)
        reason = _why_not_fused(node, path)
        record(Decision(node.name, group_of(node), None, reason, bool(path)))


def _why_not_fused(node: Node, path: list[Node]) -> str:
    name = _packet(node)
    next_to = f"{path[-1].name} is next to it, and " if path else ""
    if node.target in (GATHER, SCATTER):
        return f"{next_to}async_tp is off"
    if node.target is ALL_TO_ALL and path:  # `fuse_all_to_alls` would have recorded it
        return f"{next_to}context_parallel is off"
    if "coalesced" in name:
        return f"{next_to}it takes several tensors at once: call it once for each tensor"
    advice = next((text for part, text in _INSTEAD.items() if part in name), "")
    return f"{next_to}no fused op exists for {name}{advice}"
