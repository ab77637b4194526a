"""Tokens to the ranks of their experts and times their weights; and the way back.

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
from symm_cp.ops.common import group_of, rank_in, world_size_of
from symm_cp.ops.direct import direct
from symm_cp.ops.experts import op as unfused
from symm_cp.ops.experts.op import COMBINE, DISPATCH, SUMMED, Routing
from symm_cp.ops.experts.table import Table
from symm_cp.ops.matmul import derivatives
from symm_cp.ops.op import ONE_BY_ONE, Gradient, NoGradient, Op, arguments, declare, untouched
from symm_cp.ops.telling import entry_point
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

DISPATCH_MATMUL = "fused_dispatch_grouped_matmul"
MATMUL_COMBINE = "fused_grouped_matmul_combine"
_WEIGHT_GRADS = "_grouped_weight_grads"
# Elements of a block of rows in a backward pass: three copies in float32 stay in a core's cache.
_BLOCK = 1 << 16


# --- checks, as csrc/ops/grouped_matmuls.cpp makes them --------------------------------------


def _check_matrix(op: str, name: str, rows: torch.Tensor) -> None:
    if rows.dtype not in SUMMED:
        raise TypeError(f"{op}: {name} is {rows.dtype}, must be one of {SUMMED}")
    if rows.dim() != 2:
        raise ValueError(f"{op}: {name} {list(rows.shape)} must have 2 dimensions: (rows, columns)")


def _check_weight(op: str, name: str, weight: torch.Tensor, like: torch.Tensor, local: int) -> None:
    if weight.dtype != like.dtype:
        raise TypeError(f"{op}: {name} is {weight.dtype}, must be {like.dtype} as the rows are")
    if weight.device != like.device:
        raise ValueError(f"{op}: {name} is on {weight.device}, must be on {like.device}")
    if weight.dim() != 3 or weight.shape[0] != local or weight.shape[1] != like.shape[1]:
        raise ValueError(
            f"{op}: {name} {list(weight.shape)} must be ({local}, {like.shape[1]}, columns): one "
            "matrix for each expert of a rank"
        )


def _check_dispatch(tokens: torch.Tensor, weights: Sequence[torch.Tensor], local: int) -> None:
    _check_matrix(DISPATCH_MATMUL, "tokens", tokens)
    if not weights:
        raise ValueError(f"{DISPATCH_MATMUL}: weights is empty, needs at least one")
    for i, weight in enumerate(weights):
        _check_weight(DISPATCH_MATMUL, f"weights[{i}]", weight, tokens, local)


def _check_products(rows: list[torch.Tensor], weights: list[torch.Tensor], local: int) -> None:
    op = MATMUL_COMBINE
    if not rows or len(rows) != len(weights):
        raise ValueError(
            f"{op}: got {len(rows)} rows and {len(weights)} weights, needs as many of both, at "
            "least one"
        )
    for i, (each, weight) in enumerate(zip(rows, weights, strict=True)):
        _check_matrix(op, f"rows[{i}]", each)
        if each.dtype != rows[0].dtype:
            raise TypeError(f"{op}: rows[{i}] is {each.dtype}, must be {rows[0].dtype} as rows[0]")
        if each.shape[0] != rows[0].shape[0]:
            raise ValueError(
                f"{op}: rows[{i}] {list(each.shape)} must have {rows[0].shape[0]} rows as rows[0]"
            )
        _check_weight(op, f"weights[{i}]", weight, each, local)
        if weight.shape[2] != weights[0].shape[2]:
            raise ValueError(
                f"{op}: weights[{i}] {list(weight.shape)} must have {weights[0].shape[2]} columns "
                "as weights[0]"
            )


# --- kernels, of groups that span hosts and of streams; csrc/ops/grouped_matmuls.cpp has others --


def _ends(found: Table) -> list[int]:
    """The row behind the last one of each of this rank's experts."""
    first = found.rank * found.local
    each = [sum(row[e] for row in found.counts) for e in range(first, first + found.local)]
    return [sum(each[: e + 1]) for e in range(found.local)]


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, ends: Sequence[int], out: torch.Tensor, *, add: bool
) -> None:
    """Writes the rows of each expert times its matrix to `out`, or adds that."""
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end:
            continue
        if add:
            out[begin:end].addmm_(rows[begin:end], weight[expert])
        else:
            torch.mm(rows[begin:end], weight[expert], out=out[begin:end])


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
    ends = _ends(Table(DISPATCH_MATMUL, table, num_experts, group))
    sent = unfused.dispatch_kernel(tokens, table, rows, top_k, num_experts, group_name)
    products = [new_result(tokens, (rows, weight.shape[2])) for weight in weights]
    for weight, product in zip(weights, products, strict=True):
        _multiply(sent, weight, ends, product, add=False)
    return sent, products


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
    _check_products(rows, weights, local)
    found = Table(MATMUL_COMBINE, table, num_experts, group)
    if rows[0].shape[0] != found.rows:
        raise ValueError(
            f"{MATMUL_COMBINE}: rows {list(rows[0].shape)} must have {found.rows}, as dispatch "
            "returned"
        )
    total = new_result(rows[0], (found.rows, weights[0].shape[2]))
    for i, (each, weight) in enumerate(zip(rows, weights, strict=True)):
        _multiply(each, weight, _ends(found), total, add=i > 0)
    return unfused.combine_kernel(total, factors, table, top_k, num_experts, group_name)


