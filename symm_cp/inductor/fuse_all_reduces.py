"""All-reduces of products become fused matmul-all-reduces, all others the native all-reduce.

An all-reduce arranges its result like its input. So the fused op replaces the matmul, and users of
the all-reduce take the all-reduce's input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from symm_cp.inductor.decisions import Decision, record
from symm_cp.inductor.matmuls import SCALED, bias_of, left, scaled_options
from symm_cp.inductor.neighbours import fed_by
from symm_cp.inductor.nodes import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    WAIT,
    aten,
    device_of,
    group_of,
    is_dynamic,
    is_item,
    static_shape,
    value,
)
from symm_cp.inductor.options import Options
from symm_cp.inductor.origins import VIEWS, Tracer
from symm_cp.inductor.rewrite import Emitter, explains_dynamic_shapes, replace_collective
from symm_cp.inductor.sums import (
    ADD,
    SUMS_OF_MATMULS,
    operands_of,
    reduced_products,
    sum_of_biases,
    terms_of,
)
from symm_cp.ops.common import check_reduce_op

_NATIVE = "_all_reduce"
#: Fewer rows, as in decoding, are not worth sharding.
_FEW_ROWS = 64
_SEQUENCE_PARALLEL = (
    "with sequence parallelism a reduce-scatter would move half of the bytes here, an all-gather "
    "before the next matmul the other half, and each rank would hold and compute 1/W of the "
    "tensors between them"
)
_BIAS = "every rank adds its bias: add it after the all-reduce if it should count once"


def replace_all_reduces(graph: Graph, options: Options) -> None:
    """Fuses or replaces all-reduces of CPU tensors, and records a decision for each all-reduce."""
    # Names for the report, of all-reduces that the next two functions insert.
    names: dict[Node, str] = {}
    if options.async_tp or options.all_reduce:
        _take_apart(graph, names)
    if options.async_tp:
        _merge(graph, names)
    tracer = Tracer(graph, SUMS_OF_MATMULS)
    for node in graph.find_nodes(op="call_function", target=ALL_REDUCE):
        name, group = names.get(node, node.name), group_of(node)
        terms, reason, critical = reduced_products(tracer, node, options)
        if terms and not options.async_tp:
            reason = "async_tp is off"
        elif terms and device_of(node) != "cpu":
            reason = "matmul-all-reduces are fused on CPU only"
        if terms and not reason:
            into, hint = _fused_op(terms), _advice(node, terms)
            text = " + ".join(term.name for term in terms)
            reason = _fuse(graph, tracer, node, terms)
            if not reason:
                record(Decision(name, group, into, text, critical, advice=hint))
                continue
        critical = critical or bool(fed_by(node))
        not_native = _why_not_native(node, options)
        if not not_native:
            native = Emitter(graph, node).call(_op(_NATIVE), *node.args)
            replace_collective(graph, node, native)
        text = "; ".join(dict.fromkeys(filter(None, (reason, not_native))))
        runs_as = None if not_native else _NATIVE
        record(Decision(name, group, None, text, critical, runs_as))


def _fused_op(terms: list[Node]) -> str:
    if terms[0].target is SCALED:
        return "fused_scaled_matmul_all_reduce"
    alone = len(terms) == 1 and bias_of(terms[0]) is None
    return "fused_matmul_all_reduce" if alone else "_fused_matmuls_all_reduce"


def _advice(node: Node, terms: list[Node]) -> str:
    """Returns advice on a fused all-reduce of products; empty if there is none."""
    biases = [bias for term in terms if (bias := bias_of(term)) is not None]
    # DTensor divides its bias by W, so that bias is computed: no placeholder.
    if node.args[1] == "sum" and any(bias.op == "placeholder" for bias in biases):
        return _BIAS
    rows = math.prod((static_shape(node) or ())[:-1])
    return "" if is_dynamic(rows) or rows < _FEW_ROWS else _SEQUENCE_PARALLEL


@explains_dynamic_shapes
def _fuse(graph: Graph, tracer: Tracer, node: Node, terms: list[Node]) -> str:
    """Replaces a sum of products and its all-reduce; returns why it could not, or an empty text."""
    total = tracer.arrangement(node.args[0]).source  # type: ignore[arg-type]
    first, reduction = terms[0], node.args[1:]
    emitter, name = Emitter(graph, total), _fused_op(terms)
    lefts, rights = operands_of(emitter, terms, (static_shape(first) or ())[:-1])
    args: tuple[Any, ...]
    if name == "_fused_matmuls_all_reduce":
        # Every rank adds its own biases before the sum over the ranks: they are terms of it.
        biases = _expanded(emitter, sum_of_biases(emitter, terms), first)
        args = lefts, rights, biases, None, *reduction
    elif first.target is SCALED:
        args = *first.args[:4], *reduction, *scaled_options(first)
    else:
        args = lefts[0], rights[0], None, *reduction
    fused = emitter.call(_op(name), *args)
    total.replace_all_uses_with(_viewed(emitter, tracer, fused, first, total))
    tracer.forget(total)
    replace_collective(graph, node, _dense(graph, node))
    return ""


def _expanded(emitter: Emitter, biases: Node | None, product: Node) -> Node | None:
    """Returns the sum of biases in the shape of a product."""
    if biases is None:
        return None
    shape: list[Any] = list(static_shape(product) or ())
    for dim, size in enumerate(shape):
        if is_dynamic(size):
            shape[dim] = emitter.call(aten.sym_size.int, left(product), dim)
    return emitter.call(aten.expand.default, biases, shape)


def _viewed(emitter: Emitter, tracer: Tracer, fused: Node, product: Node, total: Node) -> Node:
    """Returns the fused sum in the shape of `total`, whose terms are views of products."""
    shape = static_shape(total) or ()
    if static_shape(fused) == shape:
        return fused
    for node in tracer.of(product):
        if node.target in VIEWS and node.args[0] is product and static_shape(node) == shape:
            return emitter.call(node.target, fused, *node.args[1:])  # allows unknown sizes
    return emitter.reshape(fused, shape)


def _dense(graph: Graph, node: Node) -> Any:
    """Returns the input of an all-reduce with the strides of its result."""
    tensor, result = value(node.args[0]), value(node)
    if tensor is None or result is None or tensor.stride() == result.stride():
        return node.args[0]
    emitter = Emitter(graph, node)
    return emitter.call(aten.clone.default, node.args[0], memory_format=torch.contiguous_format)


def _why_not_native(node: Node, options: Options) -> str:
    """Returns why an all-reduce that is not fused stays as it is, or an empty text."""
    _, reduce_op, group = node.args
    tensor = value(node)
    if not options.all_reduce:
        return "all_reduce is off"
    if tensor is None or tensor.device.type != "cpu":
        return f"it is on {device_of(node)}"
    if reduce_op not in ("sum", "avg"):
        return f"it reduces by {reduce_op}"
    if not isinstance(group, str):
        return "its group has no name"
    if _torch_buckets():
        return "it is left to torch's passes, which bucket all-reduces"
    try:
        check_reduce_op("all_reduce", "input", tensor.dtype, str(reduce_op))
    except TypeError as error:
        return str(error)
    return ""


def _torch_buckets() -> bool:
    """Tells whether torch's own passes put small all-reduces together."""
    overlap = getattr(inductor_config, "aten_distributed_optimizations", None)
    return (
        bool(getattr(inductor_config, "_fuse_ddp_communication", False))
        or getattr(inductor_config, "bucket_all_reduces_fx", "none") != "none"
        or bool(getattr(overlap, "collective_bucketing", False))
    )


