"""All-gathers of keys and values that feed attention become fused all-gather-attention.

On the joint graph of forward and backward: there the gathered keys, which the backward pass of
attention would need, are seen to be needed no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from symm_cp.inductor.axes import Axes, Factor, expose, lead, origin, without
from symm_cp.inductor.emit import DynamicShapeError, Emitter
from symm_cp.inductor.gather import erase_unused, order_of
from symm_cp.inductor.options import Options
from symm_cp.inductor.report import Decision, record
from symm_cp.inductor.trace import (
    SCATTER,
    WAIT,
    Traced,
    Tracer,
    argument,
    aten,
    is_dynamic,
    is_item,
    static_shape,
)
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential

_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
#: Attention, with its backward pass: both take query, key and value, and give the output and the
#: log-sum-exp, and their gradients, first.
_BACKWARD = {
    _ON_CPU: aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention.default: (
        aten._scaled_dot_product_flash_attention_backward.default
    ),
    aten._scaled_dot_product_cudnn_attention.default: (
        aten._scaled_dot_product_cudnn_attention_backward.default
    ),
    aten._scaled_dot_product_efficient_attention.default: (
        aten._scaled_dot_product_efficient_attention_backward.default
    ),
}
_FUSED = torch.ops.symm_mem.fused_all_gather_attention.default
_FUSED_BACKWARD = torch.ops.symm_mem.fused_all_gather_attention_backward.default
_SEQ = 2
_MOST_MASK = 1 << 26  # elements of a mask that are looked at


@dataclass(frozen=True)
class _Scattered:
    """A reduce-scatter of gradients, of which `parts` lie side by side along `dim`.

    A part is the number of a result of the backward pass, and how its shard is arranged; `want` is
    how what is scattered is arranged in the end.
    """

    wait: Node
    parts: tuple[tuple[int, Axes], ...]
    dim: int
    want: Axes


@dataclass(frozen=True)
class _Grads:
    """A backward pass, and what its gradients of keys and values become."""

    node: Node
    scattered: tuple[_Scattered, ...]


def fuse_attention(graph: Graph, options: Options) -> None:
    """Replaces what it can, and records what became of each gather that feeds attention."""
    tracer = Tracer(graph, set(), items_of=set(_BACKWARD.values()))
    for node in [n for n in graph.nodes if n.target in _BACKWARD]:
        found = [tracer[operand] for operand in node.args[1:3]]
        gathers = [t for t in found if t is not None and t.ranks is not None]
        if not gathers:
            continue
        names = sorted({t.source.args[0].name for t in gathers})  # type: ignore[union-attr]
        group = str(gathers[0].source.args[0].args[2])  # type: ignore[union-attr]
        try:
            reason = _fuse(graph, tracer, node, found)
        except DynamicShapeError as error:
            reason = str(error)
        into = None if reason else "fused_all_gather_attention"
        record(Decision(", ".join(names), group, into, reason or node.name, critical=True))


def _fuse(graph: Graph, tracer: Tracer, node: Node, found: list[Traced | None]) -> str:
    """Fuses one attention; returns why it could not."""
    key, value_ = found
    if key is None or value_ is None or key.ranks is None or value_.ranks is None:
        return "keys and values are not both gathered"
    if key.source.args[0].args[1:3] != value_.source.args[0].args[1:3]:  # type: ignore[union-attr]
        return "keys and values are gathered over different groups"
    query_shape, *shapes = (static_shape(operand) for operand in node.args[:3])
    if shapes[0] != shapes[1] or not _same_outside(query_shape, shapes[0]):
        return "queries, keys and values may be of sizes that do not fit"
    wants: list[Axes] = []
    for traced in (key, value_):
        place = expose(traced.axes, traced.ranks)  # type: ignore[arg-type]
        if place is None or place[:2] != (_SEQ, 0):
            return "keys and values are not gathered along the sequence"
        wants.append(without(place[2], traced.ranks))  # type: ignore[arg-type]
    with _disable_current_modes():  # masks are looked at, not traced
        chosen = _mask_options(node, key)
    if isinstance(chosen, str):
        return chosen
    backward = _backward_of(tracer, node)
    if isinstance(backward, str):
        return backward
    group = key.source.args[0].args[2]  # type: ignore[union-attr]
    emitter = Emitter(graph, node)
    shards = [emitter.shard(t, want) for t, want in zip((key, value_), wants, strict=True)]
    if shards[0] is None or shards[1] is None:
        return "their shards cannot be arranged"
    query = node.args[0]
    chosen = {**chosen, "scale": argument(node, "scale"), "enable_gqa": True}
    fused = emitter.call(_FUSED, query, *shards, group, **chosen)
    results = [emitter.item(fused, index) for index in range(2)]
    for item in [user for user in node.users if is_item(user)]:
        # What comes after these two goes into the backward pass, which is replaced as a whole.
        item.replace_all_uses_with(results[min(item.args[1], 1)])  # type: ignore[type-var, index]
        graph.erase_node(item)
    if backward is not None:
        _replace_backward(graph, backward, query, shards, results, group, chosen)
    graph.erase_node(node)
    for traced in (key, value_):
        erase_unused(graph, tracer, traced.source)
    return ""


def _same_outside(query: Sequence[int] | None, key: Sequence[int] | None) -> bool:
    """Whether queries and keys have one batch and as many features, for all that is known."""
    if query is None or key is None:
        return False
    return (query[0], query[-1]) == (key[0], key[-1])


def _mask_options(node: Node, key: Traced) -> dict[str, Any] | str:
    """The options of the fused op that stand for a mask, or why there are none."""
    assert key.ranks is not None
    if argument(node, "dropout_p") != 0.0:
        return "it has dropout"
    if argument(node, "is_causal"):
        if key.ranks.size == 1:
            return {"is_causal": True}
        return "is_causal aligns this rank's queries with the first keys: use a mask or an offset"
    mask = argument(node, "attn_mask", "attn_bias")
    if mask is None:
        return {}
    found = constant(mask)
    if found is None:
        return "its mask is not known when it is compiled"
    for dim in range(found.dim() - 2):
        if found.stride(dim) == 0:  # the same for all heads
            found = found.narrow(dim, 0, 1)
    visible = found if found.dtype == torch.bool else found == 0
    if found.dtype != torch.bool and not bool((visible | (found == -torch.inf)).all()):
        return "its mask has other values than 0 and -inf"
    shapes = static_shape(node.args[0]), static_shape(node.args[1])
    if shapes[0] is None or shapes[1] is None:
        return "its shape is not known when it is compiled"
    rows, keys = shapes[0][_SEQ], shapes[1][_SEQ]
    if bool(visible.all()):
        return {}
    if visible.shape[:-2].numel() != 1:
        return "its mask differs from head to head"
    group = _resolve_process_group(key.source.args[0].args[2])  # type: ignore[union-attr]
    for make in (sequential, head_tail):
        layout = make(keys, key.ranks.size)
        if layout.lengths[group.rank()] == rows and _is_causal(visible, layout, group.rank()):
            return {
                "is_causal": True,
                "chunk_order": list(layout.chunk_order),
                "chunk_lengths": list(layout.chunk_lengths),
            }
    return "its mask is no causal one of a sequential or head-tail layout"


def _is_causal(visible: torch.Tensor, layout: SequenceLayout, rank: int) -> bool:
    here = visible.device
    queries = torch.tensor(list(layout.positions(rank)), device=here)
    order = [p for r in range(layout.world_size) for p in layout.positions(r)]
    expected = queries[:, None] >= torch.tensor(order, device=here)
    return bool(torch.equal(visible.reshape(visible.shape[-2:]).expand_as(expected), expected))


def constant(node: Any) -> torch.Tensor | None:
    """The value of a tensor that depends on no input of the graph; None for others."""
    needed: list[Node] = []
    todo, seen = [node], set()
    while todo:
        found = todo.pop()
        if found in seen:
            continue
        seen.add(found)
        shape = static_shape(found) if found.op == "call_function" else None
        if shape is None or any(map(is_dynamic, shape)):
            return None
        if math.prod(shape) > _MOST_MASK and found.target is not aten.expand.default:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(found.target, "tags", ()):
            return None
        needed.append(found)
        todo += found.all_input_nodes
    values: dict[Node, Any] = {}
    for found in sorted(needed, key=order_of(node.graph).__getitem__):
        args, kwargs = torch.fx.node.map_arg((found.args, found.kwargs), values.__getitem__)
        values[found] = found.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _backward_of(tracer: Tracer, node: Node) -> _Grads | str | None:
    """The backward pass of an attention, if there is one; or why it cannot be fused."""
    items = [user for user in node.users if is_item(user)]
    target = _BACKWARD[node.target]  # type: ignore[index]
    found = {u for item in items for u in item.users if u.target is target}
    # On CUDA the log-sum-exp may be padded; the rest is random state.
    kept = 1 if node.target is _ON_CPU else 0
    if any(item.args[1] > kept and set(item.users) - found for item in items):  # type: ignore[operator]
        return "more than its output is used"
    if not found:
        return None
    if len(found) > 1:
        return "it has several backward passes"
    (backward,) = found
    if backward.args[1:4] != node.args[:3]:
        return "its backward pass takes other keys"
    if any(user.args[1] > 2 for user in backward.users):  # type: ignore[operator]
        return "its mask has a gradient"
    found_all: dict[Node, _Scattered] = {}
    for index in (1, 2):
        item = next((u for u in backward.users if u.args[1] == index), None)
        scattered = None if item is None else _scattered(tracer, item)
        if scattered is None:
            return "the gradients of keys and values are not reduce-scattered along the sequence"
        found_all[scattered.wait] = scattered
    given = sorted(index for s in found_all.values() for index, _ in s.parts)
    if given != [1, 2]:
        return "the gradients of keys and values are used twice"
    return _Grads(backward, tuple(found_all.values()))


def _scattered(tracer: Tracer, grad: Node) -> _Scattered | None:
    """The reduce-scatter of a gradient, alone or together with others."""
    uses = tracer.uses(grad)
    if len(uses) != 1:
        return None
    arranged, user = uses[0]
    operands, dim = [arranged], 0
    if user.target is aten.cat.default:
        operands = list(user.args[0])  # type: ignore[arg-type]
        dim = user.args[1] if len(user.args) > 1 else 0  # type: ignore[assignment]
        further = tracer.uses(user)
        if len(further) != 1:
            return None
        arranged, user = further[0]
    traced, waits = tracer[arranged], [u for u in user.users if u.target is WAIT]
    if user.target is not SCATTER or user.args[1] != "sum" or len(waits) != 1 or traced is None:
        return None
    found = lead(traced.axes, 0, int(user.args[2]))  # type: ignore[arg-type]
    if found is None or len(traced.dtypes) > 1:
        return None
    ranks, want = found
    if len(operands) == 1:
        shape = static_shape(grad) or ()
        if (ranks.dim, ranks.end) != (_SEQ, shape[_SEQ]):
            return None
        return _Scattered(waits[0], ((grad.args[1], want),), -1, want)  # type: ignore[arg-type]
    parts = [_part(tracer, operand, ranks) for operand in operands]
    if any(part is None for part in parts):
        return None
    ndim = len(static_shape(operands[0]) or ())
    dim %= ndim
    if ranks.dim == dim:
        return None
    return _Scattered(waits[0], tuple(p for p in parts if p is not None), dim, want)


def _part(tracer: Tracer, operand: Node, ranks: Factor) -> tuple[int, Axes] | None:
    """Which result of the backward pass an operand is, and how its shard is arranged."""
    traced, shape = tracer[operand], static_shape(operand)
    whole = None if traced is None else static_shape(traced.source)
    if traced is None or shape is None or whole is None or not is_item(traced.source):
        return None
    if len(traced.dtypes) > 1 or whole[_SEQ] % ranks.size != 0:
        return None
    mine = Factor(_SEQ, whole[_SEQ] // ranks.size, ranks.size)
    found = expose(traced.axes, mine)
    if found is None:
        return None
    # The ranks' parts have to be outermost, where the scatter cuts.
    if found[1] != 0 or found[0] != ranks.dim or ranks.end != shape[ranks.dim]:
        return None
    return traced.source.args[1], without(found[2], mine)  # type: ignore[return-value]


def _replace_backward(
    graph: Graph,
    backward: _Grads,
    query: Any,
    shards: list[Any],
    results: list[Node],
    group: Any,
    chosen: dict[str, Any],
) -> None:
    node = backward.node
    emitter = Emitter(graph, node)
    grads = emitter.call(_FUSED_BACKWARD, node.args[0], query, *shards, *results, group, **chosen)
    for item in [user for user in node.users if user.args[1] == 0]:
        item.replace_all_uses_with(emitter.item(grads, 0))
    for scattered in backward.scattered:
        parts = []
        for index, axes in scattered.parts:
            grad = emitter.item(grads, index)
            part = emitter.rearrange(grad, origin(static_shape(grad) or ()), axes)
            assert part is not None
            parts.append(part)
        arranged: Node | None = parts[0]
        if scattered.dim >= 0:
            joined = emitter.call(aten.cat.default, parts, scattered.dim)
            arranged = emitter.rearrange(joined, origin(static_shape(joined) or ()), scattered.want)
        assert arranged is not None
        wait = scattered.wait
        scatter = wait.args[0]
        wait.replace_all_uses_with(arranged)
        graph.erase_node(wait)
        graph.erase_node(scatter)  # type: ignore[arg-type]
