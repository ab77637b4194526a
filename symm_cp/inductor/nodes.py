"""Properties of the nodes of a graph: which op they call, its arguments, shapes."""

from __future__ import annotations

import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_REDUCE_COALESCED = c10d.all_reduce_coalesced.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default
#: Waits for all results of a coalesced collective; since torch 2.15.
WAIT_FOR_ALL = c10d.wait_tensors.default if hasattr(c10d, "wait_tensors") else None


def is_item(node: Node) -> bool:
    """Tells whether a node is one of several results of another node."""
    return node.target is operator.getitem


def is_result(node: Node) -> bool:
    """Tells whether a node has an effect even if nothing uses it: it returns, or writes memory."""
    return node.op == "output" or bool(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    )


def value(node: Any) -> torch.Tensor | None:
    """Returns the fake tensor of a node; None if it is no tensor."""
    fake = node.meta.get("val") if isinstance(node, Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def device_of(node: Any) -> str:
    """Returns the kind of device that a tensor is on."""
    tensor = value(node)
    return "an unknown device" if tensor is None else tensor.device.type


def argument(node: Node, *names: str) -> Any:
    """Returns the value of the op's argument with one of these names; None if there is none."""
    for index, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name in names:
            if index < len(node.args):
                return node.args[index]
            return node.kwargs.get(parameter.name, parameter.default_value)
    return None


def group_of(collective: Node) -> str:
    """Returns the name of a collective's group, or its ranks where the op takes ranks."""
    group = argument(collective, "group_name")
    return str(argument(collective, "ranks") if group is None else group)


def awaited(graph: Graph, collective: Any) -> list[tuple[Node, Node]]:
    """Returns (wait, call) for each wait for a call of a collective."""
    waits: list[Any] = graph.find_nodes(op="call_function", target=WAIT)
    pairs = [(wait, wait.args[0]) for wait in waits]
    return [(wait, node) for wait, node in pairs if getattr(node, "target", None) is collective]


# Large primes stand for sizes that are unknown at compile time: products and quotients of primes
# are equal, or divide each other, exactly where the unknown sizes do.
_FIRST_PRIME = 1_000_003
_stand_ins: dict[str, int] = {}


def _stand_in(symbol: Any) -> int:
    name = str(symbol)
    if name not in _stand_ins:
        last = max(_stand_ins.values(), default=_FIRST_PRIME - 1)
        _stand_ins[name] = int(sympy.nextprime(last))
    return _stand_ins[name]


def is_dynamic(size: int) -> bool:
    """Tells whether a size in a `static_shape` represents an unknown one."""
    return size >= _FIRST_PRIME and any(size % prime == 0 for prime in _stand_ins.values())


def static_shape(node: Any) -> tuple[int, ...] | None:
    """Returns the shape of a node, with primes for unknown sizes; None if it is no tensor."""
    tensor = value(node)
    return None if tensor is None else shape_of(tensor)


def shape_of(fake: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the shape of a fake tensor, with primes for unknown sizes."""
    sizes: list[int] = []
    for size in fake.shape:
        number = number_of(size)
        if number is None:
            return None
        sizes.append(number)
    return tuple(sizes)


def number_of(size: Any) -> int | None:
    """Returns a size, or the result of a node that computes one, as a number."""
    if isinstance(size, Node):
        size = size.meta.get("val")
    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    number = expression.subs({symbol: _stand_in(symbol) for symbol in expression.free_symbols})
    return int(number) if number.is_Integer else None
