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
    fused_matmul_all_reduce                S(A B) + b               S(H) B^H;  A^H S(H);  H^T 1
    _fused_matmuls_all_reduce              S(sum of A_i B_i + C)    S(H) B_i^H;  A_i^H S(H);  S(H)
                                             + b                      H^T 1

S all-reduces; it is its own gradient, like torch's functional all-reduce.
Each gradient is computed by one of these ops or by a plain matmul, so each backward pass can be
differentiated again. A backward pass divides the dimension as the forward pass did: ops with
sizes have the same backward pass as their counterparts without sizes. The backward passes of the
ops that users call are ops, too (csrc/ops/backward_ops.cpp calls them).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from symm_cp.ops.common import call_op, uneven_of, world_size_of
from symm_cp.ops.op import Gradient
from symm_cp.runtime.exchange import exchanged

_ops = torch.ops.symm_mem
_GATHER = "fused_all_gather_matmul"


def is_transposed(weight: torch.Tensor) -> bool:
    """Returns whether a gradient should be laid out by columns, as the weight is.

    autograd copies a gradient whose layout differs from its parameter's, and the weight of an
    `nn.Linear` comes here transposed.
    """
    if not weight.mT.is_contiguous():
        return False
    if not weight.is_contiguous():
        return True
    # A single row or column is contiguous both ways: the strides decide.
    rows, columns = weight.shape[-2:]
    strides = weight.stride()[-2:]
    return strides == (1, rows) and strides != (columns, 1)


def _left_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^H @ right, over all leading dimensions."""
    return _in_rows(left).mH @ _in_rows(right)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a matrix of its last dimension: `flatten` fails under `is_grads_batched`."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _gathered_products(
    ctx: Any, shard: torch.Tensor, weights: list[torch.Tensor], *, return_gathered: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """G(shard), and its products with weights."""
    gathered: tuple[torch.Tensor, list[torch.Tensor]] = call_op(
        _GATHER,
        shard,
        weights,
        ctx.dim,
        ctx.group_name,
        uneven=ctx.uneven,
        return_A=return_gathered,
    )
    return gathered


def _scattered_sum(
    ctx: Any,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    addend: torch.Tensor | None = None,
    reduce_op: str = "sum",
) -> torch.Tensor:
    """R(sum of the products of pairs, plus an addend)."""
    lefts, rights = [left for left, _ in pairs], [right for _, right in pairs]
    scattered: torch.Tensor = _ops._fused_matmuls_reduce_scatter(
        lefts, rights, addend, reduce_op, ctx.dim, ctx.group_name, *ctx.uneven
    )
    return scattered


def _share(grad: torch.Tensor, ctx: Any) -> torch.Tensor:
    """Returns the gradient of one rank's term: for an average, divided by the world size."""
    return grad / world_size_of(ctx.group_name) if ctx.reduce_op == "avg" else grad


def _no_grads(ctx: Any, arguments: int) -> tuple[None, ...]:
    """Returns the gradients of n non-tensor arguments, and of the arguments for uneven parts."""
    return (None,) * (arguments + len(ctx.uneven))


# --- fused_all_gather_matmul, fused_matmul_all_reduce -----------------------------------------


def gather_matmul_backward(
    some_grads: list[torch.Tensor],
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    needed: list[bool],
    sizes: list[int] | None = None,
    rank: int | None = None,
) -> list[torch.Tensor]:
    """The gradients of the shard and of the weights, from those of the gathered tensor, if it was
    returned, and of the products.

    Which exchanges are made does not depend on the missing gradients: the peers wait for them.
    """
    dim, missing = gather_dim % shard.dim(), _missing(shard)
    first = len(some_grads) - len(weights)
    grads = some_grads[first:]
    used = [i for i, grad in enumerate(grads) if not _is_missing(grad)]
    lefts, results = [grads[i] for i in used], [missing] * (1 + len(weights))
    if needed[0]:
        addend = some_grads[0] if first and not _is_missing(some_grads[0]) else None
        if not lefts and addend is None:
            shape = list(shard.shape)
            shape[dim] = sum(sizes) if sizes else shape[dim] * world_size_of(group_name)
            addend = shard.new_zeros(shape)
        rights = [weights[i].mH for i in used]
        results[0] = _ops._fused_matmuls_reduce_scatter(
            lefts, rights, addend, "sum", dim, group_name, sizes, rank
        )
    if any(needed[1:]):
        transposed = all(map(is_transposed, weights))
        computed = _ops._fused_all_gather_weight_grad(
            shard, lefts, dim, group_name, sizes, rank, transposed
        )
        for i, grad in zip(used, computed, strict=True):
            results[1 + i] = grad
    return results


def matmul_all_reduce_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    group_name: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    """The gradients of both factors, and of the bias if there is one, which is added to the sum."""
    need_a, need_weight, *need_bias = needed
    total = grad
    if need_a or need_weight:
        total = _ops._fused_matmuls_all_reduce([], [], grad, None, reduce_op, group_name)
    missing = _missing(grad)
    with exchanged():
        grad_a = total @ weight.mH if need_a else missing
        grad_weight = _left_transposed(a, total) if need_weight else missing
        grad_bias = [_bias_gradient(grad) if need else missing for need in need_bias]
    return [grad_a, grad_weight, *grad_bias]


def _missing(like: torch.Tensor) -> torch.Tensor:
    """What stands for a missing gradient."""
    return like.new_empty(0, dtype=torch.bool)


