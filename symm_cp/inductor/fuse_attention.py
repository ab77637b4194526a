"""All-gathers of keys and values that feed attention become fused all-gather-attention.

Runs on the joint graph of forward and backward: only that graph shows that the backward pass no
longer needs the gathered keys and values.
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
from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.nodes import (
    SCATTER,
    WAIT,
    argument,
    aten,
    group_of,
    is_dynamic,
    is_item,
    static_shape,
)
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import Traced, Tracer
from symm_cp.inductor.rewrite import Emitter, erase_unused, explains_dynamic_shapes, order_of
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential

_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
#: Each attention op with the op of its backward pass. Both take query, key and value; the first
#: results are the output and the log-sum-exp, or the three gradients.
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
_MAX_MASK_ELEMENTS = 1 << 26  # larger masks are not evaluated


@dataclass(frozen=True)
class _GradScatter:
    """A reduce-scatter of one gradient, or of several that are concatenated along `dim`.

    `parts`: the index of each gradient among the results of the backward pass, and how its shard is
    arranged; `want`: how the scattered tensor is arranged in the end.
    """

    wait: Node
    parts: tuple[tuple[int, Axes], ...]
    dim: int | None
    want: Axes


@dataclass(frozen=True)
class _Grads:
    """A backward pass, and the reduce-scatters of its gradients of keys and values."""

    node: Node
    scatters: tuple[_GradScatter, ...]


def fuse_attention(graph: Graph, options: Options) -> None:
    """Fuses gathers with attention, and records a decision for each gather that feeds attention."""
    tracer = Tracer(graph, set(), items_of=set(_BACKWARD.values()))
    for node in [n for n in graph.nodes if n.target in _BACKWARD]:
        traced = [tracer[operand] for operand in node.args[1:3]]
        gathers = [t.gather for t in traced if t is not None and t.ranks is not None]
        if not gathers:
            continue
        names, group = sorted({gather.name for gather in gathers}), group_of(gathers[0])
        reason = _fuse(graph, tracer, node, *traced)
        into = None if reason else "fused_all_gather_attention"
        record(Decision(", ".join(names), group, into, reason or node.name, critical=True))


@explains_dynamic_shapes
def _fuse(
    graph: Graph, tracer: Tracer, node: Node, key: Traced | None, value: Traced | None
) -> str:
    """Fuses one attention; returns why it could not, or an empty text."""
    if key is None or value is None or key.ranks is None or value.ranks is None:
        return "keys and values are not both gathered"
    if key.gather.args[1:3] != value.gather.args[1:3]:
        return "keys and values are gathered over different groups"
    query_shape, key_shape, value_shape = (static_shape(operand) for operand in node.args[:3])
    if key_shape != value_shape or not _same_outside(query_shape, key_shape):
        return "queries, keys and values may have sizes that do not match"
    shard_axes: list[Axes] = []
    for traced, ranks in ((key, key.ranks), (value, value.ranks)):
        exposed = expose(traced.axes, ranks)
        if exposed is None or exposed[:2] != (_SEQ, 0):
            return "keys and values are not gathered along the sequence"
        shard_axes.append(without(exposed[2], ranks))
    with _disable_current_modes():  # masks are evaluated, not traced
        mask = _mask_arguments(node, key)
    if isinstance(mask, str):
        return mask
    backward = _backward_of(tracer, node)
    if isinstance(backward, str):
        return backward
    emitter = Emitter(graph, node)
    shards = [emitter.shard(t, want) for t, want in zip((key, value), shard_axes, strict=True)]
    if shards[0] is None or shards[1] is None:
        return "their shards cannot be arranged"
    group = key.gather.args[2]
    options = {**mask, "scale": argument(node, "scale"), "enable_gqa": True}
    inputs = (node.args[0], *shards)
    fused = emitter.call(_FUSED, *inputs, group, **options)
    results = [emitter.item(fused, index) for index in range(2)]
    for item in [user for user in node.users if is_item(user)]:
        # Results after these two only go into the backward pass, which is replaced as a whole.
        item.replace_all_uses_with(results[min(item.args[1], 1)])  # type: ignore[type-var, index]
        graph.erase_node(item)
    if backward is not None:
        emitter = Emitter(graph, backward.node)
        grad_out = backward.node.args[0]
        grads = emitter.call(_FUSED_BACKWARD, grad_out, *inputs, *results, group, **options)
        _replace_grads(graph, emitter, backward, grads)
    graph.erase_node(node)
    for traced in (key, value):
        erase_unused(graph, tracer, traced.source)
    return ""


def _same_outside(query: Sequence[int] | None, key: Sequence[int] | None) -> bool:
    """Tells whether queries and keys are known to agree in batch size and features."""
    if query is None or key is None:
        return False
    return (query[0], query[-1]) == (key[0], key[-1])


def _mask_arguments(node: Node, key: Traced) -> dict[str, Any] | str:
    """Returns the mask as arguments of the fused op, or why it cannot be expressed."""
    assert key.ranks is not None
    if argument(node, "dropout_p") != 0.0:
        return "it has dropout"
    if argument(node, "is_causal"):
        if key.ranks.size == 1:
            return {"is_causal": True}
        return "is_causal aligns this rank's queries with the first keys: use a mask or an offset"
    mask_node = argument(node, "attn_mask", "attn_bias")
    if mask_node is None:
        return {}
    mask = constant(mask_node)
    if mask is None:
        return "its mask is unknown at compile time"
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # the same for all heads
            mask = mask.narrow(dim, 0, 1)
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((visible | (mask == -torch.inf)).all()):
        return "its mask has other values than 0 and -inf"
    query_shape, key_shape = static_shape(node.args[0]), static_shape(node.args[1])
    if query_shape is None or key_shape is None:
        return "its shape is unknown at compile time"
    if bool(visible.all()):
        return {}
    if visible.shape[:-2].numel() != 1:
        return "its mask differs from head to head"
    rank = _resolve_process_group(key.gather.args[2]).rank()  # type: ignore[arg-type]
    for make in (sequential, head_tail):
        layout = make(key_shape[_SEQ], key.ranks.size)
        if layout.lengths[rank] == query_shape[_SEQ] and _is_causal(visible, layout, rank):
            return {
                "is_causal": True,
                "chunk_order": list(layout.chunk_order),
                "chunk_lengths": list(layout.chunk_lengths),
            }
    return "its mask is not the causal one of a sequential or head-tail layout"


def _is_causal(visible: torch.Tensor, layout: SequenceLayout, rank: int) -> bool:
    device = visible.device
    queries = torch.tensor(list(layout.positions(rank)), device=device)
    keys = [p for r in range(layout.world_size) for p in layout.positions(r)]
    expected = queries[:, None] >= torch.tensor(keys, device=device)
    return bool(torch.equal(visible.reshape(visible.shape[-2:]).expand_as(expected), expected))


def constant(node: Any) -> torch.Tensor | None:
    """Returns the value of a tensor that depends on no input of the graph; None for others."""
    needed: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in needed:
            continue
        shape = static_shape(current) if current.op == "call_function" else None
        if shape is None or any(map(is_dynamic, shape)):
            return None
        if math.prod(shape) > _MAX_MASK_ELEMENTS and current.target is not aten.expand.default:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return None
        needed.add(current)
        pending += current.all_input_nodes
    values: dict[Node, Any] = {}
    for current in sorted(needed, key=order_of(node.graph).__getitem__):
        args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
        values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _backward_of(tracer: Tracer, node: Node) -> _Grads | str | None:
    """Returns the backward pass of an attention, if there is one, or why it cannot be fused."""
    items = [user for user in node.users if is_item(user)]
    target = _BACKWARD[node.target]  # type: ignore[index]
    backwards = {user for item in items for user in item.users if user.target is target}
    # On CUDA the log-sum-exp may be padded; the results after it are random state.
    last_usable = 1 if node.target is _ON_CPU else 0
    if any(
        item.args[1] > last_usable and set(item.users) - backwards  # type: ignore[operator]
        for item in items
    ):
        return "more than its output is used"
    if not backwards:
        return None
    if len(backwards) > 1:
        return "it has several backward passes"
    (backward,) = backwards
    if backward.args[1:4] != node.args[:3]:
        return "its backward pass takes other keys"
    if any(user.args[1] > 2 for user in backward.users):  # type: ignore[operator]
        return "its mask has a gradient"
    scatters: dict[Node, _GradScatter] = {}
    for index in (1, 2):
        grad = next((user for user in backward.users if user.args[1] == index), None)
        scatter = None if grad is None else _scatter_of(tracer, grad)
        if scatter is None:
            return "the gradients of keys and values are not reduce-scattered along the sequence"
        scatters[scatter.wait] = scatter
    indices = sorted(index for scatter in scatters.values() for index, _ in scatter.parts)
    if indices != [1, 2]:
        return "the gradients of keys and values are used twice"
    return _Grads(backward, tuple(scatters.values()))


def _scatter_of(tracer: Tracer, grad: Node) -> _GradScatter | None:
    """Returns the reduce-scatter of a gradient, alone or together with others."""
    uses = tracer.uses(grad)
    if len(uses) != 1:
        return None
    arranged, user = uses[0]
    operands, dim = [arranged], 0
    if user.target is aten.cat.default:
        operands = list(user.args[0])  # type: ignore[arg-type]
        dim = user.args[1] if len(user.args) > 1 else 0  # type: ignore[assignment]
        uses = tracer.uses(user)
        if len(uses) != 1:
            return None
        arranged, user = uses[0]
    traced, waits = tracer[arranged], [u for u in user.users if u.target is WAIT]
    if user.target is not SCATTER or user.args[1] != "sum" or len(waits) != 1 or traced is None:
        return None
    cut = lead(traced.axes, 0, int(user.args[2]))  # type: ignore[arg-type]
    if cut is None or len(traced.dtypes) > 1:
        return None
    ranks, want = cut
    if len(operands) == 1:
        shape = static_shape(grad) or ()
        if (ranks.dim, ranks.end) != (_SEQ, shape[_SEQ]):
            return None
        return _GradScatter(waits[0], ((grad.args[1], want),), None, want)  # type: ignore[arg-type]
    parts = [_part(tracer, operand, ranks) for operand in operands]
    dim %= len(static_shape(operands[0]) or ())
    if ranks.dim == dim or any(part is None for part in parts):
        return None
    return _GradScatter(waits[0], tuple(p for p in parts if p is not None), dim, want)


def _part(tracer: Tracer, operand: Node, ranks: Factor) -> tuple[int, Axes] | None:
    """Returns an operand's index among the backward pass's results, and its shard's axes."""
    traced, shape = tracer[operand], static_shape(operand)
    grad_shape = None if traced is None else static_shape(traced.source)
    if traced is None or shape is None or grad_shape is None or not is_item(traced.source):
        return None
    if len(traced.dtypes) > 1 or grad_shape[_SEQ] % ranks.size != 0:
        return None
    grad_ranks = Factor(_SEQ, grad_shape[_SEQ] // ranks.size, ranks.size)
    exposed = expose(traced.axes, grad_ranks)
    if exposed is None:
        return None
    # The parts of the ranks must be outermost, where the scatter cuts.
    dim, place, axes = exposed
    if place != 0 or dim != ranks.dim or ranks.end != shape[ranks.dim]:
        return None
    return traced.source.args[1], without(axes, grad_ranks)  # type: ignore[return-value]


def _replace_grads(graph: Graph, emitter: Emitter, backward: _Grads, grads: Node) -> None:
    """Replaces the gradients of the backward pass by the gradients of the fused op."""
    for item in [user for user in backward.node.users if user.args[1] == 0]:
        item.replace_all_uses_with(emitter.item(grads, 0))
    for scatter in backward.scatters:
        parts = []
        for index, axes in scatter.parts:
            grad = emitter.item(grads, index)
            part = emitter.rearrange(grad, origin(static_shape(grad) or ()), axes)
            assert part is not None
            parts.append(part)
        arranged: Node | None = parts[0]
        if scatter.dim is not None:
            joined = emitter.call(aten.cat.default, parts, scatter.dim)
            arranged = emitter.rearrange(joined, origin(static_shape(joined) or ()), scatter.want)
        assert arranged is not None
        collective = scatter.wait.args[0]
        scatter.wait.replace_all_uses_with(arranged)
        graph.erase_node(scatter.wait)
        graph.erase_node(collective)  # type: ignore[arg-type]
