"""Gradients of `dispatch_matmul` and `matmul_combine`, one op each: see fused.py for the formulas.

All ranks multiply and send the arriving rows, whether or not they need them: the peers may.
"""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.ops.common import group_of, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.experts import op as unfused
from symm_cp.ops.experts.products import check_matrix, check_products, ends_of, multiplied
from symm_cp.ops.experts.table import Table
from symm_cp.ops.matmul import derivatives
from symm_cp.ops.op import ONE_BY_ONE, NoGradient, Op, arguments, declare, untouched
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

_OF_DISPATCH = "_fused_dispatch_grouped_matmul_backward"
_OF_COMBINE = "_fused_grouped_matmul_combine_backward"

_Dispatch = tuple[torch.Tensor, list[torch.Tensor]]
_Combine = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


# --- checks, the same as in csrc/ops/grouped_gradients.cpp -----------------------------------


def _check_dispatch(
    rows: torch.Tensor,
    grads: list[torch.Tensor],
    weights: list[torch.Tensor],
    grad_rows: torch.Tensor | None,
    local: int,
) -> None:
    check_matrix(_OF_DISPATCH, "rows", rows)
    check_products(_OF_DISPATCH, grads, [weight.mT for weight in weights], local)
    if grads[0].shape[0] != rows.shape[0]:
        raise ValueError(
            f"{_OF_DISPATCH}: rows and grads {list(grads[0].shape)} must have {rows.shape[0]} "
            "rows, as the forward pass returned"
        )
    if grad_rows is not None and grad_rows.shape != rows.shape:
        raise ValueError(
            f"{_OF_DISPATCH}: grad_rows {list(grad_rows.shape)} must be {list(rows.shape)}"
        )


def _check_combine(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    pairs: int,
    top_k: int,
    local: int,
) -> None:
    check_products(_OF_COMBINE, rows, weights, local)
    unfused.check_combine(rows[0], factors, pairs, top_k, _OF_COMBINE)
    check_matrix(_OF_COMBINE, "grad", grad)
    wanted = (pairs // top_k, weights[0].shape[2])
    if grad.shape != wanted:
        raise ValueError(
            f"{_OF_COMBINE}: grad {list(grad.shape)} must be {list(wanted)}, as the forward pass "
            "returned"
        )
    if grad.dtype != rows[0].dtype:
        raise TypeError(
            f"{_OF_COMBINE}: grad is {grad.dtype}, must be {rows[0].dtype} as the rows are"
        )


# --- kernels for groups that span hosts and for streams; others: csrc/ops/grouped_gradients.cpp --


def _weight_grad(
    rows: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, ends: list[int]
) -> torch.Tensor:
    """Returns rows^T @ grad for each of this rank's experts, with the weight's layout."""
    transposed = derivatives.is_transposed(weight)
    left, right = (grad, rows) if transposed else (rows, grad)
    out = new_result(rows, (len(ends), left.shape[1], right.shape[1]))
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        torch.mm(left[begin:end].t(), right[begin:end], out=out[expert])
    return out.mT if transposed else out


def _dispatch_kernel(
    rows: torch.Tensor,
    grads: list[torch.Tensor],
    weights: list[torch.Tensor],
    grad_rows: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    of_tokens: bool,
    of_weights: bool,
) -> _Dispatch:
    group = group_of(group_name)
    local = unfused.experts_of_rank(_OF_DISPATCH, num_experts, group.world_size)
    _check_dispatch(rows, grads, weights, grad_rows, local)
    ends = ends_of(Table(_OF_DISPATCH, table, num_experts, group))
    grad_tokens = rows.new_empty((0, rows.shape[1]))
    if of_tokens:
        total = multiplied(grads, [weight.mT for weight in weights], ends, grad_rows)
        grad_tokens = unfused.combine_kernel(total, None, table, top_k, num_experts, group_name)
    needed = zip(grads, weights, strict=True) if of_weights else ()
    return grad_tokens, [_weight_grad(rows, grad, weight, ends) for grad, weight in needed]


def _combine_kernel(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    of_weights: bool,
) -> _Combine:
    group = group_of(group_name)
    local = unfused.experts_of_rank(_OF_COMBINE, num_experts, group.world_size)
    found = Table(_OF_COMBINE, table, num_experts, group)
    _check_combine(grad, rows, weights, factors, found.places.numel(), top_k, local)
    ends = ends_of(found)
    rest = (num_experts, group_name)
    grad_rows = unfused.dispatch_kernel(grad, table, found.rows, top_k, *rest)
    products = [multiplied([grad_rows], [weight.mT], ends) for weight in weights]
    of_factors = grad.new_empty((0,))
    if factors is not None:
        dtype = wide(grad.dtype)
        flat = factors.to(dtype).reshape(-1, 1)
        factor = unfused.dispatch_kernel(flat, table, found.rows, 1, *rest)
        dots = sum(
            (y.to(dtype) * x.to(dtype)).sum(1, keepdim=True)
            for y, x in zip(products, rows, strict=True)
        )
        back = unfused.combine_kernel(dots, None, table, 1, *rest)
        of_factors = back.view_as(factors).to(factors.dtype)
        products = [product.mul_(factor) for product in products]
        grad_rows = grad_rows.mul_(factor)
    needed = zip(rows, weights, strict=True) if of_weights else ()
    of_matrices = [_weight_grad(each, grad_rows, weight, ends) for each, weight in needed]
    return products, of_matrices, of_factors


# --- fake kernels ----------------------------------------------------------------------------


def _like_weight(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns an empty gradient of a weight, with the layout of `_weight_grad`."""
    experts, left, right = weight.shape
    if derivatives.is_transposed(weight):
        return rows.new_empty((experts, right, left)).mT
    return rows.new_empty((experts, left, right))


def _dispatch_fake(
    rows: torch.Tensor,
    grads: list[torch.Tensor],
    weights: list[torch.Tensor],
    grad_rows: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    of_tokens: bool,
    of_weights: bool,
) -> _Dispatch:
    local = unfused.experts_of_rank(_OF_DISPATCH, num_experts, world_size_of(group_name))
    _check_dispatch(rows, grads, weights, grad_rows, local)
    pairs = unfused.pairs_of(_OF_DISPATCH, table, num_experts, group_name)
    grad_tokens = rows.new_empty((pairs // top_k if of_tokens else 0, rows.shape[1]))
    return grad_tokens, [_like_weight(rows, weight) for weight in weights if of_weights]


def _combine_fake(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    of_weights: bool,
) -> _Combine:
    local = unfused.experts_of_rank(_OF_COMBINE, num_experts, world_size_of(group_name))
    pairs = unfused.pairs_of(_OF_COMBINE, table, num_experts, group_name)
    _check_combine(grad, rows, weights, factors, pairs, top_k, local)
    products = [
        grad.new_empty((x.shape[0], w.shape[1])) for x, w in zip(rows, weights, strict=True)
    ]
    of_factors = grad.new_empty((0,)) if factors is None else torch.empty_like(factors)
    return products, [_like_weight(grad, weight) for weight in weights if of_weights], of_factors


# --- backward passes of the two ops ----------------------------------------------------------


def dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the rows that were sent, and the weights."""
    _, weights, table, ctx.rows, *ctx.rest = inputs
    ctx.set_materialize_grads(False)  # an unused output costs nothing
    ctx.save_for_backward(output[0], table, *weights)


def dispatch_backward(
    ctx: Any, grad_rows: torch.Tensor | None, grads: list[torch.Tensor | None]
) -> tuple[Any, ...]:
    """Returns the gradients of tokens and weights from the gradients of rows and products."""
    sent, table, *weights = ctx.saved_tensors
    used = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    of_tokens, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1]) and bool(used)
    if not used:  # the peers may still have gradients
        used = [(sent.new_zeros((ctx.rows, weights[0].shape[2])), weights[0])]
    of_products, multiplied_by = zip(*used, strict=True)
    grad_tokens, computed = direct(_OF_DISPATCH)(
        sent,
        list(of_products),
        list(multiplied_by),
        grad_rows,
        table,
        *ctx.rest,
        of_tokens,
        of_weights,
    )
    by_weight = iter(computed)
    grad_weights = [None if grad is None or not of_weights else next(by_weight) for grad in grads]
    return grad_tokens if of_tokens else None, grad_weights, *(None,) * 5


def combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps all inputs."""
    rows, weights, factors, table, *ctx.rest = inputs
    ctx.count = len(rows)
    ctx.save_for_backward(factors, table, *rows, *weights)


def combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradients of rows and both weights."""
    factors, table, *both = ctx.saved_tensors
    rows, weights = both[: ctx.count], both[ctx.count :]
    of_weights = any(ctx.needs_input_grad[1])
    grad_rows, computed, of_factors = direct(_OF_COMBINE)(
        grad, rows, weights, factors, table, *ctx.rest, of_weights
    )
    grad_weights = computed if of_weights else [None] * len(weights)
    return grad_rows, grad_weights, None if factors is None else of_factors, *(None,) * 4


# --- declarations ----------------------------------------------------------------------------

_ONCE = NoGradient("second derivatives of grouped matmuls are not supported")

declare(
    Op(
        name=_OF_DISPATCH,
        types=lambda t, **_: t.varying("rows", "_->_", "rows", "all_to_all_single"),
        schema=(
            "(Tensor rows, Tensor[] grads, Tensor[] weights, Tensor? grad_rows, Tensor table, "
            "int top_k, int num_experts, str group_name, bool of_tokens, bool of_weights)"
            " -> (Tensor, Tensor[])"
        ),
        kernel=_dispatch_kernel,
        fake=_dispatch_fake,
        gradient=_ONCE,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(2 * on.world_size, 3),
            [on.rand(2 * on.world_size, 4), on.rand(2 * on.world_size, 2)],
            [on.rand(1, 3, 4), on.rand(1, 2, 3).mT],
            on.rand(2 * on.world_size, 3),
            unfused.example_table(on),
            1,
            on.world_size,
            on.group_name,
            True,
            True,
        ),
        native=True,
        internal=True,
    ),
    Op(
        name=_OF_COMBINE,
        types=lambda t, **_: t.varying("grad", "_->_", "grad", "all_to_all_single"),
        schema=(
            "(Tensor grad, Tensor[] rows, Tensor[] weights, Tensor? factors, Tensor table, "
            "int top_k, int num_experts, str group_name, bool of_weights)"
            " -> (Tensor[], Tensor[], Tensor)"
        ),
        kernel=_combine_kernel,
        fake=_combine_fake,
        gradient=_ONCE,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(on.world_size, 3),
            [on.rand(2 * on.world_size, 4), on.rand(2 * on.world_size, 1)],
            [on.rand(1, 4, 3), on.rand(1, 1, 3)],
            on.rand(on.world_size, 2),
            unfused.example_table(on),
            2,
            on.world_size,
            on.group_name,
            True,
        ),
        native=True,
        internal=True,
    ),
)
