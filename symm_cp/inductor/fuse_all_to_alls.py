"""All-to-alls that exchange a sequence for heads become projections fused with the exchange.

`fuse_projections.py` fuses `exchange_heads`; this file does the same for programs that call torch's
all-to-all between views and permutations of their own. What counts is where each element goes, not
which ops take it there: an all-to-all is an exchange of heads if it cuts the columns of a product,
or of a matmul's left operand, into one run for each rank, in rank order.

An all-to-all with equal splits has an input and a result of one shape, whose outermost part of
dimension 0 counts the ranks. All `Axes` here describe arrangements of one of the two: of the result
for tensors made from the result, of the input for tensors that the input is made from.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import (
    Axes,
    Factor,
    flat,
    inverse,
    joined,
    lead,
    origin,
    permute,
    refined,
    sizes,
)
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.fuse_projections import (
    collect,
    last_sum,
    project,
    replace_total,
    source_of,
    total_of,
    why_not_projected,
)
from symm_cp.inductor.matmuls import PLAIN, bias_of, left
from symm_cp.inductor.neighbours import FOR_EXPERTS, fed_by, feeding, is_of_experts
from symm_cp.inductor.nodes import (
    ALL_TO_ALL,
    WAIT,
    aten,
    awaited,
    group_of,
    is_dynamic,
    is_item,
    number_of,
    static_shape,
    value,
)
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import CUTS, Tracer, start_of
from symm_cp.inductor.rewrite import (
    DynamicShapeError,
    Emitter,
    depends,
    erase_unused,
    hoist,
    order_of,
)

#: Why most all-to-alls are left alone.
_NO_EXCHANGE = (
    "it does not exchange a sequence for equal runs of heads, in rank order, as "
    "symm_cp.sequence_to_heads does"
)
_WHOLE_ROWS = f"it exchanges whole rows, which no fused op does{FOR_EXPERTS}"
_PART = (
    "what it sends is a part of what is computed at once: project queries, keys and values by a "
    "matmul each; products of one input are exchanged together"
)
#: (batch, positions), two parts of the rows.
_Rows: TypeAlias = tuple[tuple[Factor, ...], tuple[Factor, ...]]


@dataclass(frozen=True)
class _Exchange:
    """An all-to-all of the columns of a product (`to_heads`), or of a matmul's left operand.

    `rows` and `columns` of one rank are factors of the all-to-all's input and result.
    """

    wait: Node
    node: Node  # the all-to-all
    matmul: Node
    to_heads: bool
    ranks: Factor
    rows: _Rows
    columns: tuple[Factor, ...]
    group: str

    @property
    def whole(self) -> Axes:
        """(B, 1, S, E): one rank's columns, as one head, of all positions."""
        batch, positions = self.rows
        return batch, (), joined((self.ranks, *positions)), self.columns

    @property
    def local(self) -> Axes:
        """(B, s, W * E): all columns, of one rank's positions."""
        return *self.rows, joined((self.ranks, *self.columns))

    @property
    def kind(self) -> Hashable:
        """Equal for exchanges that one fused op may cover."""
        shared = source_of(self.matmul) if self.to_heads else last_sum(self.matmul)
        has_bias = bias_of(self.matmul) is not None
        return self.group, self.to_heads, tuple(sizes(self.whole)), shared, has_bias


def fuse_all_to_alls(graph: Graph, options: Options) -> None:
    """Fuses all-to-alls with projections, and records a decision for each next to a matmul."""
    waits = awaited(graph, ALL_TO_ALL)
    if not waits:
        return
    tracer = Tracer(graph, PLAIN | {WAIT})
    found = [_exchange(tracer, wait, node) for wait, node in waits]
    exchanges = [exchange for exchange in found if isinstance(exchange, _Exchange)]
    reasons = _fuse_all(graph, tracer, exchanges, options)
    for (wait, node), exchange in zip(waits, found, strict=True):
        reason = reasons[wait] if isinstance(exchange, _Exchange) else exchange
        if isinstance(exchange, _Exchange) and not reason:
            into = "project_to_heads" if exchange.to_heads else "project_from_heads"
            text = "with the projections next to it"
            record(Decision(node.name, exchange.group, into, text))
        elif path := fed_by(node) or feeding(node):  # others are recorded with all collectives
            experts = is_of_experts(path[-1])
            why_not = f"which has no fused form{FOR_EXPERTS}" if experts else f"and {reason}"
            text = f"{path[-1].name} is next to it, {why_not}"
            record(Decision(node.name, group_of(node), None, text, True))


