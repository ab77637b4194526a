"""All-gathers that feed matmuls become fused all-gather-matmuls."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from torch.fx import Graph, Node

from symm_cp.inductor.advice import instead_of_moving, through_rows
from symm_cp.inductor.axes import Axes, expose, sizes, without
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import (
    MATMULS,
    SCALED,
    left,
    other_operands,
    right,
    scaled_options,
    why_too_small,
    why_unsupported,
)
from symm_cp.inductor.neighbours import fed_by, why_attention_is_not_fused
from symm_cp.inductor.nodes import GATHER, aten, awaited, group_of, static_shape
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import Traced, Tracer
from symm_cp.inductor.rewrite import (
    Emitter,
    depends,
    erase_unused,
    explains_dynamic_shapes,
    hoist,
    order_of,
)
from symm_cp.ops.common import op_for


@dataclass(frozen=True)
class _Match:
    """A matmul of a gathered tensor: its shard is (leads, rows, K), gathered along `dim`."""

    matmul: Node
    traced: Traced
    shard: Axes
    gathered: Axes
    dim: int

    @property
    def arrangement(self) -> Hashable:
        """Equal for matmuls that one fused op can compute."""
        scale = self.matmul.args[2] if self.matmul.target is SCALED else None
        return self.shard, self.dim, self.traced.dtypes, scale


def fuse_gathers(graph: Graph, options: Options) -> None:
    """Fuses all-gathers with matmuls, and records a decision for each all-gather."""
    tracer = Tracer(graph, set())
    for wait, gather in awaited(graph, GATHER):
        if wait._erased:  # it gathered the scales of another gather, and was fused with that
            continue
        name, group = gather.name, group_of(gather)
        if tracer[wait] is None:
            reason = "its shape is unknown at compile time"
            record(Decision(name, group, None, reason, bool(fed_by(wait))))
            continue
        into, text, critical = _fuse(graph, tracer, wait, options)
        record(Decision(name, group, into, text, critical))


def _fuse(
    graph: Graph, tracer: Tracer, wait: Node, options: Options
) -> tuple[str | None, str, bool]:
    """Fuses a gather with matmuls; returns the decision: into which op, why, and if critical."""
    matches, reasons = _matches(tracer, wait, options)
    if not matches and not reasons and (path := fed_by(wait)):
        lost = next(node for node in path if tracer[node] is None)
        if lost is path[-1]:
            reasons.append(f"it feeds {lost.name}, which has no fused form")
        else:
            through = f"it feeds {path[-1].name} through {lost.name}, which is not followed"
            reasons.append(f"{through}{instead_of_moving(tracer, lost)}")
    if not matches and not reasons and (through := through_rows(tracer, wait)):
        return None, through, False
    if not matches and not reasons and (why := why_attention_is_not_fused(wait)):
        reasons.append(why)
    if matches:
        # One fused op gathers; all other users take its gathered result.
        order = order_of(graph)
        chosen = _independent(_largest_arrangement(matches), order)
        reason = _rewrite(graph, tracer, wait, chosen, order)
        if not reason:
            scaled = "scaled_" if chosen[0].matmul.target is SCALED else ""
            text = ", ".join(match.matmul.name for match in chosen)
            return f"fused_all_gather_{scaled}matmul", text, True
        reasons.append(reason)
    return None, "; ".join(reasons) or "it feeds no matmul", bool(reasons)


def _matches(tracer: Tracer, wait: Node, options: Options) -> tuple[list[_Match], list[str]]:
    """Returns the matmuls that can be fused with a gather, and why others cannot."""
    matches: list[_Match] = []
    reasons: list[str] = []
    gathered = set(tracer.of(wait))
    for node in tracer.of(wait):
        traced = tracer.arrangement(node)
        for user in node.users:
            if user.target not in MATMULS:
                continue
            if left(user) is not node or gathered.intersection(other_operands(user)):
                reasons.append(f"{user.name} {_as_right_operand(traced)}")
                continue
            match: _Match | str = (
                why_unsupported(user) or why_too_small([user], options) or _match(user, traced)
            )
            if isinstance(match, _Match):
                matches.append(match)
            else:
                reasons.append(f"{user.name}: {match}")
    return matches, reasons


def _as_right_operand(traced: Traced) -> str:
    """Returns how a matmul uses a gathered tensor that is not its left operand."""
    assert traced.ranks is not None
    exposed = expose(traced.axes, traced.ranks)
    if exposed is not None and exposed[0] == len(exposed[2]) - 2:
        return "sums over the gathered rows"
    return "takes the gathered tensor as its right operand, as a weight"


def _match(matmul: Node, traced: Traced) -> _Match | str:
    """Returns how the shard must be arranged for a fused op, or why no arrangement will do."""
    assert traced.ranks is not None
    exposed = expose(traced.axes, traced.ranks)
    if exposed is None:
        return "the parts of the ranks are interleaved in its input"
    dim, place, axes = exposed
    *before, columns = axes
    rows = tuple(factor for axis in before for factor in axis)
    if dim == len(before):
        if place != 0:
            return "the gathered dimension is not the outermost one that the matmul sums over"
        flat_axes = (rows, columns)
        return _Match(matmul, traced, without(flat_axes, traced.ranks), flat_axes, 1)
    place += sum(map(len, before[:dim]))
    leads, inner = rows[:place], rows[place + 1 :]
    if not leads:
        return _Match(matmul, traced, (inner, columns), axes, 0)
    return _Match(matmul, traced, (leads, inner, columns), (leads, rows[place:], columns), 1)


def _largest_arrangement(matches: list[_Match]) -> list[_Match]:
    by_arrangement: dict[Hashable, list[_Match]] = {}
    for match in matches:
        by_arrangement.setdefault(match.arrangement, []).append(match)
    return max(by_arrangement.values(), key=len)


def _independent(matches: list[_Match], order: dict[Node, int]) -> list[_Match]:
    """Returns matmuls whose operands do not depend on another returned matmul."""
    kept: list[_Match] = []
    for match in sorted(matches, key=lambda match: order[match.matmul]):
        operands = other_operands(match.matmul)
        if not depends(operands, [other.matmul for other in kept], order):
            kept.append(match)
    return kept


@explains_dynamic_shapes
def _rewrite(
    graph: Graph, tracer: Tracer, wait: Node, matches: list[_Match], order: dict[Node, int]
) -> str:
    """Replaces several matmuls by one fused op; returns why it could not, or an empty text."""
    first = matches[0]
    matmuls = {match.matmul for match in matches}
    others = [(node, user) for node, user in tracer.uses(wait) if user not in matmuls]
    if reason := _why_not_served(tracer, first.traced, others):
        return reason
    # The op goes before all users of the gathered tensor, and after its operands.
    before = min([*matmuls, *(node for node, _ in others)], key=order.__getitem__)
    operands = [node for match in matches for node in other_operands(match.matmul)]
    if depends(operands, [*matmuls, *(user for _, user in others)], order):
        return "an operand depends on another use of it"
    hoist(before, operands)
    emitter = Emitter(graph, before)
    shard = emitter.shard(first.traced, first.shard)
    if shard is None:
        return "its shard cannot be arranged"
    scales = tracer[first.matmul.args[2]] if first.matmul.target is SCALED else None
    full, products = _emit(emitter, tracer, shard, matches, keep_gathered=bool(others))
    results = []
    for match, product in zip(matches, products, strict=True):
        result = emitter.reshape(product, static_shape(match.matmul) or ())
        if match.matmul.target is aten.addmm.default:
            result = emitter.call(aten.add.Tensor, result, match.matmul.args[0])
        results.append(result)
    served = [] if full is None else _serve(emitter, tracer, full, first.gathered, others)
    # From here on the graph changes.
    for match, result in zip(matches, results, strict=True):
        match.matmul.replace_all_uses_with(result)
        graph.erase_node(match.matmul)
    for user, old_input, new_input in served:
        user.replace_input_with(old_input, new_input)
    erase_unused(graph, tracer, wait)
    if scales is not None and scales.ranks is not None:
        _erase_scales(graph, tracer, scales)
    return ""


def _why_not_served(tracer: Tracer, traced: Traced, others: list[tuple[Node, Node]]) -> str:
    """Returns why other users cannot take the gathered result of the fused op, or an empty text."""
    for node, _ in others:
        other = tracer.arrangement(node)
        if other.dtypes != traced.dtypes:
            return f"it is also used as {other.dtypes[-1]}, not only as {traced.dtypes[-1]}"
        if other.sliced is not traced.sliced:
            return f"{node.name} is a part of it"
    return ""


def _emit(
    emitter: Emitter,
    tracer: Tracer,
    shard: Node,
    matches: list[_Match],
    *,
    keep_gathered: bool,
) -> tuple[Node | None, list[Node]]:
    """Inserts the fused op; returns the gathered tensor, if it is kept, and the products."""
    first, matmuls = matches[0], [match.matmul for match in matches]
    weights = [right(matmul) for matmul in matmuls]
    group = first.traced.gather.args[2]
    scaled = first.matmul.target is SCALED
    name = f"fused_all_gather_{'scaled_' * scaled}matmul"
    op = op_for(name, shard.meta["val"].device)
    if scaled:
        scales = _shard_scale(emitter, tracer, first), [matmul.args[3] for matmul in matmuls]
        options = map(list, zip(*map(scaled_options, matmuls), strict=True))
        fused = emitter.call(op, shard, weights, *scales, first.dim, group, *options)
    else:
        fused = emitter.call(op, shard, weights, first.dim, group, return_A=keep_gathered)
    results = emitter.item(fused, 1)
    products = [emitter.item(results, index) for index in range(len(matches))]
    return (emitter.item(fused, 0) if keep_gathered else None), products


def _shard_scale(emitter: Emitter, tracer: Tracer, match: _Match) -> Node:
    """Returns the scale of the gathered operand as the fused op takes it."""
    scale = match.matmul.args[2]
    assert isinstance(scale, Node)
    shape = static_shape(scale)
    if shape is None or math.prod(shape) == 1:
        return scale
    # Row-wise scales are either gathered like the rows, or on this rank for all rows.
    traced = tracer[scale]
    if traced is not None and traced.ranks is not None:
        exposed = expose(traced.axes, traced.ranks)
        if exposed is not None and exposed[0] == 0:
            _, place, axes = exposed
            rows = without(axes, traced.ranks)[0]
            leads = (rows[:place], rows[place:]) if match.gathered[1:-1] else (rows,)
            shard = emitter.shard(traced, (*leads, ()))
            if shard is not None:
                return shard
    return emitter.reshape(scale, [*sizes(match.gathered)[:-1], 1])


def _serve(
    emitter: Emitter, tracer: Tracer, full: Node, have: Axes, others: list[tuple[Node, Node]]
) -> list[tuple[Node, Node, Node]]:
    """Arranges the gathered tensor for its other users: (user, old input, new input)."""
    served = []
    for node, user in others:
        traced, parent = tracer.arrangement(node), node.args[0]
        before = tracer[parent]
        # A node that only permutes the tensor (as for a gradient of weights) stays: it copies
        # nothing.
        if before is not None and not emitter.in_order(have, traced.axes):
            node, user, traced = parent, node, before  # type: ignore[assignment]
        arranged = emitter.rearrange(full, have, traced.axes)
        assert arranged is not None
        served.append((user, node, arranged))
    return served


def _erase_scales(graph: Graph, tracer: Tracer, scales: Traced) -> None:
    """Erases the gather of row-wise scales, which the fused op gathers itself."""
    name, group = scales.gather.name, group_of(scales.gather)
    erase_unused(graph, tracer, scales.source)
    if scales.source._erased:
        record(Decision(name, group, "fused_all_gather_scaled_matmul", "the scales", True))
