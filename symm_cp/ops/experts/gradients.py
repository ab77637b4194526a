"""Gradients of `dispatch_matmul` and `matmul_combine`, one op each: see fused.py for the formulas.

All ranks multiply and send the arriving rows, whether or not they need them: the peers may.
"""

from __future__ import annotations

import torch

from symm_cp.ops.common import group_of, name_of, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.experts import op as unfused
from symm_cp.ops.experts.products import Products, check_matrix, check_products, weigh
from symm_cp.ops.matmul.derivatives import is_transposed
from symm_cp.ops.op import ONE_BY_ONE, NoGradient, Op, arguments, declare, untouched
from symm_cp.runtime import exchange
from symm_cp.tensors.dtypes import wide

OF_DISPATCH = "_fused_dispatch_grouped_matmul_backward"
OF_COMBINE = "_fused_grouped_matmul_combine_backward"

_Dispatch = tuple[torch.Tensor, list[torch.Tensor]]
_Combine = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]
#: The gradients of products that the program uses, and their weights.
_Used = tuple[list[torch.Tensor], list[torch.Tensor]]


# --- checks ----------------------------------------------------------------------------------


def _check_dispatch(
    some_grads: list[torch.Tensor], sent: torch.Tensor, weights: list[torch.Tensor], local: int
) -> _Used:
    check_matrix(OF_DISPATCH, "sent", sent)
    grad_sent, *grads = some_grads
    if len(grads) != len(weights):
        raise ValueError(
            f"{OF_DISPATCH}: got {len(grads)} gradients of products and {len(weights)} weights"
        )
    pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g.dtype != torch.bool]
    used = [grad for grad, _ in pairs], [weight.mT for _, weight in pairs]
    if pairs:
        check_products(OF_DISPATCH, *used, local)
    for grad in used[0]:
        if grad.shape[0] != sent.shape[0]:
            raise ValueError(
                f"{OF_DISPATCH}: sent {list(sent.shape)} and gradients {list(grad.shape)} of "
                "products must have equal numbers of rows"
            )
    if grad_sent.dtype != torch.bool and grad_sent.shape != sent.shape:
        raise ValueError(
            f"{OF_DISPATCH}: the gradient {list(grad_sent.shape)} of sent must be "
            f"{list(sent.shape)}"
        )
    return used