def _fuse_all(
    graph: Graph, tracer: Tracer, exchanges: list[_Exchange], options: Options
) -> dict[Node, str]:
    """Fuses exchanges; returns for each, by its wait, why it could not, or an empty text."""
    together: defaultdict[Hashable, list[_Exchange]] = defaultdict(list)
    for exchange in exchanges:
        together[exchange.kind].append(exchange)
    reasons: dict[Node, str] = {}
    for alike in together.values():
        # One call for all of them costs less than several, where it is possible.
        if len(alike) > 1 and not _fuse(graph, tracer, alike, options):
            reasons.update((exchange.wait, "") for exchange in alike)
            continue
        for exchange in alike:
            reasons[exchange.wait] = _fuse(graph, tracer, [exchange], options)
    return reasons


# --- recognising exchanges of heads ----------------------------------------------------------


def _exchange(tracer: Tracer, wait: Node, node: Node) -> _Exchange | str:
    """Returns an all-to-all as an exchange of heads, or why it is not one."""
    shape, given, taken = static_shape(node), node.args[1], node.args[2]
    if shape is None or 0 in shape:
        return "its shape is unknown at compile time, or it is empty"
    world_size = len(given)  # type: ignore[arg-type]
    each, rest = divmod(shape[0], world_size)
    splits = [number_of(size) for size in (*given, *taken)]  # type: ignore[misc]
    if rest or splits != [each] * (2 * world_size):
        return "its splits are unequal"
    if len(node.users) > 1:
        return "it is waited for several times"
    ranks = Factor(0, each, world_size)
    before = _of_product(tracer, wait, node, ranks)
    if isinstance(before, _Exchange):
        return before
    behind = _of_operand(tracer, wait, node, ranks)
    return behind if isinstance(behind, _Exchange) else before or behind


def _of_product(tracer: Tracer, wait: Node, node: Node, ranks: Factor) -> _Exchange | str:
    """Returns the exchange of the columns of a matmul's product, or why there is none."""
    sent: Node = node.args[0]  # type: ignore[assignment]
    traced = tracer[sent]
    if traced is None or traced.source.target not in PLAIN or len(traced.dtypes) > 1:
        start: Any = start_of(sent).source
        part = (start.args[0] if is_item(start) else start).target in CUTS
        return _PART if part else ""
    product = traced.source
    axes = inverse(traced.axes, static_shape(product) or ())
    columns = None if axes is None else _of_one_rank(axes[1], ranks)
    if axes is None or columns is None:
        return _WHOLE_ROWS if axes is not None and _is_of_all(axes[1], ranks) else ""
    # The fused op writes the product where other ranks read it, and does not return it.
    if tracer.uses(product) != [(sent, node)]:
        return "the product that it sends has other uses"
    uses = sorted(tracer.uses(wait), key=lambda use: use[1].op == "output")
    order = _in_memory(uses[0][0], tracer.arrangement(uses[0][0]).axes) if uses else ()
    rows = _divided(axes[0], columns, ranks, order)
    return _Exchange(wait, node, product, True, ranks, rows, columns, group_of(node))


def _of_operand(tracer: Tracer, wait: Node, node: Node, ranks: Factor) -> _Exchange | str:
    """Returns the exchange whose result is a matmul's left operand, or why there is none."""
    found, uses, reason = [], tracer.uses(wait), _NO_EXCHANGE
    for operand, matmul in uses:
        traced = tracer.arrangement(operand)
        if matmul.target not in PLAIN or left(matmul) is not operand or len(traced.dtypes) > 1:
            continue
        columns = _of_one_rank(traced.axes[1], ranks)
        if columns is not None:
            found.append((matmul, traced.axes[0], columns, operand))
        elif _is_of_all(traced.axes[1], ranks):
            reason = _WHOLE_ROWS
    if ranks.size == 1:  # leaves out matmuls of the transposed result, for a weight's gradient
        found = [each for each in found if each[3].meta["val"].is_contiguous()]
    if len(found) > 1:
        return "several matmuls take its result"
    if not found:
        joins = any(user.target is aten.cat.default for _, user in uses)
        return "its result is put side by side with others" if joins else reason
    matmul, rows, columns, _ = found[0]
    divided = _divided(rows, columns, ranks, _in_memory(*_sent(node)))
    return _Exchange(wait, node, matmul, False, ranks, divided, columns, group_of(node))


