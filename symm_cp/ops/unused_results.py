"""Keeps calls in compiled programs whose results this rank does not use: its peers wait for them.

The compiler drops a call without effects if nobody uses its result. Declaring all ops effectful
would keep each call of a forward pass in the backward graph, too, wherever its inputs are saved.
So a graph gets one node more for each call that would be dropped, and for no other one: `keep`, an
op that has effects for the compiler, reads the result in the pass that made the call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import is_tensor
from torch.fx import Node, has_side_effect
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing
from torch.utils._pytree import tree_leaves_with_path

from symm_cp.ops.op import Op

_LIBRARY = torch.library.Library("symm_cp", "FRAGMENT")
_LIBRARY.define("keep(Tensor result) -> Tensor")
_LIBRARY.impl("keep", lambda result: result.new_empty(0), "CompositeExplicitAutograd")
_KEEP = has_side_effect(torch.ops.symm_cp.keep.default)

_PASS = "partitioner_tag"  # the key under which AOTAutograd notes a node's pass
_OF_PASS = {"is_forward": "must_be_in_forward", "is_backward": "must_be_in_backward"}

_ops: set[Any] = set()


def keep_calls(op: Op, library: torch.library.Library) -> None:
    """Keeps the calls of an op, unless no peer waits for them."""
    if not op.one_sided:
        _ops.add(op.overload)
        torch.library.register_torch_dispatch(
            op.full_name, ProxyTorchDispatchMode, _traced, lib=library
        )


def _traced(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    """Traces a call; also has its graph keep such calls when it is complete."""
    graph = mode.tracer.graph

    def create_node(kind: str, target: Any, args: Any, *more: Any, **named: Any) -> Node:
        node: Node = type(graph).create_node(graph, kind, target, args, *more, **named)
        if kind == "output":
            del graph.create_node
            with disable_proxy_modes_tracing():
                keep_unused(graph)
        return node

    graph.create_node = create_node
    return mode.__torch_dispatch__(func, types, args, kwargs)


def keep_unused(graph: torch.fx.Graph) -> None:
    """Keeps the calls in a graph whose results nobody uses in the pass that makes them."""
    used: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.target in _ops and node not in used:
            _keep(graph, node)
        elif not (node in used or node.is_impure()):
            continue
        # A call that only the backward pass needed could be made there: the peers make it before.
        backward = _is_backward(node)
        used.update(given for given in node.all_input_nodes if _is_backward(given) or not backward)


def _is_backward(node: Node) -> bool:
    return node.meta.get(_PASS) == "is_backward"


def _keep(graph: torch.fx.Graph, node: Node) -> None:
    value, last, tag = node.meta["val"], node, node.meta.get(_PASS)
    tensors = (path for path, each in tree_leaves_with_path(value) if is_tensor(each))
    for key in next(tensors):
        value = key.get(value)
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (last, key.idx))
        last.meta |= {"val": value, _PASS: tag}
    with graph.inserting_after(last):
        kept = graph.call_function(_KEEP, (last,))
    kept.meta |= {"val": value.new_empty(0), _PASS: _OF_PASS.get(tag, tag)}
