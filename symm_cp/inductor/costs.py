"""Predicted costs of the nodes of a graph: seconds of kernels and of transfers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from symm_cp.inductor.nodes import argument, group_of, is_item, value
from symm_cp.schedule.machine import TYPICAL_CPU, Machine
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    CONSUME_AND_REDUCE_SCATTER,
    PRODUCE_AND_ALL_REDUCE,
    PRODUCE_AND_REDUCE_SCATTER,
    Pattern,
)
from symm_cp.schedule.steps import Compute
from symm_cp.schedule.work import Work
from symm_cp.tensors.dtypes import dtype_name

#: By kind of collective: the bytes that a rank receives, from its input's bytes and the group size.
_RECEIVED = {
    "all_gather": lambda nbytes, ranks: (ranks - 1) * nbytes,
    "all_reduce": lambda nbytes, ranks: 2 * (ranks - 1) / ranks * nbytes,
}

#: Patterns of fused ops, by a part of the op's name; the first match counts.
_PATTERNS: dict[str, Pattern] = {
    "attention_backward": CONSUME_AND_REDUCE_SCATTER,
    "all_gather": ALL_GATHER_AND_CONSUME,
    "reduce_scatter": PRODUCE_AND_REDUCE_SCATTER,
    "all_reduce": PRODUCE_AND_ALL_REDUCE,
}

#: Kernels of the backward pass of attention compute five products where the forward pass has two.
_BACKWARD = 2.5


@cache
def machine(ranks: int) -> Machine:
    """Returns a typical machine."""
    return TYPICAL_CPU


def received(collective: str, nbytes: int, ranks: int) -> float:
    """Returns the bytes that a rank receives in a collective, where its input has `nbytes`."""
    kind = next((kind for kind in _RECEIVED if kind in collective), None)
    return _RECEIVED[kind](nbytes, ranks) if kind else (ranks - 1) / ranks * nbytes


def transfer_us(received_bytes: float, ranks: int) -> float:
    """Predicts how long a rank takes to receive `received_bytes`, in microseconds."""
    if ranks == 1:
        return 0.0
    on = machine(ranks)
    return (on.transfer(received_bytes) + on.signal_seconds) * 1e6


def ranks_of(node: Node) -> int:
    """Returns the size of the group of a collective."""
    group = group_of(node)
    try:
        return int(_resolve_process_group(group).size())  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        ranks = argument(node, "ranks", "group_size")
        return ranks if isinstance(ranks, int) else len(ranks or "1")


def size_of(tensor: torch.Tensor | None) -> int:
    """Returns the bytes of a tensor; 0 for None, and for sizes unknown at compile time."""
    nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
    return nbytes if isinstance(nbytes, int) else 0


def given_bytes(node: Node) -> int:
    """Returns the bytes of all tensors that a node takes."""
    return sum(size_of(value(each)) for each in node.all_input_nodes)


def computing_us(node: Node, on: Machine) -> float:
    """Returns the microseconds of a kernel of torch; 0 for a view.

    Ops without an operation count cost one write of their result: Inductor fuses them with others,
    in one pass over memory.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    results = [each for each in tree_leaves(node.meta.get("val")) if _is_static(each)]
    if is_item(node) or not results or getattr(node.target, "is_view", False):
        return 0.0
    if packet in flop_registry:
        flops = _counted(flop_registry[packet], node, results)
        if flops:
            name = str(packet)
            dtype = dtype_name(results[0].dtype)
            if "attention" in name:
                return on.attention(flops, dtype) * 1e6
            return on.matmul(flops, dtype, size_of(_right_operand(node))) * 1e6
    if "scaled_dot_product" in str(packet):  # torch counts no operations of its CPU kernels
        tensors = [t for t in map(value, node.all_input_nodes) if t is not None and t.dim() == 4]
        return _attention_us(tensors, on, 1, backward="backward" in str(packet))
    return sum(size_of(each) for each in results) / on.memory_rate * 1e6


