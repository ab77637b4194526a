"""Follows tensors of a graph back to the collective or matmul whose result they arrange."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, Factor, expose, lead, origin, permute, prepend, view
from symm_cp.inductor.nodes import (
    GATHER,
    WAIT,
    aten,
    is_item,
    is_result,
    number_of,
    shape_of,
    static_shape,
    value,
)

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SAME = {aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default}
_CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
CUTS = {*_SPLITS, aten.unbind.int, aten.slice.Tensor, aten.select.int, operator.getitem}

_SQUEEZES = {
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}
_SLICES = {aten.slice.Tensor, aten.select.int}
ARRANGES = {*VIEWS, *_SAME, *_SQUEEZES, *_PERMUTES, aten.copy.default}


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
    """A slice of each rank's shard: `target` applied to `of`."""

    of: Traced
    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A tensor that holds the elements of another one, in another order.

    `source` is the node where the trace ended: the wait for an all-gather, or a matmul. The origin
    of `axes` is the source's result or, after a slice, the slice of it. `dtypes` are the dtypes of
    the source and of each cast. For a gather `ranks` is the factor of the origin that counts the
    ranks; each rank's shard is the input of the gather, or the slice `sliced` of it. If not None,
    `end` is where the columns of the source end that the tensor holds: a number or a node.
    """

    source: Node
    axes: Axes
    dtypes: tuple[torch.dtype | Bits, ...]
    ranks: Factor | None = None
    sliced: Sliced | None = None
    end: Any = None

    @property
    def gather(self) -> Node:
        """The all-gather, for a source that waits for one."""
        return self.source.args[0]  # type: ignore[return-value]

    @property
    def shard(self) -> Node:
        """This rank's shard, which the all-gather gathers."""
        return self.gather.args[0]  # type: ignore[return-value]