def _check_combine(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    pairs: int,
    top_k: int,
    local: int,
) -> None:
    check_products(OF_COMBINE, rows, weights, local)
    unfused.check_combine(rows[0], factors, pairs, top_k, OF_COMBINE)
    check_matrix(OF_COMBINE, "grad", grad)
    wanted = (pairs // top_k, weights[0].shape[2])
    if grad.shape != wanted:
        raise ValueError(
            f"{OF_COMBINE}: grad {list(grad.shape)} must be {list(wanted)}, as the forward pass "
            "returned"
        )
    if grad.dtype != rows[0].dtype:
        raise TypeError(
            f"{OF_COMBINE}: grad is {grad.dtype}, must be {rows[0].dtype} as the rows are"
        )


# --- kernels ---------------------------------------------------------------------------------


def _dispatch_kernel(
    some_grads: list[torch.Tensor],
    sent: torch.Tensor,
    weights: list[torch.Tensor],
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    need_tokens: bool,
    need_weights: bool,
) -> _Dispatch:
    group = group_of(group_name)
    local = unfused.experts_of_rank(OF_DISPATCH, num_experts, group.world_size)
    used = _check_dispatch(some_grads, sent, weights, local)
    products = Products(table, num_experts, group)
    name = name_of(OF_DISPATCH, sent.dtype, sent.shape[1:], "")
    grad_sent, *grads = some_grads

    def total() -> torch.Tensor:
        # The peers may still have gradients of products.
        total = products.total(*used) if used[0] else torch.zeros_like(sent)
        return total if grad_sent.dtype == torch.bool else total.add_(grad_sent)

    def of_weights() -> list[torch.Tensor]:
        return [
            sent.new_empty((0,), dtype=torch.bool)
            if grad.dtype == torch.bool
            else products.weight_grad(sent, grad, weight)
            for grad, weight in zip(grads, weights, strict=True)
        ]

    of_tokens = sent.new_empty((0, sent.shape[1]))
    if need_tokens:
        of_rows = exchange.traced(group, "produce", name, total)
        of_tokens = direct(unfused.COMBINE)(of_rows, None, table, top_k, num_experts, group_name)
    return of_tokens, exchange.traced(group, "consume", name, of_weights) if need_weights else []


def _combine_kernel(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    need_weights: bool,
) -> _Combine:
    group = group_of(group_name)
    local = unfused.experts_of_rank(OF_COMBINE, num_experts, group.world_size)
    pairs = unfused.pairs_of(OF_COMBINE, table, num_experts, group_name)
    _check_combine(grad, rows, weights, factors, pairs, top_k, local)
    products = Products(table, num_experts, group)
    name = name_of(OF_COMBINE, grad.dtype, grad.shape[1:], "")

    def dispatched(tensor: torch.Tensor, top_k: int) -> torch.Tensor:
        sent: torch.Tensor = direct(unfused.DISPATCH)(
            tensor, table, unfused.ANY_ROWS, top_k, num_experts, group_name
        )
        return sent

    def of_weights() -> list[torch.Tensor]:
        needed = zip(rows, weights, strict=True) if need_weights else ()
        return [products.weight_grad(each, grad_rows, weight) for each, weight in needed]

    grad_rows = dispatched(grad, top_k)
    if factors is None:
        of_rows = exchange.traced(
            group, "consume", name, lambda: [products.of(grad_rows, w.mT) for w in weights]
        )
        of_matrices = exchange.traced(group, "consume", name, of_weights)
        return of_rows, of_matrices, grad.new_empty((0,))
    # Views of tensors whose sizes vary would not be planned.
    factor = dispatched(torch.view_copy(factors.to(wide(grad.dtype)), (-1, 1)), 1)

    def weighed() -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        of_rows = [products.of(grad_rows, weight.mT) for weight in weights]
        dots = weigh(of_rows, rows, factor)
        if need_weights:
            grad_rows.mul_(factor)
        return of_rows, dots, of_weights()

    of_rows, dots, of_matrices = exchange.traced(group, "produce", name, weighed)
    back = direct(unfused.COMBINE)(dots, None, table, 1, num_experts, group_name)
    return of_rows, of_matrices, torch.view_copy(back, (-1, top_k)).to(factors.dtype)


# --- fake kernels ----------------------------------------------------------------------------


def _like_weight(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns an empty gradient of a weight, with the layout of the real one."""
    experts, left, right = weight.shape
    if is_transposed(weight):
        return rows.new_empty((experts, right, left)).mT
    return rows.new_empty((experts, left, right))


def _dispatch_fake(
    some_grads: list[torch.Tensor],
    sent: torch.Tensor,
    weights: list[torch.Tensor],
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    need_tokens: bool,
    need_weights: bool,
) -> _Dispatch:
    local = unfused.experts_of_rank(OF_DISPATCH, num_experts, world_size_of(group_name))
    _check_dispatch(some_grads, sent, weights, local)
    pairs = unfused.pairs_of(OF_DISPATCH, table, num_experts, group_name)
    grad_tokens = sent.new_empty((pairs // top_k if need_tokens else 0, sent.shape[1]))
    return grad_tokens, [
        sent.new_empty((0,), dtype=torch.bool)
        if grad.dtype == torch.bool
        else _like_weight(sent, weight)
        for grad, weight in zip(some_grads[1:], weights, strict=True)
        if need_weights
    ]


def _combine_fake(
    grad: torch.Tensor,
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
    need_weights: bool,
) -> _Combine:
    local = unfused.experts_of_rank(OF_COMBINE, num_experts, world_size_of(group_name))
    pairs = unfused.pairs_of(OF_COMBINE, table, num_experts, group_name)
    _check_combine(grad, rows, weights, factors, pairs, top_k, local)
    products = [
        grad.new_empty((x.shape[0], w.shape[1])) for x, w in zip(rows, weights, strict=True)
    ]
    of_factors = grad.new_empty((0,)) if factors is None else factors.new_empty(factors.shape)
    return products, [_like_weight(grad, weight) for weight in weights if need_weights], of_factors


# --- declarations ----------------------------------------------------------------------------

_ONCE = NoGradient("second derivatives of grouped matmuls are not supported")

declare(
    Op(
        name=OF_DISPATCH,
        types=lambda t, **_: t.varying("sent", "_->_", "sent", "all_to_all_single"),
        schema=(
            "(Tensor[] some_grads, Tensor sent, Tensor[] weights, Tensor table, int top_k, "
            "int num_experts, str group_name, bool need_tokens, bool need_weights)"
            " -> (Tensor tokens, Tensor[] weights)"
        ),
        kernel=_dispatch_kernel,
        fake=_dispatch_fake,
        gradient=_ONCE,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(2 * on.world_size, columns) for columns in (3, 4, 2)],
            on.rand(2 * on.world_size, 3),
            [on.rand(1, 3, 4), on.rand(1, 2, 3).mT],
            unfused.example_table(on),
            1,
            on.world_size,
            on.group_name,
            True,
            True,
        ),
        free={"some_grads": 0, "sent": 0, "table": 0},
        internal=True,
    ),
    Op(
        name=OF_COMBINE,
        types=lambda t, **_: t.varying("grad", "_->_", "grad", "all_to_all_single"),
        schema=(
            "(Tensor grad, Tensor[] rows, Tensor[] weights, Tensor? factors, Tensor table, "
            "int top_k, int num_experts, str group_name, bool need_weights)"
            " -> (Tensor[] rows, Tensor[] weights, Tensor factors)"
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
        free={"grad": 0, "rows": 0, "factors": 0, "table": 0},
        internal=True,
    ),
)
