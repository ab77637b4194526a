"""Follows tensors of a graph back to the collective or matmul that they are arrangements of."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, expose, lead, origin, permute, prepend, view

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
WAIT = c10d.wait_tensor.default

_getitem = operator.getitem
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SAME = {aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default}
_CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_CUTS = {*_SPLITS, aten.unbind.int, aten.slice.Tensor, aten.select.int, _getitem}

_SQUEEZES = {
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}
_SLICES = {aten.slice.Tensor, aten.select.int}


def is_item(node: Node) -> bool:
    """Whether a node takes one of several results."""
    return node.target is _getitem


def value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


# Stand for sizes that are not known when a graph is compiled: large primes, so that sizes which
# have one as a factor divide and equal each other just where the unknown ones do.
_FIRST_PRIME = 1_000_003
_stand_ins: dict[str, int] = {}


def _stand_in(symbol: Any) -> int:
    name = str(symbol)
    if name not in _stand_ins:
        after = max(_stand_ins.values(), default=_FIRST_PRIME - 1)
        _stand_ins[name] = int(sympy.nextprime(after))
    return _stand_ins[name]


def is_dynamic(size: int) -> bool:
    """Whether a size of `static_shape` stands for one that is not known."""
    return size >= _FIRST_PRIME and any(size % prime == 0 for prime in _stand_ins.values())


def static_shape(node: Node) -> tuple[int, ...] | None:
    """The shape of a node, with numbers for sizes that are not known; None for no tensor."""
    tensor = value(node)
    return None if tensor is None else _numbers(tensor)


def _numbers(tensor: torch.Tensor) -> tuple[int, ...] | None:
    found = [_number(size) for size in tensor.shape]
    return None if None in found else tuple(found)  # type: ignore[arg-type]


def _number(size: Any) -> int | None:
    """A size, or a node that computes one, as a number."""
    if isinstance(size, Node):
        size = size.meta.get("val")
    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    number = expression.subs({s: _stand_in(s) for s in expression.free_symbols})
    return int(number) if number.is_Integer else None


@dataclass(frozen=True)
class Bits:
    """The same bits, read as another dtype of the same size: float8 is gathered as uint8."""

    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __str__(self) -> str:
        return str(self.dtype)


@dataclass(frozen=True)
class Sliced:
    """A part of what each rank contributes: `target` applied to `of`, arranged as its axes say."""

    of: Traced
    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A tensor that holds the elements of another one, in another order.

    `source` is the node that the trace ended at: the wait for an all-gather, or a matmul. The
    origin of `axes` is its result or, after a slice, that of the part that was sliced. For a gather
    `ranks` is the factor of the origin that counts the ranks; what each contributes is the input of
    the gather, or what `sliced` says.
    """

    source: Node
    axes: Axes
    dtypes: tuple[torch.dtype | Bits, ...]
    ranks: Factor | None = None
    sliced: Sliced | None = None

    @property
    def shard(self) -> Node:
        """What this rank contributes to a gather."""
        return self.source.args[0].args[0]  # type: ignore[union-attr,return-value]