def work_of(node: Node, ranks: int, on: Machine) -> Work | None:
    """Returns the work of a fused op, whose schedule sets its waits; None without one or a cost."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    pattern = next((pattern for part, pattern in _PATTERNS.items() if part in name), None)
    compute_us = fused_us(node, ranks, on)
    if pattern is None or not compute_us:
        return None
    results = [each for each in tree_leaves(node.meta.get("val")) if _is_static(each)]
    device = results[0].device.type if results else "cpu"
    variant = pattern.staged() if device == "cuda" else pattern.direct()
    lanes = variant.schedules(ranks)[0].lanes.values()
    kernels = sum(isinstance(s, Compute) and s.kernel not in ("reduce", "add")
                  for lane in lanes for s in lane)  # fmt: skip
    gathered = argument(node, "A", "A_shard", "key")
    shard = size_of(value(gathered)) * (2 if "attention" in name else 1)
    return Work(
        name.removeprefix("fused_"),
        variant,
        lambda _: compute_us * 1e-6 / max(1, kernels),
        shard=shard if "all_gather" in name else 0.0,
        partial=float(size_of(results[0])) if "attention" not in name and results else 2.0 * shard,
    )


def fused_us(node: Node, ranks: int, on: Machine) -> float:
    """Returns the microseconds of the kernels of a fused op, over all gathered shards."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    if "attention" in name:
        tensors = [value(argument(node, each)) for each in ("query", "key")]
        known = [each for each in tensors if each is not None]
        return _attention_us(known, on, ranks, backward="backward" in name)
    lefts = _tensors(argument(node, "A", "As", "A_shard", "x", "tensors"))
    rights = _tensors(argument(node, "B", "Bs", "weights", "grads"))
    if not lefts or not rights:
        return 0.0
    rows = ranks if "all_gather" in name else 1
    pairs = zip(lefts * (len(rights) if len(lefts) == 1 else 1), rights, strict=False)
    return sum(_product_us(left, right, rows, on) for left, right in pairs)


def _product_us(left: torch.Tensor, right: torch.Tensor, parts: int, on: Machine) -> float:
    columns, inner = right.shape[-1], left.shape[-1]
    rows = math.prod(left.shape[:-1]) * parts
    if not all(isinstance(each, int) for each in (columns, inner, rows)):
        return 0.0
    dtype = dtype_name(left.dtype)
    return on.product(rows, inner, columns, dtype, left.element_size()) * 1e6


def _attention_us(tensors: list[torch.Tensor], on: Machine, ranks: int, *, backward: bool) -> float:
    """Predicts attention of queries to the keys of all ranks, as if there were no mask."""
    if len(tensors) < 2 or not all(_is_static(each) for each in tensors[:2]):
        return 0.0
    query, key = tensors[:2]
    flops = 4.0 * query.numel() * key.shape[-2] * ranks * (_BACKWARD if backward else 1)
    return on.attention(flops, dtype_name(query.dtype)) * 1e6


def _counted(count: Any, node: Node, results: list[torch.Tensor]) -> float:
    def known(each: Any) -> Any:
        return each.meta.get("val") if isinstance(each, Node) else each

    given = tree_leaves([each.meta.get("val") for each in node.all_input_nodes])
    if not all(_is_static(each) for each in given):
        return 0.0  # counting with a symbol would fix its value in the graph
    args = [known(each) for each in node.args]
    out = results[0] if len(results) == 1 else tuple(results)
    try:
        return float(count(*args, **{k: known(v) for k, v in node.kwargs.items()}, out_val=out))
    except (TypeError, ValueError, AssertionError):
        return 0.0


def _right_operand(node: Node) -> torch.Tensor | None:
    known = [each for each in map(value, node.args) if each is not None]
    return known[-1] if known else None


def _tensors(given: Any) -> list[torch.Tensor]:
    nodes: Iterable[Any] = given if isinstance(given, list | tuple) else [given]
    return [each for each in map(value, nodes) if each is not None]


def _is_static(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and isinstance(each.numel(), int)
