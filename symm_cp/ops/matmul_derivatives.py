"""Gradients of the matmul ops, and of the ops that compute those, to any order.

G gathers shards along a dimension and R reduce-scatters; each is the other's gradient. For a
gradient H of an output:

    op                                     computes                 its gradients
    fused_all_gather_matmul                G(A), G(A) B             R(H B^H + H_A);  G(A)^H H
    fused_matmul_reduce_scatter            R(A B)                   G(H) B^H;  A^H G(H)
    _fused_matmuls_reduce_scatter          R(sum of A_i B_i + C)    G(H) B_i^H;  A_i^H G(H);  G(H)
    _fused_all_gather_weight_grad          G(A)^H g                 R(g H^H);  G(A) H
    _fused_matmul_reduce_scatter_backward  G(g) B^H;  A^H G(g)      R(H_A B + A H_B);
                                                                    G(g) H_B^H;  H_A^H G(g)

Each gradient is computed by one of these ops or by a plain matmul, so each backward pass can be
differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.ops.common import world_size_of
from symm_cp.ops.transforms import register_gradient

_ops = torch.ops.symm_mem


def _left_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^H @ right, over all leading dimensions."""
    return left.flatten(0, -2).mH @ right.flatten(0, -2)


# --- fused_all_gather_matmul -----------------------------------------------------------------


def _gather_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    A, Bs, gather_dim, ctx.group_name = inputs
    ctx.dim = gather_dim % A.dim()
    ctx.set_materialize_grads(False)  # an unused output costs nothing
    ctx.save_for_backward(A, *Bs)


def _gather_backward(
    ctx: Any, grad_A: torch.Tensor | None, grads: list[torch.Tensor | None]
) -> tuple[Any, ...]:
    A, *Bs = ctx.saved_tensors
    pairs = [(g, B) for g, B in zip(grads, Bs, strict=True) if g is not None]
    used = [g for g, _ in pairs]
    A_grad, B_grads = None, [None] * len(Bs)
    if ctx.needs_input_grad[0]:
        weights = [B.mH for _, B in pairs]
        A_grad = _ops._fused_matmuls_reduce_scatter(
            used, weights, grad_A, "sum", ctx.dim, ctx.group_name
        )
    if used and any(ctx.needs_input_grad[1]):
        found = iter(_ops._fused_all_gather_weight_grad(A, used, ctx.dim, ctx.group_name))
        B_grads = [next(found) if g is not None else None for g in grads]
    return A_grad, B_grads, None, None


# --- fused_matmul_reduce_scatter -------------------------------------------------------------


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, ctx.reduce_op, scatter_dim, ctx.group_name = inputs
    ctx.dim = scatter_dim % A.dim()
    ctx.save_for_backward(A, B)


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    A_grad, B_grad = _ops._fused_matmul_reduce_scatter_backward(
        grad, A, B, ctx.reduce_op, ctx.dim, ctx.group_name, need_a, need_b
    )
    return A_grad if need_a else None, B_grad if need_b else None, None, None, None


# --- _fused_matmuls_reduce_scatter -----------------------------------------------------------


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    As, Bs, addend, ctx.reduce_op, scatter_dim, ctx.group_name = inputs
    ctx.count = len(As)
    ctx.dim = scatter_dim % (As[0] if As else addend).dim()
    ctx.save_for_backward(*As, *Bs)


def _sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    As, Bs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    gathered, A_grads = _ops.fused_all_gather_matmul(
        _share(grad, ctx), [B.mH for B in Bs], ctx.dim, ctx.group_name
    )
    B_grads = [_left_transposed(A, gathered) for A in As]
    addend_grad = gathered if ctx.needs_input_grad[2] else None
    return list(A_grads), B_grads, addend_grad, None, None, None


def _share(grad: torch.Tensor, ctx: Any) -> torch.Tensor:
    """The gradient of one rank's part: of an average it is that much smaller."""
    return grad / world_size_of(ctx.group_name) if ctx.reduce_op == "avg" else grad


# --- _fused_all_gather_weight_grad -----------------------------------------------------------


def _weight_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, grads, ctx.dim, ctx.group_name = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(A, *grads)


def _weight_backward(ctx: Any, outer: list[torch.Tensor | None]) -> tuple[Any, ...]:
    A, *grads = ctx.saved_tensors
    pairs = [(g, h) for g, h in zip(grads, outer, strict=True) if h is not None]
    used = [h for _, h in pairs]
    A_grad, found = None, [None] * len(grads)
    if not pairs:
        return None, found, None, None
    if ctx.needs_input_grad[0]:
        A_grad = _ops._fused_matmuls_reduce_scatter(
            [g for g, _ in pairs], [h.mH for h in used], None, "sum", ctx.dim, ctx.group_name
        )
    if any(ctx.needs_input_grad[1]):
        _, products = _ops.fused_all_gather_matmul(A, used, ctx.dim, ctx.group_name, return_A=False)
        products = iter(products)
        found = [next(products) if h is not None else None for h in outer]
    return A_grad, found, None, None


# --- _fused_matmul_reduce_scatter_backward ---------------------------------------------------


def _scatter_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, A, B, ctx.reduce_op, ctx.dim, ctx.group_name, ctx.need_a, ctx.need_b = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad, A, B)


def _scatter_backward_backward(
    ctx: Any, outer_a: torch.Tensor | None, outer_b: torch.Tensor | None
) -> tuple[Any, ...]:
    grad, A, B = ctx.saved_tensors
    # A gradient that was not needed is an empty tensor.
    outer_a, outer_b = outer_a if ctx.need_a else None, outer_b if ctx.need_b else None
    grad_grad = A_grad = B_grad = None
    if ctx.needs_input_grad[0]:
        pairs = [(outer_a, B)] * (outer_a is not None) + [(A, outer_b)] * (outer_b is not None)
        if pairs:
            grad_grad = _ops._fused_matmuls_reduce_scatter(
                [a for a, _ in pairs], [b for _, b in pairs], None, ctx.reduce_op, ctx.dim,
                ctx.group_name,
            )  # fmt: skip
    for_a = outer_b is not None and ctx.needs_input_grad[1]
    for_b = outer_a is not None and ctx.needs_input_grad[2]
    if for_a or for_b:
        weights = [outer_b.mH] if for_a and outer_b is not None else []
        gathered, products = _ops.fused_all_gather_matmul(
            _share(grad, ctx), weights, ctx.dim, ctx.group_name, return_A=for_b
        )
        A_grad = products[0] if for_a else None
        if for_b and outer_a is not None:
            B_grad = _left_transposed(outer_a, gathered)
    return grad_grad, A_grad, B_grad, None, None, None, None, None


def register() -> None:
    """Registers the gradients."""
    register_gradient("fused_all_gather_matmul", _gather_backward, _gather_setup)
    register_gradient("fused_matmul_reduce_scatter", _scatter_backward, _scatter_setup)
    register_gradient("_fused_matmuls_reduce_scatter", _sum_backward, _sum_setup)
    register_gradient("_fused_all_gather_weight_grad", _weight_backward, _weight_setup)
    register_gradient(
        "_fused_matmul_reduce_scatter_backward",
        _scatter_backward_backward,
        _scatter_backward_setup,
    )