class Tracer:
    """Traces the nodes of a graph; each once.

    Besides waits for gathers, traces end at nodes that call one of `ends`, and at the results of
    those that call one of `items_of`.
    """

    def __init__(self, graph: Graph, ends: set[Any], items_of: set[Any] | None = None) -> None:
        self._ends = ends
        self._items_of = items_of or set()
        self._found: dict[Node, Traced] = {}
        self._related: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            traced = self._trace(node) if node.op == "call_function" else None
            if traced is not None:
                self._found[node] = traced
                self._related.setdefault(traced.source, []).append(node)

    def __getitem__(self, node: Any) -> Traced | None:
        return self._found.get(node) if isinstance(node, Node) else None

    def of(self, source: Node) -> list[Node]:
        """All nodes that are arrangements of a source, in graph order."""
        return self._related.get(source, [])

    def uses(self, source: Node) -> list[tuple[Node, Node]]:
        """Who uses arrangements of a source, other than for further ones: (arrangement, user)."""
        related = set(self.of(source))

        def inner(user: Node) -> bool:
            # Parts that are only put together again, and what nobody uses.
            return (
                user in related
                or (not user.users and user.op != "output")
                or (user.target in _CUTS and all(inner(further) for further in user.users))
            )

        return [(node, user) for node in related for user in node.users if not inner(user)]

    def _trace(self, node: Node) -> Traced | None:
        tensor, target = value(node), node.target
        if target is WAIT:
            return self._gathered(node)
        if target in self._ends or (
            is_item(node) and node.args[0].target in self._items_of  # type: ignore[union-attr]
        ):
            shape = static_shape(node)
            if shape is None or tensor is None:
                return None
            return Traced(node, origin(shape), (tensor.dtype,))
        if target is aten.cat.default:
            return self._concatenated(node) or self._joined(node)
        given = (
            self._found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        )
        shape = static_shape(node)
        if given is None or shape is None or tensor is None:
            return self._part(node)
        axes: Axes | None = None
        if target in _SAME or (
            target is aten.expand.default and static_shape(node.args[0]) == shape
        ):  # type: ignore[arg-type]
            axes = given.axes
        elif target in _VIEWS or target in _SQUEEZES:
            axes = view(given.axes, shape)
        elif target in _CASTS:
            return replace(given, dtypes=(*given.dtypes, tensor.dtype))
        elif target is aten.view.dtype:
            # Of what is gathered only: a sum of bits read as another dtype is another sum.
            if given.ranks is None or given.dtypes[-1].itemsize != tensor.dtype.itemsize:
                return None
            return replace(given, dtypes=(*given.dtypes, Bits(tensor.dtype)))
        elif target in _PERMUTES:
            axes = permute(given.axes, _order(node, len(shape)))
        elif target in _SLICES:
            return self._sliced(node, given)
        return None if axes is None else replace(given, axes=axes)

    def _gathered(self, node: Node) -> Traced | None:
        gather = node.args[0]
        if not isinstance(gather, Node) or gather.target is not GATHER:
            return None
        world_size = int(gather.args[1])  # type: ignore[arg-type]
        shape, tensor = static_shape(node), value(node)
        if shape is None or tensor is None or 0 in shape or shape[0] % world_size != 0:
            return None
        ranks = Factor(0, shape[0] // world_size, world_size)
        return Traced(node, origin(shape), (tensor.dtype,), ranks)

    def _concatenated(self, node: Node) -> Traced | None:
        """W equal parts along one dimension, side by side along another one: in order, all."""
        parts: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        places = [_part_of(part) for part in parts]
        if not places or any(place is None for place in places):
            return None
        whole, along = places[0][0], places[0][1]  # type: ignore[index]
        given = self._found.get(whole)
        shape = static_shape(whole)
        if given is None or shape is None or not isinstance(dim, int):
            return None
        size, count = shape[along], len(parts)
        if size % count != 0:
            return None
        step = size // count
        wanted = [(whole, along, i * step, (i + 1) * step) for i in range(count)]
        if places != wanted:
            return None
        cut = lead(given.axes, along, count)
        if cut is None:
            return None
        return replace(given, axes=prepend(cut[1], dim % len(shape), cut[0]))

    def _joined(self, node: Node) -> Traced | None:
        """Results of one of `items_of`, side by side: a new end."""
        shape, tensor = static_shape(node), value(node)
        parts = [self._found.get(part) for part in node.args[0]]  # type: ignore[union-attr,arg-type]
        if (
            tensor is None
            or shape is None
            or not all(part is not None and is_item(part.source) for part in parts)
        ):
            return None
        return Traced(node, origin(shape), (tensor.dtype,))

    def _part(self, node: Node) -> Traced | None:
        """A part of a gathered tensor that a split gives."""
        if node.target is not _getitem:
            return None
        parts = node.args[0]
        if isinstance(parts, Node) and parts.target is aten.unbind.int:
            whole = parts.args[0]
            found = self._found.get(whole)  # type: ignore[arg-type]
            dim = parts.args[1] if len(parts.args) > 1 else 0
            shape = static_shape(whole)  # type: ignore[arg-type]
            if found is None or shape is None or not isinstance(dim, int):
                return None
            dim %= len(shape)
            return self._sliced_as(node, found, dim, aten.select.int, (dim, node.args[1]))
        place = _part_of(node)
        given = self._found.get(place[0]) if place is not None else None
        if place is None or given is None:
            return None
        return self._sliced_as(node, given, place[1], aten.slice.Tensor, place[1:])

    def _sliced(self, node: Node, given: Traced) -> Traced | None:
        dim = node.args[1] if len(node.args) > 1 else 0
        shape = static_shape(node.args[0])  # type: ignore[arg-type]
        if not isinstance(dim, int) or shape is None:
            return None
        dim %= len(shape)
        return self._sliced_as(node, given, dim, node.target, (dim, *node.args[2:]))

    def _sliced_as(
        self,
        node: Node,
        given: Traced,
        dim: int,
        target: Any,
        args: tuple[Any, ...],
    ) -> Traced | None:
        """Starts anew from a slice of what each rank contributes, where it cuts no ranks apart."""
        shape = static_shape(node)
        if shape is None or given.ranks is None or not all(isinstance(a, int) for a in args):
            return None
        found = expose(given.axes, given.ranks)
        if found is None or found[0] == dim or found[1] != 0:
            return None
        over = found[0]
        if target is aten.select.int and dim < over:
            over -= 1
        world_size = given.ranks.size
        ranks = Factor(over, shape[over] // world_size, world_size)
        sliced = Sliced(replace(given, axes=found[2]), target, args)
        return replace(given, axes=origin(shape), sliced=sliced, ranks=ranks)


def _order(node: Node, ndim: int) -> list[int]:
    if node.target is aten.permute.default:
        return [int(d) % ndim for d in node.args[1]]  # type: ignore[union-attr]
    order = list(range(ndim))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def _part_of(node: Any) -> tuple[Node, int, int, int] | None:
    """Which rows of which tensor a slice or a part of a split is: (tensor, dim, begin, end)."""
    if not isinstance(node, Node) or static_shape(node) is None:
        return None
    if node.target is aten.slice.Tensor:
        whole, dim, begin, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])[:5]
        shape = static_shape(whole)  # type: ignore[arg-type]
        begin = _number(0 if begin is None else begin)
        if shape is None or step != 1 or begin is None:
            return None
        dim = int(dim) % len(shape)  # type: ignore[arg-type]
        length = static_shape(node)[dim]  # type: ignore[index]
        begin = begin + shape[dim] if begin < 0 else begin
        return whole, dim, begin, begin + length  # type: ignore[return-value]
    if node.target is not _getitem:
        return None
    parts, index = node.args
    if not isinstance(parts, Node) or parts.target not in _SPLITS or not isinstance(index, int):
        return None
    whole = parts.args[0]
    dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    shape, all_parts = static_shape(whole), parts.meta.get("val")  # type: ignore[arg-type]
    if shape is None or all_parts is None or not isinstance(dim, int):
        return None
    dim %= len(shape)
    shapes = [_numbers(part) for part in all_parts[: index + 1]]
    if any(found is None for found in shapes):
        return None
    edges = [0, *itertools.accumulate(found[dim] for found in shapes if found is not None)]
    return whole, dim, edges[index], edges[index + 1]  # type: ignore[return-value]


def argument(node: Node, *names: str) -> Any:
    """What a call gives for the argument of its op that has one of these names."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in names:
            given = node.args[index : index + 1]
            return given[0] if given else node.kwargs.get(argument.name, argument.default_value)
    return None
