"""The matmuls of a graph: their operands, and which of them fused ops can replace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from symm_cp.inductor.nodes import argument, aten, static_shape, value
from symm_cp.inductor.options import Options

SCALED = aten._scaled_mm.default
#: Matmuls of matrices, with or without a bias.
PLAIN = {aten.mm.default, aten.addmm.default}
#: Matmuls; a `bmm` counts if its right operand is one matrix for all batches.
MATMULS = PLAIN | {SCALED, aten.bmm.default}

#: Ops that repeat a matrix for each batch of a `bmm`.
_REPEATS = {
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.clone.default,
}


def left(matmul: Node) -> Node:
    """Returns the left operand of a matmul."""
    return matmul.args[matmul.target is aten.addmm.default]  # type: ignore[return-value]


def right(matmul: Node) -> Node | None:
    """Returns the right operand of a matmul, a matrix; None for a `bmm` with several."""
    operand: Any = matmul.args[1 + (matmul.target is aten.addmm.default)]
    if matmul.target is not aten.bmm.default:
        return operand
    batched_shape = static_shape(operand)
    while isinstance(operand, Node) and operand.target in _REPEATS:
        operand = operand.args[0]
        if batched_shape is not None and static_shape(operand) == batched_shape[1:]:
            return operand
    return None


def bias_of(matmul: Node) -> Node | None:
    """Returns the addend of an `addmm`; None for other matmuls."""
    return matmul.args[0] if matmul.target is aten.addmm.default else None  # type: ignore[return-value]


def inner(matmul: Node) -> int:
    """Returns the length of the dimension that a matmul sums over."""
    return (static_shape(left(matmul)) or (0,))[-1]


def scaled_options(matmul: Node) -> tuple[Any, Any, Any, bool]:
    """Returns bias, scale of the result, its dtype, and whether fast accumulation is allowed."""
    names = ("bias", "scale_result", "out_dtype")
    bias, scale, dtype = (argument(matmul, name) for name in names)
    return bias, scale, dtype, bool(argument(matmul, "use_fast_accum"))


def other_operands(matmul: Node) -> list[Node]:
    """Returns the nodes that a matmul needs besides its left operand."""
    place = 1 if matmul.target is aten.addmm.default else 0
    others = list(matmul.args)
    others[place : place + 2] = [right(matmul)]
    return [node for node in (*others, *matmul.kwargs.values()) if isinstance(node, Node)]


def flops(matmul: Node) -> float:
    """Returns the floating-point operations of a matmul; infinity where sizes are unknown."""
    left_shape, product = static_shape(left(matmul)), value(matmul)
    if left_shape is None or product is None:
        return math.inf
    return 2.0 * math.prod(left_shape) * product.shape[-1]


def why_unsupported(matmul: Node) -> str:
    """Returns why no fused op can replace a matmul, or an empty text."""
    operand = value(left(matmul))
    if right(matmul) is None:
        return "it multiplies each batch by a matrix of its own"
    if operand is None or not operand.is_floating_point():
        return "its input is not of a floating-point dtype"
    if matmul.target is aten.addmm.default and any(
        matmul.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")
    ):
        return "addmm scales its terms"
    if matmul.target is SCALED and not _scales_rows(matmul):
        return "its scales are neither tensor-wise nor row-wise"
    return ""


def _scales_rows(matmul: Node) -> bool:
    """Tells whether a scaled matmul has one scale, or one for each row and column."""
    scales, product = matmul.args[2:4], static_shape(matmul)
    shapes = [static_shape(scale) for scale in scales]
    if product is None or any(getattr(value(s), "dtype", None) != torch.float32 for s in scales):
        return False  # scales of blocks, in 8 bits
    return all(
        shape is not None and (math.prod(shape) == 1 or shape == whole)
        for shape, whole in zip(shapes, ((product[0], 1), (1, product[1])), strict=True)
    )


def why_too_small(matmuls: list[Node], options: Options) -> str:
    """Returns why matmuls that would be fused together are left alone, or an empty text."""
    product = value(matmuls[0])
    if product is None:
        return ""
    return options.too_small(product.device, sum(map(flops, matmuls)))