def _is_missing(grad: torch.Tensor) -> bool:
    return grad.dtype == torch.bool


# --- _fused_matmuls_reduce_scatter -----------------------------------------------------------


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    lefts, rights, addend, ctx.reduce_op, scatter_dim, ctx.group_name, *last = inputs
    ctx.count, ctx.uneven = len(lefts), uneven_of(last)
    ctx.dim = scatter_dim % (lefts[0] if lefts else addend).dim()
    ctx.save_for_backward(*lefts, *rights)


def _sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    lefts, rights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    transposed = [right.mH for right in rights]
    gathered, grad_lefts = _gathered_products(ctx, _share(grad, ctx), transposed)
    grad_rights = [_left_transposed(left, gathered) for left in lefts]
    grad_addend = gathered if ctx.needs_input_grad[2] else None
    return list(grad_lefts), grad_rights, grad_addend, *_no_grads(ctx, 3)


# --- _fused_all_gather_weight_grad -----------------------------------------------------------


def _weight_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_shard, grads, ctx.dim, ctx.group_name, *last = inputs
    ctx.uneven = uneven_of(last)
    # Autograd sees the arguments up to the last one that is not its default.
    ctx.arguments = 2 + (len(last) if last and last[-1] is True else len(ctx.uneven))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_shard, *grads)


def _weight_backward(ctx: Any, outer: list[torch.Tensor | None]) -> tuple[Any, ...]:
    x_shard, *grads = ctx.saved_tensors
    pairs = [(grad, h) for grad, h in zip(grads, outer, strict=True) if h is not None]
    grad_shard, grad_grads = None, [None] * len(grads)
    if pairs and ctx.needs_input_grad[0]:
        grad_shard = _scattered_sum(ctx, [(grad, h.mH) for grad, h in pairs])
    if pairs and any(ctx.needs_input_grad[1]):
        used = [h for _, h in pairs]
        _, products = _gathered_products(ctx, x_shard, used, return_gathered=False)
        computed = iter(products)
        grad_grads = [next(computed) if h is not None else None for h in outer]
    return grad_shard, grad_grads, *(None,) * ctx.arguments


# --- _fused_matmul_reduce_scatter_backward ---------------------------------------------------


def _scatter_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, a, weight, ctx.reduce_op, scatter_dim, ctx.group_name, *rest = inputs
    ctx.dim = scatter_dim % a.dim()
    ctx.need_a, ctx.need_b, *last = rest
    ctx.uneven = uneven_of(last)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad, a, weight)


def _scatter_backward_backward(
    ctx: Any, outer_a: torch.Tensor | None, outer_weight: torch.Tensor | None
) -> tuple[Any, ...]:
    grad, a, weight = ctx.saved_tensors
    # A gradient that was not needed is an empty tensor.
    outer_a, outer_weight = outer_a if ctx.need_a else None, outer_weight if ctx.need_b else None
    grad_grad = grad_a = grad_weight = None
    pairs = [(outer_a, weight)] * (outer_a is not None)
    pairs += [(a, outer_weight)] * (outer_weight is not None)
    if pairs and ctx.needs_input_grad[0]:
        grad_grad = _scattered_sum(ctx, pairs, None, ctx.reduce_op)
    for_a = outer_weight is not None and ctx.needs_input_grad[1]
    for_weight = outer_a is not None and ctx.needs_input_grad[2]
    if for_a or for_weight:
        weights = [outer_weight.mH] if for_a and outer_weight is not None else []
        gathered, products = _gathered_products(
            ctx, _share(grad, ctx), weights, return_gathered=for_weight
        )
        grad_a = products[0] if for_a else None
        if for_weight and outer_a is not None:
            grad_weight = _left_transposed(outer_a, gathered)
    return grad_grad, grad_a, grad_weight, *_no_grads(ctx, 5)


# --- _fused_matmuls_all_reduce ---------------------------------------------------------------


def _all_reduced(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _ops._fused_matmuls_all_reduce(
        [], [], grad, None, ctx.reduce_op, ctx.group_name
    )
    return total


def _bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    return _in_rows(grad).sum(0)


def _all_reduced_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    lefts, rights, _, _, ctx.reduce_op, ctx.group_name = inputs
    ctx.count = len(lefts)
    ctx.save_for_backward(*lefts, *rights)


def _all_reduced_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    lefts, rights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    need_lefts, need_rights, need_addend, need_bias = ctx.needs_input_grad[:4]
    # Every rank takes part, whichever gradients it needs itself.
    total = _all_reduced(ctx, grad)
    grad_lefts = [
        total @ right.mH if need else None for right, need in zip(rights, need_lefts, strict=True)
    ]
    grad_rights = [
        _left_transposed(left, total) if need else None
        for left, need in zip(lefts, need_rights, strict=True)
    ]
    grad_bias = _bias_gradient(grad) if need_bias else None
    return grad_lefts, grad_rights, total if need_addend else None, grad_bias, None, None


SUM_GRADIENT = Gradient(_sum_backward, _sum_setup)
WEIGHT_GRAD_GRADIENT = Gradient(_weight_backward, _weight_setup)
SCATTER_BACKWARD_GRADIENT = Gradient(_scatter_backward_backward, _scatter_backward_setup)
ALL_REDUCED_SUM_GRADIENT = Gradient(_all_reduced_sum_backward, _all_reduced_sum_setup)
