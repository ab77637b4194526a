"""Dispatch of tokens fused with the matmul by their experts' weights, and matmul with combine.

Each op is the other's gradient, up to the gradients of weights, which are local. With D, C for
dispatch and combine, w for the weights of the combination and h for a gradient:

    op                                computes                gradients
    fused_dispatch_grouped_matmul     x = D(t);  x B_i        t: C(sum of h_i B_i^T);  B_i: x^T h_i
    fused_grouped_matmul_combine      C(w, sum of x_i B_i)    x_i: w y_i with y_i = D(h) B_i^T;
                                                              B_i: x_i^T (w D(h));
                                                              w: C(sum of x_i . y_i, by rows)

Shapes: T tokens of this rank, N rows of its E / W experts, in their order; weights (E / W, M, N_i).
Source: expert parallelism (GShard, 2020); `torch.nn.functional.grouped_mm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import Weights, group_of, name_of, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point, names_op
from symm_cp.ops.experts import gradients
from symm_cp.ops.experts import op as unfused
from symm_cp.ops.experts.op import Routing
from symm_cp.ops.experts.products import Products, check_matrix, check_products, check_weight
from symm_cp.ops.op import ONE_BY_ONE, BackwardOp, Op, arguments, declare, shows_types
from symm_cp.runtime import exchange

DISPATCH_MATMUL = "fused_dispatch_grouped_matmul"
MATMUL_COMBINE = "fused_grouped_matmul_combine"


# --- kernels ---------------------------------------------------------------------------------


def _check_dispatch(tokens: torch.Tensor, weights: Sequence[torch.Tensor], local: int) -> None:
    check_matrix(DISPATCH_MATMUL, "tokens", tokens)
    if not weights:
        raise ValueError(f"{DISPATCH_MATMUL}: weights is empty, needs at least one")
    for i, weight in enumerate(weights):
        check_weight(DISPATCH_MATMUL, f"weights[{i}]", weight, tokens, local)


def _dispatch_matmul_kernel(
    tokens: torch.Tensor,
    weights: list[torch.Tensor],
    table: torch.Tensor,
    rows: int,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of(group_name)
    local = unfused.experts_of_rank(DISPATCH_MATMUL, num_experts, group.world_size)
    _check_dispatch(tokens, weights, local)
    products = Products(table, num_experts, group)
    sent = direct(unfused.DISPATCH)(tokens, table, rows, top_k, num_experts, group_name)
    name = name_of(DISPATCH_MATMUL, tokens.dtype, tokens.shape[1:], "")
    return sent, exchange.traced(
        group, "consume", name, lambda: [products.of(sent, weight) for weight in weights]
    )


def _matmul_combine_kernel(
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    group = group_of(group_name)
    local = unfused.experts_of_rank(MATMUL_COMBINE, num_experts, group.world_size)
    check_products(MATMUL_COMBINE, rows, weights, local)
    products = Products(table, num_experts, group)
    name = name_of(MATMUL_COMBINE, rows[0].dtype, weights[0].shape[1:], "")
    total = exchange.traced(group, "produce", name, lambda: products.total(rows, weights))
    combined: torch.Tensor = direct(unfused.COMBINE)(
        total, factors, table, top_k, num_experts, group_name
    )
    return combined


# --- fake kernels ----------------------------------------------------------------------------


def _local(op: str, num_experts: int, group_name: str) -> int:
    return unfused.experts_of_rank(op, num_experts, world_size_of(group_name))


def _dispatch_matmul_fake(
    tokens: torch.Tensor,
    weights: list[torch.Tensor],
    table: torch.Tensor,
    rows: int,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _check_dispatch(tokens, weights, _local(DISPATCH_MATMUL, num_experts, group_name))
    pairs = unfused.pairs_of(DISPATCH_MATMUL, table, num_experts, group_name)
    unfused.check_dispatch(tokens, pairs, top_k, DISPATCH_MATMUL)
    columns = [tokens.shape[1], *(weight.shape[2] for weight in weights)]
    sent, *products = [tokens.new_empty((rows, count)) for count in columns]
    return sent, products


def _matmul_combine_fake(
    rows: list[torch.Tensor],
    weights: list[torch.Tensor],
    factors: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    num_experts: int,
    group_name: str,
) -> torch.Tensor:
    check_products(MATMUL_COMBINE, rows, weights, _local(MATMUL_COMBINE, num_experts, group_name))
    pairs = unfused.pairs_of(MATMUL_COMBINE, table, num_experts, group_name)
    unfused.check_combine(rows[0], factors, pairs, top_k, MATMUL_COMBINE)
    return rows[0].new_empty((pairs // top_k, weights[0].shape[2]))


# --- declarations ----------------------------------------------------------------------------


def _dispatch_types(t: Any, tokens: Any, weights: Any, table: Any, **_: Any) -> Any:
    t.ignore(table)
    rows = t.varying("rows of {}", "_d->_d", tokens, "all_to_all_single")
    return rows, [_product_types(t, rows, weight) for weight in weights]


def _combine_types(t: Any, rows: Any, weights: Any, table: Any, factors: Any, **_: Any) -> Any:
    t.ignore(table, factors)
    products = [_product_types(t, x, weight) for x, weight in zip(rows, weights, strict=True)]
    for each in products[1:]:
        products[0] = t.local("{} + {}", "_n,_n->_n", products[0], each, linear_in=((0, 1),))
    return t.varying("tokens of {}", "_n->_n", products[0], "all_to_all_single")


def _product_types(t: Any, rows: Any, weight: Any) -> Any:
    return t.local("{} @ {}", "_k,_kn->_n", rows, weight)


declare(
    Op(
        name=DISPATCH_MATMUL,
        types=_dispatch_types,
        schema=(
            "(Tensor tokens, Tensor[] weights, Tensor table, SymInt rows, int top_k, "
            "int num_experts, str group_name) -> (Tensor sent, Tensor[] products)"
        ),
        kernel=_dispatch_matmul_kernel,
        fake=_dispatch_matmul_fake,
        gradient=BackwardOp(gradients.OF_DISPATCH, once=True),
        autocast=autocast.cast_operands,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(2 * on.world_size, 3),
            [on.rand(1, 3, 4), on.rand(1, 3, 2)],
            unfused.example_table(on),
            2 * on.world_size,
            1,
            on.world_size,
            on.group_name,
        ),
        free={"tokens": 0, "table": 0, "rows": None},
    ),
    Op(
        name=MATMUL_COMBINE,
        types=_combine_types,
        schema=(
            "(Tensor[] rows, Tensor[] weights, Tensor? factors, Tensor table, int top_k, "
            "int num_experts, str group_name) -> Tensor"
        ),
        kernel=_matmul_combine_kernel,
        fake=_matmul_combine_fake,
        gradient=BackwardOp(gradients.OF_COMBINE, once=True),
        autocast=autocast.cast_operands,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(2 * on.world_size, 4)],
            [on.rand(1, 4, 3)],
            on.rand(on.world_size, 2),
            unfused.example_table(on),
            2,
            on.world_size,
            on.group_name,
        ),
        free={"rows": 0, "factors": 0, "table": 0},
    ),
)


# --- entry points ----------------------------------------------------------------------------


@entry_point(DISPATCH_MATMUL, {unfused.DISPATCH: "dispatch_matmul"})
def dispatch_matmul(
    tokens: torch.Tensor,
    weights: Weights,
    experts: torch.Tensor,
    num_experts: int,
    *,
    group: GroupLike,
    capacity: int | None = None,
) -> tuple[Weights, Routing]:
    """Sends tokens to the ranks of their experts, and multiplies them by the experts' weights.

    Same result as::

        rows, routing = moe.dispatch(tokens, experts, num_experts, group=group, capacity=capacity)
        products = [F.grouped_mm(rows, weight, offs=routing.ends) for weight in weights]

    Args:
        tokens: (T, M); float64, float32, bfloat16 or float16; T may differ from rank to rank.
        weights: (num_experts / W, M, N), one matrix for each of this rank's experts; or several
            such tensors, as for a gate and the projection that it gates.
        experts, num_experts, group, capacity: as `moe.dispatch` takes them.

    Returns the product (rows of this rank's experts, N), or a list of products for a sequence of
    weights, and the routing. Differentiable in tokens and weights, once. Errors and
    `torch.compile` as for `moe.dispatch`.
    """
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    name = group_name(group)
    local = unfused.experts_of_rank("dispatch_matmul", num_experts, world_size_of(name))
    given, on = (tokens, matrices), tokens.device.type
    if torch.is_autocast_enabled(on):  # casts them before the op
        given = cast(tuple[torch.Tensor, list[torch.Tensor]], autocast.cast(given, on))
    _check_dispatch(*given, local)
    rows, routing = unfused.route(tokens, experts, num_experts, capacity, name)
    _, products = direct(DISPATCH_MATMUL)(tokens, matrices, routing.table, rows, *routing[2:])
    return (products[0] if isinstance(weights, torch.Tensor) else products), routing


@names_op("matmul_combine", MATMUL_COMBINE, unfused.COMBINE)
@shows_types(MATMUL_COMBINE)
def matmul_combine(
    rows: torch.Tensor | Sequence[torch.Tensor],
    expert_weights: torch.Tensor | Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    routing: Routing,
) -> torch.Tensor:
    """Multiplies rows by the weights of their experts, and brings the results to their tokens.

    Same result as::

        results = F.grouped_mm(rows, expert_weights, offs=routing.ends)
        out = moe.combine(results, weights, routing)

    Args:
        rows: (N, M), of this rank's experts in the order of `moe.dispatch`; or a sequence of such
            tensors, whose products are added up: ones (N, 1) add biases.
        expert_weights: (num_experts / W, M, columns); or a sequence with one for each of `rows`.
        weights, routing: as `moe.combine` takes them.

    Returns (T, columns). On CPU the products are written where the peers read them. Differentiable
    in rows and both weights, once. Errors as for `moe.combine`.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"matmul_combine: routing is {type(routing).__name__}, must be of moe")
    lists = [[t] if isinstance(t, torch.Tensor) else list(t) for t in (rows, expert_weights)]
    out: torch.Tensor = direct(MATMUL_COMBINE)(*lists, weights, routing.table, *routing[2:])
    return out