class Tracer:
    """Traces each node of a graph once.

    Traces end at waits for gathers, at calls of one of `ends`, and at single results of calls of
    one of `items_of`. Only with `first_columns` can a trace have an `end`.
    """

    def __init__(
        self,
        graph: Graph,
        ends: set[Any],
        items_of: set[Any] | None = None,
        *,
        first_columns: bool = False,
    ) -> None:
        self._ends = ends
        self._items_of = items_of or set()
        self._first_columns = first_columns
        self._traced: dict[Node, Traced] = {}
        self._arrangements: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            traced = self._trace(node) if node.op == "call_function" else None
            if traced is not None:
                self._traced[node] = traced
                self._arrangements.setdefault(traced.source, []).append(node)

    def __getitem__(self, node: Any) -> Traced | None:
        return self._traced.get(node) if isinstance(node, Node) else None

    def arrangement(self, node: Node) -> Traced:
        """Returns the trace of a node that has one, such as the nodes of `of` and `uses`."""
        return self._traced[node]

    def of(self, source: Node) -> list[Node]:
        """Returns all nodes that are arrangements of a source, in graph order."""
        return self._arrangements.get(source, [])

    def forget(self, source: Node) -> None:
        """Drops all traces to a replaced source: its arrangements have another source now."""
        for node in self._arrangements.pop(source, []):
            del self._traced[node]

    def uses(self, source: Node) -> list[tuple[Node, Node]]:
        """Returns (arrangement, user) for each use of a source that does not rearrange it."""
        arrangements = set(self.of(source))

        def rearranges(user: Node) -> bool:
            # Also: parts that are only put together again, and unused nodes.
            return (
                user in arrangements
                or (not user.users and not is_result(user))
                or (user.target in CUTS and all(map(rearranges, user.users)))
            )

        return [
            (node, user) for node in self.of(source) for user in node.users if not rearranges(user)
        ]

    def _trace(self, node: Node) -> Traced | None:
        shape, tensor = static_shape(node), value(node)
        if shape is None or tensor is None:
            return None
        gathered = self._gathered(node, shape, tensor.dtype) if node.target is WAIT else None
        if gathered is not None:
            return gathered
        if self._is_end(node):
            return Traced(node, origin(shape), (tensor.dtype,))
        if node.target is aten.cat.default:
            if concatenated := self._concatenated(node):
                return concatenated
            # Concatenated results of one of `items_of` are an end, too.
            parts = [self[part] for part in node.args[0]]  # type: ignore[union-attr]
            if all(part is not None and is_item(part.source) for part in parts):
                return Traced(node, origin(shape), (tensor.dtype,))
            return None
        operand = self[rearranged_by(node)]
        if operand is None:
            return self._part(node)
        if node.target in _SLICES:
            return self._sliced(node, operand)
        return _rearranged(node, operand)

    def _is_end(self, node: Node) -> bool:
        if is_item(node):
            return node.args[0].target in self._items_of  # type: ignore[union-attr]
        return node.target in self._ends

    def _gathered(self, node: Node, shape: tuple[int, ...], dtype: torch.dtype) -> Traced | None:
        gather = node.args[0]
        if not isinstance(gather, Node) or gather.target is not GATHER:
            return None
        world_size = int(gather.args[1])  # type: ignore[arg-type]
        if 0 in shape or shape[0] % world_size != 0:
            return None
        ranks = Factor(0, shape[0] // world_size, world_size)
        return Traced(node, origin(shape), (dtype,), ranks)

    def _concatenated(self, node: Node) -> Traced | None:
        """Traces all equal parts along one dimension, concatenated in order along another one."""
        parts: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        places = [_part_of(part) for part in parts]
        if not places or places[0] is None:
            return None
        whole, along, _, step = places[0]
        operand, shape = self[whole], static_shape(whole)
        count = len(parts)
        if operand is None or shape is None or not isinstance(dim, int):
            return None
        if places != [(whole, along, i * step, (i + 1) * step) for i in range(count)]:
            return None
        if count * step != shape[along]:
            operand = self._of_first_columns(operand, along, count * step, parts[-1])
        cut = None if operand is None else lead(operand.axes, along, count)
        if operand is None or cut is None:
            return None
        factor, rest = cut
        return replace(operand, axes=prepend(rest, dim % len(shape), factor))

    def _of_first_columns(
        self, operand: Traced, along: int, columns: int, last: Node
    ) -> Traced | None:
        """Returns a trace less the columns behind its `last` slice; None if it has no columns."""
        shape = static_shape(operand.source) or ()
        sliced = last.target is aten.slice.Tensor and operand.end is None
        if not (self._first_columns and sliced and shape):
            return None
        if operand.axes[along] != (Factor(len(shape) - 1, 1, shape[-1]),):
            return None
        kept = (Factor(len(shape) - 1, 1, columns),)
        axes = (*operand.axes[:along], kept, *operand.axes[along + 1 :])
        return replace(operand, axes=axes, end=last.args[3])

    def _part(self, node: Node) -> Traced | None:
        """Traces one of the results of splitting a gathered tensor."""
        if not is_item(node):
            return None
        parts, index = node.args
        if isinstance(parts, Node) and parts.target is aten.unbind.int:
            whole = parts.args[0]
            operand, shape = self[whole], static_shape(whole)
            dim = parts.args[1] if len(parts.args) > 1 else 0
            if operand is None or shape is None or not isinstance(dim, int):
                return None
            dim %= len(shape)
            return self._sliced_by(node, operand, dim, aten.select.int, (dim, index))
        place = _part_of(node)
        operand = self[place[0]] if place is not None else None
        if place is None or operand is None:
            return None
        return self._sliced_by(node, operand, place[1], aten.slice.Tensor, place[1:])

    def _sliced(self, node: Node, operand: Traced) -> Traced | None:
        dim = node.args[1] if len(node.args) > 1 else 0
        shape = static_shape(node.args[0])
        if not isinstance(dim, int) or shape is None:
            return None
        dim %= len(shape)
        return self._sliced_by(node, operand, dim, node.target, (dim, *node.args[2:]))

    def _sliced_by(
        self, node: Node, operand: Traced, dim: int, target: Any, args: tuple[Any, ...]
    ) -> Traced | None:
        """Takes a slice of each rank's shard as the new origin, if it keeps all ranks."""
        shape = static_shape(node)
        if shape is None or operand.ranks is None or not all(isinstance(a, int) for a in args):
            return None
        exposed = expose(operand.axes, operand.ranks)
        if exposed is None:
            return None
        rank_dim, place, axes = exposed
        if rank_dim == dim or place != 0:
            return None
        if target is aten.select.int and dim < rank_dim:
            rank_dim -= 1
        world_size = operand.ranks.size
        ranks = Factor(rank_dim, shape[rank_dim] // world_size, world_size)
        sliced = Sliced(replace(operand, axes=axes), target, args)
        return replace(operand, axes=origin(shape), sliced=sliced, ranks=ranks)


def rearranged_by(node: Node) -> Any:
    """Returns the tensor that a node would rearrange: its first operand, or the copied one."""
    if not node.args:
        return None
    if node.target is aten.copy.default:
        # A collective with an `out` argument ends in such a copy, which overwrites all elements.
        into, copied = value(node.args[0]), value(node.args[1])
        same = into is not None and copied is not None and into.dtype == copied.dtype
        return node.args[1] if same else None
    return node.args[0]


def start_of(node: Node) -> Traced:
    """Traces a tensor back through views and permutations alone, to the node that computed it."""
    path: list[Node] = []
    start = node
    while start.target in ARRANGES and isinstance(operand := rearranged_by(start), Node):
        path.append(start)
        start = operand
    traced = _whole(start)
    for step in reversed(path):
        # Where a view cuts across factors, the trace can only begin behind it.
        traced = _rearranged(step, traced) or _whole(step)
    return traced


def _whole(node: Node) -> Traced:
    return Traced(node, origin(static_shape(node) or ()), (node.meta["val"].dtype,))


def _rearranged(node: Node, operand: Traced) -> Traced | None:
    """Traces a view, permutation or cast of a traced tensor; None for other ops."""
    target, shape, dtype = node.target, static_shape(node), node.meta["val"].dtype
    if shape is None:
        return None
    expands_nothing = (
        target in (aten.expand.default, aten.copy.default)
        and static_shape(rearranged_by(node)) == shape
    )
    if target in _SAME or expands_nothing:
        return operand
    if target in VIEWS or target in _SQUEEZES:
        axes = view(operand.axes, shape)
        return None if axes is None else replace(operand, axes=axes)
    if target in _PERMUTES:
        return replace(operand, axes=permute(operand.axes, _order(node, len(shape))))
    if target in _CASTS:
        return replace(operand, dtypes=(*operand.dtypes, dtype))
    if target is aten.view.dtype:
        # Gathered tensors only: summing the same bits as another dtype gives another sum.
        if operand.ranks is None or operand.dtypes[-1].itemsize != dtype.itemsize:
            return None
        return replace(operand, dtypes=(*operand.dtypes, Bits(dtype)))
    return None


def _order(node: Node, ndim: int) -> list[int]:
    """Returns the order of dimensions of a permutation or transpose."""
    if node.target is aten.permute.default:
        return [int(d) % ndim for d in node.args[1]]  # type: ignore[union-attr]
    order = list(range(ndim))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


#: (tensor, dim, begin, end)
_Part: TypeAlias = tuple[Node, int, int, int]


def _part_of(node: Any) -> _Part | None:
    """Returns the tensor, and the part of it, that a slice or a result of a split takes."""
    if not isinstance(node, Node) or static_shape(node) is None:
        return None
    if node.target is aten.slice.Tensor:
        return _part_of_slice(node)
    if is_item(node):
        return _part_of_split(node)
    return None


def _part_of_slice(node: Node) -> _Part | None:
    whole, dim, begin, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])[:5]
    shape, part_shape = static_shape(whole), static_shape(node)
    begin = number_of(0 if begin is None else begin)
    if shape is None or part_shape is None or step != 1 or begin is None:
        return None
    dim = int(dim) % len(shape)  # type: ignore[arg-type]
    begin = begin + shape[dim] if begin < 0 else begin
    return whole, dim, begin, begin + part_shape[dim]  # type: ignore[return-value]


def _part_of_split(node: Node) -> _Part | None:
    parts, index = node.args
    if not isinstance(parts, Node) or parts.target not in _SPLITS or not isinstance(index, int):
        return None
    whole = parts.args[0]
    dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    shape, fakes = static_shape(whole), parts.meta.get("val")
    if shape is None or fakes is None or not isinstance(dim, int):
        return None
    dim %= len(shape)
    shapes = [shape_of(fake) for fake in fakes[: index + 1]]
    if any(part is None for part in shapes):
        return None
    edges = [0, *itertools.accumulate(part[dim] for part in shapes if part is not None)]
    return whole, dim, edges[index], edges[index + 1]  # type: ignore[return-value]