def _strides(node: Node) -> list[int] | None:
    """Like `static_shape`, for strides; None if they are unknown."""
    fake = value(node)
    if fake is None or fake.storage_offset() != 0:
        return None
    numbers = [number_of(step) for step in fake.stride()]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def _of_one_rank(columns: tuple[Factor, ...], ranks: Factor) -> tuple[Factor, ...] | None:
    """Returns a rank's columns, if each rank has one run of all columns, in rank order."""
    if ranks.size == 1:
        return columns
    cut = lead((columns,), 0, ranks.size)
    return cut[1][0] if cut is not None and cut[0] == ranks else None


def _is_of_all(columns: tuple[Factor, ...], ranks: Factor) -> bool:
    """Tells whether the same columns come from, or go to, each rank: rows stay whole."""
    return all(factor.dim != ranks.dim or factor.end <= ranks.stride for factor in columns)


def _sent(node: Node) -> tuple[Node, Axes]:
    """Returns the tensor that was rearranged for sending, with axes relative to the sent tensor."""
    sent: Node = node.args[0]  # type: ignore[assignment]
    traced = start_of(sent)
    axes = inverse(traced.axes, static_shape(traced.source) or ())
    return (sent, origin(static_shape(sent) or ())) if axes is None else (traced.source, axes)


def _in_memory(node: Node, axes: Axes) -> list[Factor]:
    """Returns the factors of a tensor in memory order."""
    return flat(permute(axes, _outermost_first(_strides(node) or range(len(axes), 0, -1))))