def _op(name: str) -> Any:
    return getattr(torch.ops.symm_mem, name).default


def _take_apart(graph: Graph, names: dict[Node, str]) -> None:
    """Replaces coalesced all-reduces of CPU tensors by all-reduces of one tensor each."""
    for node in graph.find_nodes(op="call_function", target=ALL_REDUCE_COALESCED):
        inputs: Any = node.args[0]
        items = [user for user in node.users if is_item(user)]
        if len(items) < len(node.users) or any(device_of(tensor) != "cpu" for tensor in inputs):
            continue
        emitter = Emitter(graph, node)
        apart = [emitter.call(ALL_REDUCE, tensor, *node.args[1:]) for tensor in inputs]
        names |= {part: f"{node.name}[{index}]" for index, part in enumerate(apart)}
        for item in items:
            item.replace_all_uses_with(apart[item.args[1]])  # type: ignore[index]
            graph.erase_node(item)
        graph.erase_node(node)


def _merge(graph: Graph, names: dict[Node, str]) -> None:
    """Replaces sums of all-reduces by all-reduces of sums.

    Each column-parallel layer all-reduces the gradient of its input, and layers that share their
    input add up these gradients.
    """
    tracer = Tracer(graph, {WAIT, ADD})
    for total in reversed(graph.find_nodes(op="call_function", target=ADD)):
        if (waits := terms_of(tracer, total, _is_reduced)) is None:
            continue
        reductions: list[Any] = [wait.args[0] for wait in waits]
        if len({node.args[1:] for node in reductions}) > 1:
            continue
        for wait, node in zip(waits, reductions, strict=True):
            tracer.forget(wait)
            replace_collective(graph, node, _dense(graph, node))
        emitter = Emitter(graph, total.next)
        reduced = emitter.call(ALL_REDUCE, total, *reductions[0].args[1:])
        waited = emitter.call(WAIT, reduced)
        total.replace_all_uses_with(
            waited, delete_user_cb=lambda user, own=reduced: user is not own
        )
        names[reduced] = ", ".join(names.get(node, node.name) for node in reductions)


def _is_reduced(wait: Node) -> bool:
    """Tells whether a node waits for an all-reduce of a CPU tensor, which nothing else uses."""
    node = wait.args[0] if wait.target is WAIT else None
    return (
        isinstance(node, Node)
        and node.target is ALL_REDUCE
        and len(node.users) == 1
        and node.args[1] in ("sum", "avg")
        and device_of(node) == "cpu"
    )
