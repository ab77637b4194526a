"""Linears between activations that all ranks have, as in Megatron's tensor parallelism.

A value is *replicated* (the same on all ranks, with the same gradient) or a *part* (of this rank
alone). Each function below has the gradient of one process that holds the values of all ranks:

    function        forward                            gradient
    copy            replicated x, for use in parts     the sum over the ranks
    sum_ranks       the sum of parts over the ranks    the same on each rank: the identity
    columns         parts x @ w_i^T + b_i              of x: the sum over the ranks of all products
    sum_products    sum over i and ranks, + bias       of the factors: local products

Without gradients they call their ops and nothing else: `torch.autograd.Function` takes as long as a
matmul with one row, and torch.compile does not trace one that is applied in another's backward.

Each gradient is made of these functions, so gradients of any order are right. (The ops themselves
follow torch's functional collectives, where the gradient of an all-reduce is an all-reduce.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from symm_cp.ops.direct import direct
from symm_cp.tensor_parallel.quantised import is_quantised
from symm_cp.tensor_parallel.quantised import linear as quantised_linear

_SUMS = "_fused_matmuls_all_reduce"


def copy(x: torch.Tensor, group: str) -> torch.Tensor:
    """The identity; the gradient is summed over the ranks."""
    if not torch.is_grad_enabled():
        return x
    result: torch.Tensor = _Copy.apply(x, group)
    return result


def sum_ranks(part: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks; the gradient of the sum is passed on unchanged."""
    if not torch.is_grad_enabled():
        return _sum_ranks(part, group)
    result: torch.Tensor = _SumRanks.apply(part, group)
    return result


def columns(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: str,
) -> list[torch.Tensor]:
    """Returns `F.linear(x, weight, bias)` for each weight and bias, all parts; x is replicated.

    The input's gradients are added up over linears and ranks in one fused op.
    """
    if not torch.is_grad_enabled():
        return _columns(x, weights, biases)
    if any(map(is_quantised, weights)):
        return _columns(copy(x, group), weights, biases)
    return list(_Columns.apply(group, len(weights), x, *weights, *biases))


def sum_products(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    group: str,
) -> torch.Tensor:
    """Returns the sum over the ranks of all `lefts[i] @ rights[i]`, plus a replicated bias."""
    if not torch.is_grad_enabled():
        return _sum_products(lefts, rights, bias, group)
    result: torch.Tensor = _SumProducts.apply(group, len(lefts), bias, *lefts, *rights)
    return result


def sum_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str
) -> torch.Tensor:
    """Returns the sum over the ranks of `F.linear(x, weight)`, plus a replicated bias."""
    if is_quantised(weight):
        total = sum_ranks(quantised_linear(x, weight, None), group)
        return total if bias is None else total + bias
    return sum_products([x], [weight.t()], bias, group)


def _sum_ranks(part: torch.Tensor, group: str) -> torch.Tensor:
    # Unlike torch's all-reduces, this op takes plain tensors on any device, and several hosts.
    rows = part.reshape(-1, part.shape[-1])
    total: torch.Tensor = direct(_SUMS)([], [], rows, None, "sum", group)
    return total.view(part.shape)


def _columns(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `F.linear`, but fast for the last tokens of sequences, a slice of a 3-D input.

    `F.linear` multiplies these one by one, after a copy of the weight, unless the weight requires a
    gradient. One token of one sequence is such a slice, too, by its strides.
    """
    if is_quantised(weight):
        return quantised_linear(x, weight, bias)
    if x.dim() == 3 and x.stride(0) != x.shape[1] * x.stride(1):
        return F.linear(x.flatten(0, 1), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def _sum_products(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    group: str,
) -> torch.Tensor:
    total: torch.Tensor = (
        direct("fused_matmul_all_reduce")(lefts[0], rights[0], bias, "sum", group)
        if len(lefts) == 1
        else direct(_SUMS)(lefts, rights, None, bias, "sum", group)
    )
    return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_ranks(grad, ctx.group), None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _sum_ranks(part, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copy(grad, ctx.group), None


def _outer(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient (N, K) of a weight, given the gradient (..., N) and the input (..., K)."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2).conj()


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: str, count: int, x: torch.Tensor, *weights_biases: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.count = group, count
        weights, biases = weights_biases[:count], weights_biases[count:]
        ctx.save_for_backward(x, *weights)
        return tuple(_columns(x, weights, biases))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad[2:]
        with torch.autocast(x.device.type, enabled=False):
            grad_x = None
            if need_x:
                conjugates = [weight.conj() for weight in weights]
                grad_x = sum_products(grads, conjugates, None, ctx.group)
            part = copy(x, ctx.group)
            of_weights = [
                _outer(grad, part) if needed else None
                for grad, needed in zip(grads, need[: ctx.count], strict=True)
            ]
            of_biases = [
                grad.flatten(0, -2).sum(0) if needed else None
                for grad, needed in zip(grads, need[ctx.count :], strict=True)
            ]
        return None, None, grad_x, *of_weights, *of_biases


class _SumProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: str, count: int, bias: torch.Tensor | None, *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(*factors)
        lefts, rights = list(factors[:count]), list(factors[count:])
        return _sum_products(lefts, rights, bias, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factors = ctx.saved_tensors  # read once: a checkpoint recomputes at each access
        lefts, rights = factors[: ctx.count], factors[ctx.count :]
        need_bias, *need = ctx.needs_input_grad[2:]
        with torch.autocast(grad.device.type, enabled=False):
            part = copy(grad, ctx.group)
            of_lefts = [
                part @ right.mH if needed else None
                for right, needed in zip(rights, need[: ctx.count], strict=True)
            ]
            # Laid out as the weight of an `nn.Linear`, which comes here transposed.
            of_rights = [
                _outer(part, left).t() if needed else None
                for left, needed in zip(lefts, need[ctx.count :], strict=True)
            ]
            # Every rank computes the whole gradient of the bias.
            of_bias = grad.flatten(0, -2).sum(0) if need_bias else None
        return None, None, of_bias, *of_lefts, *of_rights
