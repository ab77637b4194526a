"""Puts new nodes into a graph, with what later passes want to know of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from symm_cp.inductor.axes import Axes, flat, origin, refined, sizes, without
from symm_cp.inductor.trace import Bits, Traced, is_dynamic, static_shape

aten = torch.ops.aten


class DynamicShapeError(Exception):
    """A shape cannot be written into the graph: too much of it is not known."""


def _sizes(shape: Sequence[int]) -> list[int]:
    """A shape as a reshape takes it: the one size that is not known follows from the others."""
    found = [-1 if is_dynamic(size) else size for size in shape]
    if found.count(-1) > 1:
        raise DynamicShapeError(f"{found.count(-1)} sizes are not known when it is compiled")
    return found


class Emitter:
    """Inserts calls before a node of a graph."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Inserts a call, and computes its fake value."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = detect_fake_mode(values)
        assert mode is not None
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def item(self, node: Node, index: int) -> Node:
        """Inserts an access to one of several results."""
        with self._graph.inserting_before(self._before):
            found = self._graph.call_function(operator.getitem, (node, index))
        found.meta["val"] = node.meta["val"][index]
        return found

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """Inserts a reshape where one is needed."""
        if static_shape(node) == tuple(shape):
            return node
        return self.call(aten.reshape.default, node, _sizes(shape))

    def cast(self, node: Node, dtype: torch.dtype | Bits) -> Node:
        """Inserts a change of dtype where one is needed."""
        if isinstance(dtype, Bits):
            return self.call(aten.view.dtype, node, dtype.dtype)
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def in_order(self, have: Axes, want: Axes) -> bool:
        """Whether a reshape alone turns one arrangement into another one."""
        fine = refined(have, want)
        return fine is not None and flat(fine[0]) == flat(fine[1])

    def rearrange(self, node: Node, have: Axes, want: Axes) -> Node | None:
        """Turns a tensor of one arrangement into another one of the same elements."""
        fine = refined(have, want)
        if fine is None:
            return None
        parts, wanted = flat(fine[0]), flat(fine[1])
        if parts != wanted:
            node = self.reshape(node, [part.size for part in parts])
            node = self.call(aten.permute.default, node, [parts.index(part) for part in wanted])
        return self.reshape(node, sizes(want))

    def shard(self, traced: Traced, want: Axes) -> Node | None:
        """What this rank contributes to a gathered tensor, in an arrangement of its own."""
        assert traced.ranks is not None
        node: Node | None = traced.shard
        casts = traced.dtypes[1:]
        if traced.sliced is not None:
            of = traced.sliced.of
            assert of.ranks is not None
            node = self.shard(of, without(of.axes, of.ranks))
            casts = traced.dtypes[len(of.dtypes) :]
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
