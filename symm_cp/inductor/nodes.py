"""Properties of the nodes of a graph: which op they call, its arguments, shapes."""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

#: Folders of code that programs call, not their own.
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")

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


def place_of(node: Node) -> str:
    """Returns file and line of the program's code that a node comes from; empty if unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    own = [(path, line) for path, line in frames if not path.startswith(LIBRARIES)]
    return "{}:{}".format(*own[-1]) if own else ""


def awaited(graph: Graph, collective: Any) -> list[tuple[Node, Node]]:
    """Returns (wait, call) for each wait for a call of a collective."""
    waits: list[Any] = graph.find_nodes(op="call_function", target=WAIT)
    pairs = [(wait, wait.args[0]) for wait in waits]
    return [(wait, node) for wait, node in pairs if getattr(node, "target", None) is collective]


# Large primes stand for sizes that are unknown at compile time: products and quotients of primes
# are equal, or divide each other, exactly where the unknown sizes do. What is no product, such as
# u0 // 2 or u0 + 1, has a prime of its own.
_LEAST = 2**40  # more than any known size
_stand_ins: dict[str, int] = {}
#: For each set of symbols: those that ops of its graphs need to be equal to others, such as
#: u0 = 2 * (u0 // 2) where a view or a concatenation is an error for odd u0.
_known: WeakKeyDictionary[Any, dict[sympy.Symbol, sympy.Expr]] = WeakKeyDictionary()


def _stand_in(name: str) -> int:
    if name not in _stand_ins:
        last = max(_stand_ins.values(), default=_LEAST)
        _stand_ins[name] = int(sympy.nextprime(last))
    return _stand_ins[name]


def is_dynamic(size: int) -> bool:
    """Tells whether a size in a `static_shape` represents an unknown one."""
    return size >= _LEAST


def _polynomial(size: torch.SymInt) -> sympy.Expr:
    """Returns a size with symbols for functions, such as floor divisions, and what is known."""

    def in_symbols(expression: sympy.Expr) -> sympy.Expr:
        if expression.is_Atom:
            return expression
        power = isinstance(expression, sympy.Pow) and expression.exp.is_Integer
        if power or isinstance(expression, sympy.Add | sympy.Mul):
            return expression.func(*map(in_symbols, expression.args))
        return sympy.Symbol(str(expression), integer=True)

    polynomial = sympy.expand(in_symbols(size.node.expr))
    for symbol, equal in _known.get(size.node.shape_env, {}).items():
        polynomial = sympy.expand(polynomial.subs(symbol, equal))
    return polynomial


def _know_equal(one: torch.SymInt, other: torch.SymInt) -> None:
    """Notes that two unknown sizes are equal: one of their symbols is a multiple of others."""
    difference = _polynomial(one) - _polynomial(other)
    for symbol in sorted(difference.free_symbols, key=str):
        solutions = sympy.solve(difference, symbol)
        multiple = len(solutions) == 1 and solutions[0].as_coeff_Mul()
        if multiple and multiple[0].is_Integer and multiple[1].is_polynomial():
            _known.setdefault(one.node.shape_env, {})[symbol] = solutions[0]
            return


def know_equal_sizes(graph: Graph) -> None:
    """Notes which unknown sizes must be equal, since a view or a concatenation would fail."""
    for node in graph.nodes:
        pairs: Any = ()
        if node.target in (aten.view.default, aten.reshape.default):
            viewed = value(node.args[0]), value(node)
            pairs = [[tensor.numel() for tensor in viewed if tensor is not None]]
        elif node.target is aten.cat.default:
            dim = argument(node, "dim")
            shapes = [part.shape for part in map(value, node.args[0]) if part is not None]
            sizes = list(zip(*shapes, strict=True)) if len({*map(len, shapes)}) == 1 else []
            across = [at for at in range(len(sizes)) if at != dim % len(sizes)]
            pairs = [pair for at in across for pair in itertools.pairwise(sizes[at])]
        for pair in pairs:
            if len(pair) == 2 and all(isinstance(size, torch.SymInt) for size in pair):
                _know_equal(*pair)


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
    content, rest = sympy.factor_terms(_polynomial(size)).as_coeff_Mul()
    if not content.is_Integer:
        return None
    factors = (factor.as_base_exp() for factor in sympy.Mul.make_args(rest))
    powers = (_stand_in(str(base)) ** int(exponent) for base, exponent in factors if base != 1)
    return int(content) * math.prod(powers)
