"""Inserts, moves and erases nodes, with the metadata that later passes need."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from symm_cp.inductor.axes import Axes, flat, origin, refined, sizes, without
from symm_cp.inductor.nodes import (
    WAIT,
    WAIT_FOR_ALL,
    aten,
    is_dynamic,
    is_item,
    is_result,
    static_shape,
)
from symm_cp.inductor.origins import Bits, Traced, Tracer

#: Marks nodes that a pass has inserted, in their metadata.
_OURS = "symm_cp"


def is_ours(node: Node) -> bool:
    """Tells whether a pass has inserted a node."""
    return _OURS in node.meta


P = ParamSpec("P")


class DynamicShapeError(Exception):
    """A shape cannot be written into the graph, because more than one of its sizes is unknown."""


def explains_dynamic_shapes(rewrite: Callable[P, str]) -> Callable[P, str]:
    """Decorates a rewrite, which returns why it failed: returns `DynamicShapeError` as text."""

    @wraps(rewrite)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return rewrite(*args, **kwargs)
        except DynamicShapeError as error:
            return str(error)

    return explaining


def _reshape_sizes(shape: Sequence[int]) -> list[int]:
    """Returns a reshape's argument: -1 stands for an unknown size, which the others imply."""
    sizes = [-1 if is_dynamic(size) else size for size in shape]
    unknown = sizes.count(-1)
    if unknown > 1:
        raise DynamicShapeError(f"{unknown} sizes are unknown at compile time")
    return sizes


def wait_for_each(graph: Graph) -> None:
    """Replaces each wait for several tensors by waits for one, which the passes look for."""
    for node in graph.find_nodes(op="call_function", target=WAIT_FOR_ALL) if WAIT_FOR_ALL else ():
        given: Any = node.args[0]
        if not all(is_item(user) for user in node.users):
            continue
        emitter = Emitter(graph, node)
        if isinstance(given, Node):
            given = [emitter.item(given, index) for index in range(len(given.meta["val"]))]
        waits = [emitter.call(WAIT, tensor) for tensor in given]
        for item in list(node.users):
            item.replace_all_uses_with(waits[item.args[1]])  # type: ignore[index]
            graph.erase_node(item)
        graph.erase_node(node)


class Emitter:
    """Inserts calls before a node of a graph."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Inserts a call, and computes its fake value."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = detect_fake_mode((fake_args, fake_kwargs))
        assert mode is not None
        with mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        node.meta[_OURS] = True
        return node

    def item(self, node: Node, index: int) -> Node:
        """Inserts an access to one of several results."""
        with self._graph.inserting_before(self._before):
            item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = node.meta["val"][index]
        return item

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """Inserts a reshape where one is needed."""
        if static_shape(node) == tuple(shape):
            return node
        return self.call(aten.reshape.default, node, _reshape_sizes(shape))

    def cast(self, node: Node, dtype: torch.dtype | Bits) -> Node:
        """Inserts a change of dtype where one is needed."""
        if isinstance(dtype, Bits):
            return self.call(aten.view.dtype, node, dtype.dtype)
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def in_order(self, have: Axes, want: Axes) -> bool:
        """Tells whether a reshape alone turns one arrangement into another one."""
        fine = refined(have, want)
        return fine is not None and flat(fine[0]) == flat(fine[1])

    def rearrange(self, node: Node, have: Axes, want: Axes) -> Node | None:
        """Turns a tensor of one arrangement into another one of the same elements."""
        fine = refined(have, want)
        if fine is None:
            return None
        factors, wanted = flat(fine[0]), flat(fine[1])
        if factors != wanted:
            node = self.reshape(node, [factor.size for factor in factors])
            order = [factors.index(factor) for factor in wanted]
            node = self.call(aten.permute.default, node, order)
        return self.reshape(node, sizes(want))

    def shard(self, traced: Traced, want: Axes) -> Node | None:
        """Inserts this rank's shard of a gathered tensor, arranged as `want`."""
        assert traced.ranks is not None
        node: Node | None = traced.shard
        casts = traced.dtypes[1:]
        if traced.sliced is not None:
            whole = traced.sliced.of
            assert whole.ranks is not None
            node = self.shard(whole, without(whole.axes, whole.ranks))
            casts = traced.dtypes[len(whole.dtypes) :]
            if node is not None:
                node = self.call(traced.sliced.target, node, *traced.sliced.args)
        shape = None if node is None else static_shape(node)
        if node is None or shape is None:
            return None
        node = self.rearrange(node, origin(shape), want)
        if node is None:
            return None
        for dtype in casts:
            node = self.cast(node, dtype)
        return node


def order_of(graph: Graph) -> dict[Node, int]:
    """Returns the position of each node."""
    return {node: position for position, node in enumerate(graph.nodes)}


def depends(nodes: Iterable[Node], on: Iterable[Node], order: dict[Node, int]) -> bool:
    """Tells whether any of `nodes` is, or needs, one of `on`."""
    targets = set(on)
    first = min((order[node] for node in targets), default=0)
    pending, seen = list(nodes), set()
    while pending:
        node = pending.pop()
        if node in targets:
            return True
        if node not in seen and order[node] > first:
            seen.add(node)
            pending += node.all_input_nodes
    return False


def hoist(before: Node, nodes: Iterable[Node]) -> None:
    """Moves nodes, with all their operands, before a node that they do not depend on."""
    order = order_of(before.graph)
    moved: set[Node] = set()
    pending = [node for node in nodes if order[node] > order[before]]
    while pending:
        node = pending.pop()
        if node not in moved:
            moved.add(node)
            pending += [n for n in node.all_input_nodes if order[n] > order[before]]
    for node in sorted(moved, key=order.__getitem__):
        before.prepend(node)


def replace_collective(graph: Graph, node: Node, result: Any) -> None:
    """Replaces a collective and its waits by a result."""
    for wait in [user for user in node.users if user.target is WAIT]:
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    # A checkpoint may save the result before the wait; waiting for a finished result is free.
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def erase_unused(graph: Graph, tracer: Tracer, wait: Node) -> None:
    """Erases a gather and the arrangements of its result, unless they are still used."""
    if wait not in graph.find_nodes(op="call_function", target=WAIT):
        return
    _erase(graph, reversed(tracer.of(wait)))
    gather = wait.args[0] if wait.args else None
    if isinstance(gather, Node) and not gather.users:
        graph.erase_node(gather)


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases unused `nodes`, given in reverse graph order, and users that are unused themselves."""
    for node in nodes:
        for user in list(node.users):
            if user.op == "call_function" and _is_unused(user):
                _erase(graph, [*user.users, user])
        if not node.users:
            graph.erase_node(node)


def _is_unused(node: Node) -> bool:
    return all(_is_unused(user) for user in node.users) and not is_result(node)