def _weight_grads_kernel(
    rows: torch.Tensor, grads: list[torch.Tensor], ends: torch.Tensor, transposed: list[bool]
) -> list[torch.Tensor]:
    if ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{_WEIGHT_GRADS}: ends of shape {list(ends.shape)} and {ends.dtype} must be a 1-D "
            "tensor of int32 or int64"
        )
    try:
        bounds = ends.tolist()
    except MemoryError:
        raise ValueError(
            f"{_WEIGHT_GRADS}: ends of {len(ends)} experts do not fit in memory"
        ) from None
    results = []
    for grad, is_transposed in zip(grads, transposed, strict=True):
        left, right = (grad, rows) if is_transposed else (rows, grad)
        out = new_result(rows, (len(bounds), left.shape[1], right.shape[1]))
        for expert, (begin, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
            torch.mm(left[begin:end].t(), right[begin:end], out=out[expert])
        results.append(out.mT if is_transposed else out)
    return results


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
    _check_products(rows, weights, _local(MATMUL_COMBINE, num_experts, group_name))
    pairs = unfused.pairs_of(MATMUL_COMBINE, table, num_experts, group_name)
    unfused.check_combine(rows[0], factors, pairs, top_k, MATMUL_COMBINE)
    return rows[0].new_empty((pairs // top_k, weights[0].shape[2]))


def _weight_grads_fake(
    rows: torch.Tensor, grads: list[torch.Tensor], ends: torch.Tensor, transposed: list[bool]
) -> list[torch.Tensor]:
    experts, columns = ends.shape[0], rows.shape[1]
    return [
        rows.new_empty((experts, grad.shape[1], columns)).mT
        if is_transposed
        else rows.new_empty((experts, columns, grad.shape[1]))
        for grad, is_transposed in zip(grads, transposed, strict=True)
    ]


# --- gradients -------------------------------------------------------------------------------


def _weight_grads(
    rows: torch.Tensor, grads: list[torch.Tensor], weights: list[torch.Tensor], rest: list[Any]
) -> list[torch.Tensor]:
    """rows^T grad for each expert and gradient, laid out as the weight; `rest` is a routing."""
    table, _, num_experts, name = rest
    ranks, rank = world_size_of(name), rank_in(name)
    local = num_experts // ranks
    counts = table[: ranks * num_experts].view(ranks, num_experts)
    each = counts[:, rank * local : (rank + 1) * local].sum(0)
    computed: list[torch.Tensor] = direct(_WEIGHT_GRADS)(
        rows, grads, each.cumsum(0).to(torch.int32), [derivatives.is_transposed(w) for w in weights]
    )
    return computed


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, weights, table, ctx.rows, *ctx.rest = inputs
    ctx.set_materialize_grads(False)  # an unused output costs nothing
    ctx.save_for_backward(output[0], table, *weights)


def _dispatch_backward(
    ctx: Any, grad_rows: torch.Tensor | None, grads: list[torch.Tensor | None]
) -> tuple[Any, ...]:
    sent, table, *weights = ctx.saved_tensors
    used = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    grad_weights: list[torch.Tensor | None] = [None] * len(weights)
    if any(ctx.needs_input_grad[1]):
        given, theirs = [grad for grad, _ in used], [weight for _, weight in used]
        computed = iter(_weight_grads(sent, given, theirs, [table, *ctx.rest]))
        grad_weights = [None if grad is None else next(computed) for grad in grads]
    grad_tokens = None
    if ctx.needs_input_grad[0]:
        if not used:  # the peers may have gradients all the same
            used = [(sent.new_zeros((ctx.rows, weights[0].shape[2])), weights[0])]
        grad_tokens = direct(MATMUL_COMBINE)(
            [grad for grad, _ in used], [w.mT for _, w in used], None, table, *ctx.rest
        )
        if grad_rows is not None:
            grad_tokens = grad_tokens + direct(COMBINE)(grad_rows, None, table, *ctx.rest)
    return grad_tokens, grad_weights, *(None,) * 5


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weights, factors, table, *ctx.rest = inputs
    ctx.count = len(rows)
    ctx.save_for_backward(factors, table, *rows, *weights)


def _blocks(rows: torch.Tensor) -> list[slice]:
    """Blocks of rows whose copies in float32 stay in a core's cache; on other devices one block.

    Copies of all rows go through memory: in bfloat16 they made the backward pass slower than that
    of the unfused ops, which have one tensor less to multiply.
    """
    count, width = rows.shape
    if torch.compiler.is_compiling() or rows.device.type != "cpu":
        return [slice(None)]
    step = max(1, _BLOCK // max(1, width))
    return [slice(begin, begin + step) for begin in range(0, max(1, count), step)]


def _multiplied(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns rows * factor in their dtype, in their memory if nothing is recorded."""
    if torch.is_grad_enabled():
        return (rows * factor).to(rows.dtype)
    for block in _blocks(rows):
        rows[block].mul_(factor[block])
    return rows


def _dots(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the sums (N, 1) of left * right, computed in `dtype`."""
    parts = [
        (left[block].to(dtype) * right[block].to(dtype)).sum(1, keepdim=True)
        for block in _blocks(left)
    ]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """All ranks multiply what arrives, whether or not they need it: the peers may."""
    factors, table, *both = ctx.saved_tensors
    rows, weights = both[: ctx.count], both[ctx.count :]
    top_k, num_experts, name = ctx.rest
    count = rows[0].shape[0]
    sent, products = direct(DISPATCH_MATMUL)(
        grad, [weight.mT for weight in weights], table, count, top_k, num_experts, name
    )
    grad_rows, of_factors = products, None
    if factors is not None:
        dtype = wide(torch.promote_types(factors.dtype, grad.dtype))
        flat = factors.reshape(-1, 1)
        factor = direct(DISPATCH)(flat, table, count, 1, num_experts, name)
        dots = sum(_dots(y, x, dtype) for y, x in zip(products, rows, strict=True))
        back = direct(COMBINE)(dots, None, table, 1, num_experts, name)
        of_factors = back.view_as(factors).to(factors.dtype)
        grad_rows = [_multiplied(y, factor) for y in products]
        sent = _multiplied(sent, factor)
    grad_weights: list[torch.Tensor | None] = [None] * len(weights)
    if any(ctx.needs_input_grad[1]):
        grad_weights = [
            _weight_grads(x, [sent], [weight], [table, *ctx.rest])[0]
            for x, weight in zip(rows, weights, strict=True)
        ]
    return grad_rows, grad_weights, of_factors, *(None,) * 4


# --- declarations ----------------------------------------------------------------------------


declare(
    Op(
        name=DISPATCH_MATMUL,
        schema=(
            "(Tensor tokens, Tensor[] weights, Tensor table, SymInt rows, int top_k, "
            "int num_experts, str group_name) -> (Tensor, Tensor[])"
        ),
        kernel=_dispatch_matmul_kernel,
        fake=_dispatch_matmul_fake,
        gradient=Gradient(_dispatch_backward, _dispatch_setup),
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
        native=True,
        native_autograd=True,
    ),
    Op(
        name=MATMUL_COMBINE,
        schema=(
            "(Tensor[] rows, Tensor[] weights, Tensor? factors, Tensor table, int top_k, "
            "int num_experts, str group_name) -> Tensor"
        ),
        kernel=_matmul_combine_kernel,
        fake=_matmul_combine_fake,
        gradient=Gradient(_combine_backward, _combine_setup),
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
        native=True,
        native_autograd=True,
    ),
    Op(
        name=_WEIGHT_GRADS,
        schema="(Tensor rows, Tensor[] grads, Tensor ends, bool[] transposed) -> Tensor[]",
        kernel=_weight_grads_kernel,
        fake=_weight_grads_fake,
        gradient=NoGradient("second derivatives of grouped matmuls are not supported"),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(5, 3), [on.rand(5, 2)], torch.tensor([2, 5], dtype=torch.int32), [False]
        ),
        one_sided=True,
        internal=True,
    ),
)


# --- entry points ----------------------------------------------------------------------------


@entry_point
def dispatch_matmul(
    tokens: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    experts: torch.Tensor,
    num_experts: int,
    *,
    group: GroupLike,
    capacity: int | None = None,
) -> tuple[Any, Routing]:
    """Sends tokens to the ranks of their experts, and multiplies them by the experts' weights.

    Same result as::

        rows, routing = moe.dispatch(tokens, experts, num_experts, group=group, capacity=capacity)
        products = [F.grouped_mm(rows, weight, offs=routing.ends) for weight in weights]

    Args:
        tokens: (T, M); float64, float32, bfloat16 or float16; T may differ from rank to rank.
        weights: (num_experts / W, M, N), one matrix for each of this rank's experts; or several
            such tensors, as of a gate and what it gates.
        experts, num_experts, group, capacity: as `moe.dispatch` takes them.

    Returns the product (rows of this rank's experts, N), or a list of products for a sequence of
    weights, and the routing. Differentiable in tokens and weights, once. Errors and
    `torch.compile` as for `moe.dispatch`.
    """
    single = isinstance(weights, torch.Tensor)
    matrices = [weights] if single else list(weights)
    name = group_name(group)
    local = unfused.experts_of_rank("dispatch_matmul", num_experts, world_size_of(name))
    given, on = (tokens, matrices), tokens.device.type
    if torch.is_autocast_enabled(on):  # casts them before the op
        given = cast(tuple[torch.Tensor, list[torch.Tensor]], autocast.cast(given, on))
    _check_dispatch(*given, local)
    rows, routing = unfused.route(tokens, experts, num_experts, capacity, name)
    _, products = direct(DISPATCH_MATMUL)(tokens, matrices, routing.table, rows, *routing[2:])
    return (products[0] if single else products), routing


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
        expert_weights: (num_experts / W, M, columns); or a sequence of as many as there are rows.
        weights, routing: as `moe.combine` takes them.

    Returns (T, columns). On CPU the products are written where the peers read them. Differentiable
    in rows and both weights, once. Errors as for `moe.combine`.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"matmul_combine: routing is {type(routing).__name__}, must be of moe")
    lists = [[t] if isinstance(t, torch.Tensor) else list(t) for t in (rows, expert_weights)]
    out: torch.Tensor = direct(MATMUL_COMBINE)(*lists, weights, routing.table, *routing[2:])
    return out