def _outermost_first(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _divided(
    rows: tuple[Factor, ...], columns: tuple[Factor, ...], ranks: Factor, order: Sequence[Factor]
) -> _Rows:
    """Divides rows into batch and positions: factors outside of the ranks in `order` are the batch.

    Any division is correct. This one, where it exists, makes (batch, ranks, positions, columns) the
    memory order of the tensor next to the exchange, so that nothing has to be copied.
    """
    fine = refined((tuple(order),), (rows, (*joined([ranks]), *columns)))
    if fine is None:
        return (), rows
    (ordered,), (cut, _) = fine
    outside = itertools.takewhile(lambda f: f.dim != 0 or f.stride < ranks.stride, ordered)
    batch = [factor for factor in outside if factor in cut]
    if list(cut[: len(batch)]) != batch:
        return (), rows
    return joined(batch), joined(cut[len(batch) :])


# --- rewriting -------------------------------------------------------------------------------


def _fuse(graph: Graph, tracer: Tracer, exchanges: list[_Exchange], options: Options) -> str:
    """Replaces exchanges by one fused op; returns why not, or an empty text."""
    matmuls = [exchange.matmul for exchange in exchanges]
    if any(matmul._erased for matmul in matmuls):
        return "its matmul was fused with another collective"
    to_heads, total = exchanges[0].to_heads, None
    if to_heads:
        reason = why_not_projected(matmuls, options)
    else:
        total, reason = total_of(matmuls, options)
    if reason:
        return reason
    if is_dynamic(sizes(exchanges[0].whole)[3]):
        return "the number of its columns is unknown at compile time"
    order = order_of(graph)
    needed: list[Any] = [operand for matmul in matmuls for operand in matmul.args]
    if not to_heads:
        needed = [matmul.args[-1] for matmul in matmuls]
        needed += [_sent(exchange.node)[0] for exchange in exchanges]
    if depends(needed, [exchange.wait for exchange in exchanges], order):
        return "an operand depends on its result"
    first = min((exchange.node for exchange in exchanges), key=order.__getitem__)
    hoist(first, needed)
    known = set(graph.nodes)
    try:
        emitted = _emit(Emitter(graph, first), tracer, exchanges, total)
    except DynamicShapeError as error:
        emitted, reason = None, str(error)
    if emitted is None:
        for node in reversed([node for node in graph.nodes if node not in known]):
            graph.erase_node(node)
        return reason or "the exchanged tensors cannot be arranged"
    # From here on the graph changes.
    result, served = emitted
    for user, before, after in served:
        user.replace_input_with(before, after)
    if total is not None and result is not None:
        replace_total(total, result, matmuls)
    for exchange in exchanges:
        _erase(graph, tracer, exchange)
    return ""


def _erase(graph: Graph, tracer: Tracer, exchange: _Exchange) -> None:
    arranged = reversed(tracer.of(exchange.matmul))
    erase_unused(graph, tracer, exchange.wait)
    if exchange.to_heads:
        for node in arranged:
            if not node.users:
                graph.erase_node(node)


#: (user, old input, new input)
_Served: TypeAlias = tuple[Node, Node, Node]


def _emit(
    emitter: Emitter, tracer: Tracer, exchanges: list[_Exchange], total: Node | None
) -> tuple[Node | None, list[_Served]] | None:
    """Inserts the fused op; returns the sum of products, if any, and inputs for other users."""
    first = exchanges[0]
    matmuls = [exchange.matmul for exchange in exchanges]
    result = None
    if total is None:
        batch, _, length, features = sizes(first.whole)
        shape = batch, length // first.ranks.size
        fused = project(emitter, matmuls, shape, features, first.group)
        results = [emitter.item(fused, index) for index in range(len(exchanges))]
    else:
        tensors = []
        for exchange in exchanges:
            tensor = emitter.rearrange(*_sent(exchange.node), exchange.whole)
            if tensor is None:
                return None
            tensors.append(tensor)
        out, results = collect(emitter, tensors, matmuls, first.group)
        result = emitter.reshape(out, static_shape(total) or ())
    served: list[_Served] = []
    for exchange, tensor in zip(exchanges, results, strict=True):
        others = _serve(emitter, tracer, exchange, tensor)
        if others is None:
            return None
        served += others
    return result, served


def _serve(
    emitter: Emitter, tracer: Tracer, exchange: _Exchange, tensor: Node
) -> list[_Served] | None:
    """Arranges a result of the fused op for the other users of an exchange."""
    served: list[_Served] = []
    output = next(node for node in reversed(exchange.wait.graph.nodes) if node.op == "output")
    returned = {_memory_of(node) for node in output.all_input_nodes}
    shared: int | None = None
    for node, user in tracer.uses(exchange.wait):
        if user is exchange.matmul:
            continue
        arranged = _arranged(emitter, tracer, exchange, tensor, (node, user))
        if arranged is None:
            return None
        # Graph results in different memory stay in different memory: users may overwrite them.
        memory = _memory_of(node)
        if memory in returned and shared not in (None, memory):
            arranged = emitter.call(aten.clone.default, arranged)
        elif memory in returned:
            shared = memory
        served.append((user, node, arranged))
    return served


def _memory_of(node: Node) -> int | None:
    fake = value(node)
    return None if fake is None else fake.untyped_storage()._cdata


def _arranged(
    emitter: Emitter, tracer: Tracer, exchange: _Exchange, tensor: Node, use: tuple[Node, Node]
) -> Node | None:
    """Arranges a result of the fused op for one user: the same elements and strides."""
    node, user = use
    traced = tracer.arrangement(node)
    have = exchange.whole if exchange.to_heads else exchange.local
    arranged = emitter.rearrange(tensor, have, traced.axes)
    if arranged is None:
        return None
    for dtype in traced.dtypes[1:]:
        arranged = emitter.cast(arranged, dtype)
    strides, have_strides = _strides(node), _strides(arranged)
    # The compiler gives results of a graph the strides that they need.
    if strides is None or user.op == "output":
        return arranged
    steps = zip(static_shape(node) or (), strides, have_strides or (), strict=False)
    if have_strides and all(size == 1 or want == got for size, want, got in steps):
        return arranged
    order = _outermost_first(strides)
    dense = emitter.call(aten.permute.default, arranged, order)
    dense = emitter.call(aten.clone.default, dense, memory_format=torch.contiguous_format)
    return emitter.call(
        aten.permute.default, dense, [order.index(dim) for dim in range(len(order))]
    )
