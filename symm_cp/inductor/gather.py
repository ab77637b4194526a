"""All-gathers that feed matmuls become fused all-gather-matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from symm_cp.inductor.axes import Axes, expose, sizes, without
from symm_cp.inductor.emit import DynamicShapeError, Emitter
from symm_cp.inductor.neighbours import fed_by
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import GATHER, WAIT, Traced, Tracer, argument, aten, static_shape, value

#: Matmuls; a `bmm` counts if its right operand is one matrix for all batches.
MATMULS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten.bmm.default}

_FUSED = torch.ops.symm_mem.fused_all_gather_matmul.default
_FUSED_SCALED = torch.ops.symm_mem.fused_all_gather_scaled_matmul.default
_SCALED = aten._scaled_mm.default


@dataclass(frozen=True)
class _Match:
    """A matmul of a gathered tensor: its shard is (leads, rows, K), gathered along `dim`."""

    matmul: Node
    traced: Traced
    shard: Axes
    gathered: Axes
    dim: int


def left(matmul: Node) -> Node:
    """The left operand of a matmul."""
    return matmul.args[matmul.target is aten.addmm.default]  # type: ignore[return-value]


def right(matmul: Node) -> Node | None:
    """The right operand of a matmul, a matrix; None for a `bmm` with several."""
    found: Any = matmul.args[1 + (matmul.target is aten.addmm.default)]
    if matmul.target is not aten.bmm.default:
        return found
    wanted = static_shape(found)
    while isinstance(found, Node) and found.target in _SPREADING:
        found = found.args[0]
        if wanted is not None and static_shape(found) == wanted[1:]:
            return found
    return None


_SPREADING = {
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.clone.default,
}


def flops(matmul: Node) -> float:
    """Operations of a matmul; unknown sizes count as infinitely many."""
    a, b = static_shape(left(matmul)), value(matmul)
    return math.inf if a is None or b is None else 2.0 * math.prod(a) * b.shape[-1]


def _arranged(matmul: Node, traced: Traced) -> _Match | str:
    """How the shard has to lie for a fused op, or why there is none."""
    assert traced.ranks is not None
    found = expose(traced.axes, traced.ranks)
    if found is None:
        return "the parts of the ranks are interleaved in its input"
    dim, place, axes = found
    *before, columns = axes
    rows = tuple(factor for axis in before for factor in axis)
    if dim == len(before):
        if place != 0:
            return "the gathered dimension is inside of the one that the matmul sums over"
        flat_axes = (rows, columns)
        return _Match(matmul, traced, without(flat_axes, traced.ranks), flat_axes, 1)
    place += sum(map(len, before[:dim]))
    leads, inner = rows[:place], rows[place + 1 :]
    if not leads:
        return _Match(matmul, traced, (inner, columns), axes, 0)
    return _Match(matmul, traced, (leads, inner, columns), (leads, rows[place:], columns), 1)


def unsupported(matmul: Node) -> str:
    """Why a fused op cannot stand for a matmul, or nothing."""
    tensor = value(left(matmul))
    if right(matmul) is None:
        return "it multiplies with another matrix for each batch"
    if tensor is None or not tensor.is_floating_point():
        return "its input is not of a floating-point dtype"
    if matmul.target is aten.addmm.default and any(
        matmul.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")
    ):
        return "addmm scales its terms"
    if matmul.target is _SCALED:
        scale = static_shape(matmul.args[2])  # type: ignore[arg-type]
        if scale is None or (math.prod(scale) != 1 and scale[-1] != 1):
            return "its scales are not one for the tensor or one for each row"
    return ""


def _too_small(matmul: Node, options: Options) -> str:
    tensor = value(matmul)
    return "" if tensor is None else options.too_small(tensor.device, flops(matmul))


def _operands(matmul: Node) -> list[Node]:
    """What a matmul needs besides its gathered operand."""
    given = [right(matmul), *matmul.args, *matmul.kwargs.values()]
    unused = (left(matmul), matmul.args[1] if matmul.target is aten.bmm.default else None)
    return [node for node in given if isinstance(node, Node) and node not in unused]


def _depends(nodes: Iterable[Node], on: Iterable[Node], order: dict[Node, int]) -> bool:
    """Whether some nodes need any of others."""
    wanted = set(on)
    first = min((order[node] for node in wanted), default=0)
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node in wanted:
            return True
        if node not in seen and order[node] > first:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _independent(matches: list[_Match], order: dict[Node, int]) -> list[_Match]:
    """Those matmuls of which no operand depends on another one of them."""
    kept: list[_Match] = []
    for match in matches:
        if not _depends(_operands(match.matmul), [m.matmul for m in kept], order):
            kept.append(match)
    return kept


def order_of(graph: Graph) -> dict[Node, int]:
    """The place of each node."""
    return {node: place for place, node in enumerate(graph.nodes)}


def hoist(before: Node, nodes: Iterable[Node]) -> None:
    """Moves nodes, with all that they depend on, before another one that does not."""
    order = order_of(before.graph)
    needed: set[Node] = set()
    todo = [node for node in nodes if order[node] > order[before]]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [n for n in node.all_input_nodes if order[n] > order[before]]
    for node in sorted(needed, key=order.__getitem__):
        before.prepend(node)


def fuse_gathers(graph: Graph, options: Options) -> None:
    """Replaces what it can, and records what became of each all-gather."""
    tracer = Tracer(graph, set())
    for wait in [node for node in graph.nodes if node.target is WAIT]:
        if wait._erased:  # with another gather: its scales
            continue
        gather = wait.args[0]
        if not isinstance(gather, Node) or gather.target is not GATHER:
            continue
        if tracer[wait] is None:
            shape = "its shape is not known when it is compiled"
            critical = bool(fed_by(wait))
            record(Decision(gather.name, str(gather.args[2]), None, shape, critical))
            continue
        _fuse(graph, tracer, wait, options)


def _matches(tracer: Tracer, wait: Node, options: Options) -> tuple[list[_Match], list[str]]:
    found: list[_Match] = []
    reasons: list[str] = []
    for node in tracer.of(wait):
        for user in node.users:
            if user.target not in MATMULS or left(user) is not node:
                if user.target in MATMULS:
                    reasons.append(f"{user.name} sums over the gathered rows")
                continue
            traced = tracer[node]
            assert traced is not None
            reason: _Match | str = (
                unsupported(user) or _too_small(user, options) or _arranged(user, traced)
            )
            if isinstance(reason, _Match):
                found.append(reason)
            else:
                reasons.append(f"{user.name}: {reason}")
    return found, reasons


def _fuse(graph: Graph, tracer: Tracer, wait: Node, options: Options) -> None:
    gather = wait.args[0]
    assert isinstance(gather, Node)
    group = str(gather.args[2])
    found, reasons = _matches(tracer, wait, options)
    if not found and not reasons and (path := fed_by(wait)):
        lost = next(node for node in path if tracer[node] is None)
        way = f"through {lost.name}, which is not followed" if lost is not path[-1] else "only"
        reasons.append(f"it feeds {path[-1].name} {way}")
    critical = bool(found or reasons)
    arrangements: dict[Any, list[_Match]] = {}
    for match in found:
        scale = match.matmul.args[2] if match.matmul.target is _SCALED else None
        key = (match.shard, match.dim, match.traced.dtypes, scale)
        arrangements.setdefault(key, []).append(match)
    done: list[str] = []
    order = order_of(graph)
    for matches in sorted(arrangements.values(), key=len, reverse=True)[:1]:
        # One op reads the gathered tensor; what needs it otherwise takes it from there.
        chosen = _independent(sorted(matches, key=lambda m: order[m.matmul]), order)
        try:
            reason = _rewrite(graph, tracer, wait, chosen, order)
        except DynamicShapeError as error:
            reason = str(error)
        if reason:
            reasons.append(reason)
        else:
            done = [match.matmul.name for match in chosen]
    name = "fused_all_gather_matmul"
    if done and found[0].matmul.target is _SCALED:
        name = "fused_all_gather_scaled_matmul"
    text = ", ".join(done) if done else "; ".join(reasons) or "it feeds no matmul"
    record(Decision(gather.name, group, name if done else None, text, critical))


def _rewrite(
    graph: Graph, tracer: Tracer, wait: Node, matches: list[_Match], order: dict[Node, int]
) -> str:
    """Puts in one fused op for several matmuls; returns why it could not."""
    first = matches[0]
    matmuls = {match.matmul for match in matches}
    others = [(node, user) for node, user in tracer.uses(wait) if user not in matmuls]
    for node, _ in others:
        traced = tracer[node]
        assert traced is not None
        if traced.dtypes != first.traced.dtypes:
            return f"it is used as {traced.dtypes[-1]}, too, not only as {first.traced.dtypes[-1]}"
        if traced.sliced is not first.traced.sliced:
            return f"{node.name} is a part of it"
    # Before all that uses the gathered tensor, after all that the op needs.
    before = min([*matmuls, *(node for node, _ in others)], key=order.__getitem__)
    needs = [node for match in matches for node in _operands(match.matmul)]
    if _depends(needs, [*matmuls, *(user for _, user in others)], order):
        return "an operand depends on another use of it"
    hoist(before, needs)
    emitter = Emitter(graph, before)
    shard = emitter.shard(first.traced, first.shard)
    if shard is None:
        return "its shard cannot be arranged"
    scales = tracer[first.matmul.args[2]] if first.matmul.target is _SCALED else None
    full, outputs = _call(emitter, tracer, shard, first, matches, bool(others))
    results = []
    for match, output in zip(matches, outputs, strict=True):
        result = emitter.reshape(output, static_shape(match.matmul) or ())
        if match.matmul.target is aten.addmm.default:
            result = emitter.call(aten.add.Tensor, result, match.matmul.args[0])
        results.append(result)
    served = [] if full is None else _serve(emitter, tracer, full, first.gathered, others)
    # From here on the graph changes.
    for match, result in zip(matches, results, strict=True):
        match.matmul.replace_all_uses_with(result)
        graph.erase_node(match.matmul)
    for user, node, again in served:
        user.replace_input_with(node, again)
    erase_unused(graph, tracer, wait)
    if scales is not None and scales.ranks is not None:
        name, group = scales.source.args[0].name, str(scales.source.args[0].args[2])  # type: ignore[union-attr]
        erase_unused(graph, tracer, scales.source)
        if scales.source._erased:
            record(Decision(name, group, "fused_all_gather_scaled_matmul", "the scales", True))
    return ""


def _call(
    emitter: Emitter,
    tracer: Tracer,
    shard: Node,
    first: _Match,
    matches: list[_Match],
    keep: bool,
) -> tuple[Node | None, list[Node]]:
    """Emits the fused op: the gathered tensor, if it is kept, and the products."""
    weights = [right(match.matmul) for match in matches]
    group = first.traced.source.args[0].args[2]  # type: ignore[union-attr]
    if first.matmul.target is _SCALED:
        matmuls = [match.matmul for match in matches]
        scale = _shard_scale(emitter, tracer, first)
        fused = emitter.call(
            _FUSED_SCALED,
            shard,
            weights,
            scale,
            [m.args[3] for m in matmuls],
            first.dim,
            group,
            [argument(m, "bias") for m in matmuls],
            [argument(m, "scale_result") for m in matmuls],
            [argument(m, "out_dtype") for m in matmuls],
            [bool(argument(m, "use_fast_accum")) for m in matmuls],
        )
        results = emitter.item(fused, 1)
        outputs = [emitter.item(results, index) for index in range(len(matches))]
        return (emitter.item(fused, 0) if keep else None), outputs
    fused = emitter.call(_FUSED, shard, weights, first.dim, group, return_A=keep)
    results = emitter.item(fused, 1)
    outputs = [emitter.item(results, index) for index in range(len(matches))]
    return (emitter.item(fused, 0) if keep else None), outputs


def _shard_scale(emitter: Emitter, tracer: Tracer, match: _Match) -> Node:
    """The scale of the gathered operand, as the fused op takes it."""
    scale = match.matmul.args[2]
    assert isinstance(scale, Node)
    shape = static_shape(scale)
    if shape is None or math.prod(shape) == 1:
        return scale
    # One for each row: gathered as the rows are, or else there for all of them.
    traced = tracer[scale]
    if traced is not None and traced.ranks is not None:
        found = expose(traced.axes, traced.ranks)
        if found is not None and found[0] == 0:
            rows = without(found[2], traced.ranks)[0]
            leads = (rows[: found[1]], rows[found[1] :]) if match.gathered[1:-1] else (rows,)
            shard = emitter.shard(traced, (*leads, ()))
            if shard is not None:
                return shard
    return emitter.reshape(scale, [*sizes(match.gathered)[:-1], 1])


def _serve(
    emitter: Emitter, tracer: Tracer, full: Node, have: Axes, others: list[tuple[Node, Node]]
) -> list[tuple[Node, Node, Node]]:
    """What those get that use the gathered tensor otherwise: (user, old input, new input)."""
    found = []
    for node, user in others:
        traced, parent = tracer[node], node.args[0]
        assert traced is not None
        before = tracer[parent]
        # What only turns the tensor (for a weight's gradient, say) stays: it copies nothing.
        if before is not None and not emitter.in_order(have, traced.axes):
            node, user, traced = parent, node, before  # type: ignore[assignment]
        again = emitter.rearrange(full, have, traced.axes)
        assert again is not None
        found.append((user, node, again))
    return found


def erase_unused(graph: Graph, tracer: Tracer, wait: Node) -> None:
    """Erases a gather, with all arrangements of it, as far as nobody uses them any more."""
    if wait not in graph.find_nodes(op="call_function", target=WAIT):
        return
    _erase(graph, reversed(tracer.of(wait)))
    gather = wait.args[0] if wait.args else None
    if isinstance(gather, Node) and not gather.users:
        graph.erase_node(gather)


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases those of some nodes, given last ones first, that nobody uses, and their parts."""
    for node in nodes:
        for user in list(node.users):
            if user.op == "call_function" and _is_unused(user):
                _erase(graph, [*user.users, user])
        if not node.users:
            graph.erase_node(node)


def _is_unused(node: Node) -> bool:
    return all(_is_unused(user) for user in node.users) and node.op != "output"
