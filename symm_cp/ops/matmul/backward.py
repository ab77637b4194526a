"""Gradient ops of the fused matmuls, which gather shards again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops.common import (
    SIZES,
    OnRank,
    call_signature,
    gather_split,
    kernel_and_fake,
)
from symm_cp.ops.matmul import algorithms
from symm_cp.ops.matmul.derivatives import (
    SCATTER_BACKWARD_GRADIENT,
    WEIGHT_GRAD_GRADIENT,
    gather_matmul_backward,
    is_transposed,
    matmul_all_reduce_backward,
)
from symm_cp.ops.matmul.products import Sum, as_rows, at_last
from symm_cp.ops.op import ONE_BY_ONE, Op, arguments, declare, untouched
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import GatherCall
from symm_cp.tensors.alignment import aligned
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import ALGORITHMS, by_size, choose

_WEIGHT_GRAD = "_fused_all_gather_weight_grad"
_BACKWARD = "_fused_matmul_reduce_scatter_backward"


def _weight_grad(
    place: OnRank,
    x_shard: torch.Tensor,
    grads: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    transposed: bool = False,
) -> list[torch.Tensor]:
    """For each gradient of an output: gathered(x_shard)^H @ grad, laid out by columns or rows."""
    gather_dim %= x_shard.dim()
    split = gather_split(
        _WEIGHT_GRAD, "gather_dim", gather_dim, x_shard, sizes, place.rank, place.world_size
    )
    by_columns = gather_dim == x_shard.dim() - 1
    inner = split.length if by_columns else x_shard.shape[-1]
    shapes = [(inner, grad.shape[-1]) for grad in grads]
    outs = [_new_matrix(place, x_shard, shape, transposed) for shape in shapes]
    if place.group is not None:
        detail = f"gather_dim={split.dim}"
        name = call_signature(_WEIGHT_GRAD, x_shard, split=split, detail=detail)
        whole = split.whole_shape(x_shard.shape)

        def multiply(rows: torch.Tensor) -> None:
            for out, grad in zip(outs, grads, strict=True):
                torch.mm(rows.mH, _rows_like(split, grad), out=out)

        if algorithms.at_once(place.group, "weight_grad", x_shard, whole):
            rows = _gathered_rows(place.group, x_shard, split, name)
            exchange.traced(place.group, "consume", name, lambda: multiply(rows))
            return outs
        name = algorithms.part_by_part(place.group, x_shard, name)
        if by_columns:
            _weight_grad_columns(place.group, x_shard, grads, split, outs, name)
        else:
            _weight_grad_rows(place.group, x_shard, grads, split, outs, multiply, name)
    return outs


def _gathered_rows(group: Group, shard: torch.Tensor, split: Split, name: bytes) -> torch.Tensor:
    """Gathers by one exchange; returns a matrix, whose rows begin with the gathered dimension."""
    if split.dim == shard.dim() - 1:
        return exchange.all_gather(group, shard.flatten(0, -2), split.along(1), name)
    return exchange.all_gather(group, shard.movedim(split.dim, 0), split.along(0), name).flatten(
        0, -2
    )


def _rows_like(gathered: Split, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a tensor in the order of `_gathered_rows`."""
    return (
        tensor.flatten(0, -2) if gathered.dim == tensor.dim() - 1 else as_rows(tensor, gathered.dim)
    )


def _gather_front(
    group: Group,
    shard: torch.Tensor,
    front: Split,
    name: bytes,
    choice: tuple[str, str],
    summed: list[torch.Tensor],
    consume: Callable[[torch.Tensor, int, list[Sum]], None],
    multiply: Callable[[torch.Tensor], None],
) -> None:
    """Gathers dimension 0 whole and multiplies all rows, or consumes each rank's rows.

    `choice` is a question to the measured choices, and its default. `consume` takes the rows, their
    rank, and the sums that become `summed`.
    """
    question, default = choice
    whole = choose(group, shard.device, question, ALGORITHMS, by_size(default)) == "whole"
    gathered = new_result(shard, front.whole_shape(shard.shape)) if whole else None
    sums = [] if whole else [Sum(out, group.world_size) for out in summed]

    def add(shards: list[torch.Tensor], rank: int) -> None:
        consume(aligned(shards[0]).flatten(0, -2), rank, sums)

    def multiply_all() -> None:
        assert gathered is not None
        multiply(gathered.flatten(0, -2))

    gather = GatherCall(
        group,
        [shard],
        at_last(multiply_all, group) if whole else add,
        name,
        shapes=front.shard_shapes(shard),
        gathered=gathered,
        split=front,
    )
    runtime.run(gather)
    for total in sums:
        total.finish()


def _new_matrix(
    place: OnRank, like: torch.Tensor, shape: tuple[int, int], transposed: bool
) -> torch.Tensor:
    """Returns an empty matrix, laid out by columns or rows."""
    laid_out = shape[::-1] if transposed else shape
    made = like.new_empty(laid_out) if place.group is None else new_result(like, laid_out)
    return made.mT if transposed else made


def _weight_grad_columns(
    group: Group,
    x_shard: torch.Tensor,
    grads: list[torch.Tensor],
    split: Split,
    outs: list[torch.Tensor],
    name: bytes,
) -> None:
    """Gathers the last dimension: each shard gives rows of the results."""
    x_columns, rows = x_shard.flatten(0, -2), split.along(0)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        left = aligned(shards[0]).mH
        for out, grad in zip(outs, grads, strict=True):
            torch.mm(left, grad.flatten(0, -2), out=rows.of(rank, out))

    shapes = split.along(1).shard_shapes(x_columns)
    runtime.run(GatherCall(group, [x_columns], consume, name, shapes=shapes))


def _weight_grad_rows(
    group: Group,
    x_shard: torch.Tensor,
    grads: list[torch.Tensor],
    split: Split,
    outs: list[torch.Tensor],
    multiply: Callable[[torch.Tensor], None],
    name: bytes,
) -> None:
    """Gathers another dimension: the results are sums over shards."""
    shard, front = x_shard.movedim(split.dim, 0), split.along(0)
    *lead, inner = front.largest_shape(shard.shape)
    rows, columns = math.prod(lead), [grad.shape[-1] for grad in grads]
    products = [(inner, rows, count) for count in columns]
    question = algorithms.question("weight_grad", x_shard.dtype, *products)
    default = algorithms.for_gradient(x_shard.device, rows, sum(columns))

    def consume(rows: torch.Tensor, rank: int, sums: list[Sum]) -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.add_product(rows.mH, as_rows(split.of(rank, grad), split.dim))

    _gather_front(group, shard, front, name, (question, default), outs, consume, multiply)


def _backward(
    place: OnRank,
    grad_shard: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    need_a: bool,
    need_b: bool,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gathered(grad) @ weight^H and a^H @ gathered(grad), in one pass over the shards of grad.

    A gradient that is not needed is an empty tensor.
    """
    scatter_dim %= a.dim()
    inner, outer = weight.shape
    grad_weight = None
    if need_b:
        grad_weight = _new_matrix(place, weight, (inner, outer), is_transposed(weight))
    group = place.group
    if group is None:
        fake_a = a.new_empty(a.shape if need_a else (0, 0))
        return fake_a, weight.new_empty(0, 0) if grad_weight is None else grad_weight
    split = gather_split(
        _BACKWARD, "scatter_dim", scatter_dim, grad_shard, sizes, group.rank, group.world_size
    )
    name = call_signature(_BACKWARD, grad_shard, split=split, detail=f"dim={split.dim}")
    by_columns = split.dim == a.dim() - 1
    a_front = a if by_columns else a.movedim(scatter_dim, 0)
    grad_a = new_result(a, a_front.shape) if need_a else None

    def multiply(grads: torch.Tensor) -> None:
        if grad_a is not None:
            torch.mm(grads, weight.mH, out=grad_a.flatten(0, -2))
        if grad_weight is not None:
            torch.mm(a_front.flatten(0, -2).mH, grads, out=grad_weight)

    whole = split.whole_shape(grad_shard.shape)
    if algorithms.at_once(group, "matmul_reduce_scatter_backward", grad_shard, whole):
        grads = _gathered_rows(group, grad_shard, split, name)
        exchange.traced(group, "consume", name, lambda: multiply(grads))
    else:
        operands = grad_shard, a_front, weight, split, grad_a, grad_weight
        name = algorithms.part_by_part(group, grad_shard, name)
        if by_columns:
            _backward_columns(group, *operands, name)
        else:
            _backward_rows(group, *operands, multiply, name)
    for grad in (grad_a, grad_weight):
        if grad is not None and reduce_op == "avg":
            grad.div_(group.world_size)
    if grad_a is not None and not by_columns:
        grad_a = contiguous(grad_a.movedim(0, scatter_dim))
    return (
        a.new_empty(0, 0) if grad_a is None else grad_a,
        weight.new_empty(0, 0) if grad_weight is None else grad_weight,
    )


def _backward_columns(
    group: Group,
    grad_shard: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    split: Split,
    grad_a: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    name: bytes,
) -> None:
    """The columns of the product were scattered: gradients of columns of the weight arrive."""
    columns, a_rows = split.along(1), a.flatten(0, -2)
    a_sum = None if grad_a is None else Sum(grad_a.flatten(0, -2), group.world_size)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        grad = aligned(shards[0]).flatten(0, -2)
        if a_sum is not None:
            a_sum.add_product(grad, columns.of(rank, weight).mH)
        if grad_weight is not None:
            columns.of(rank, grad_weight).copy_(torch.mm(a_rows.mH, grad))

    shapes = split.shard_shapes(grad_shard)
    runtime.run(GatherCall(group, [grad_shard], consume, name, shapes=shapes))
    if a_sum is not None:
        a_sum.finish()


def _backward_rows(
    group: Group,
    grad_shard: torch.Tensor,
    a_front: torch.Tensor,
    weight: torch.Tensor,
    split: Split,
    grad_a: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    multiply: Callable[[torch.Tensor], None],
    name: bytes,
) -> None:
    """Rows of the product were scattered; `a_front` and `grad_a` have that dimension in front."""
    shard, front = grad_shard.movedim(split.dim, 0), split.along(0)
    *lead, outer = front.largest_shape(shard.shape)
    rows, inner = math.prod(lead), weight.shape[0]
    products = [(rows, outer, inner)] * (grad_a is not None)
    products += [(inner, rows, outer)] * (grad_weight is not None)
    question = algorithms.question("matmul_reduce_scatter_backward", shard.dtype, *products)
    for_size = algorithms.for_gather if grad_weight is None else algorithms.for_gradient
    choice = question, for_size(shard.device, rows, inner)

    def consume(grad: torch.Tensor, rank: int, sums: list[Sum]) -> None:
        if grad_a is not None:
            torch.mm(grad, weight.mH, out=front.of(rank, grad_a).flatten(0, -2))
        for total in sums:
            total.add_product(front.of(rank, a_front).flatten(0, -2).mH, grad)

    summed = [] if grad_weight is None else [grad_weight]
    _gather_front(group, shard, front, name, choice, summed, consume, multiply)


_weight_grad_kernel, _weight_grad_fake = kernel_and_fake(_weight_grad)
_backward_kernel, _backward_fake = kernel_and_fake(_backward)
declare(
    Op.backward(
        "_fused_all_gather_matmul_backward",
        "(Tensor[] some_grads, Tensor A, Tensor[] Bs, int gather_dim, str group_name, "
        f"bool[] needed, {SIZES}) -> Tensor[]",
        gather_matmul_backward,
        lambda on: arguments(
            [on.rand(4 * on.world_size, 5)], on.rand(4, 6), [on.rand(6, 5)], 0, on.group_name,
            [True, True],
        ),
    ),
    Op.backward(
        "_fused_matmul_all_reduce_backward",
        "(Tensor grad, Tensor A, Tensor B, str reduce_op, str group_name, bool[] needed) "
        "-> Tensor[]",
        matmul_all_reduce_backward,
        lambda on: arguments(
            on.rand(4, 5), on.rand(4, 6), on.rand(6, 5), "sum", on.group_name, [True, True, True]
        ),
    ),
    Op(
        name=_WEIGHT_GRAD,
        types=lambda t, A_shard, gather_dim, **_: t.all_gather(A_shard, gather_dim),
        schema=(
            "(Tensor A_shard, Tensor[] grads, int gather_dim, str group_name, "
            f"{SIZES}, bool transposed=False) -> Tensor[]"
        ),
        kernel=_weight_grad_kernel,
        fake=_weight_grad_fake,
        gradient=WEIGHT_GRAD_GRADIENT,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(4, 6), [on.rand(4 * on.world_size, 3)], 0, on.group_name
        ),
        internal=True,
    ),
    Op(
        name=_BACKWARD,
        types=lambda t, grad, scatter_dim, **_: t.all_gather(grad, scatter_dim),
        schema=(
            "(Tensor grad, Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, "
            f"bool need_a, bool need_b, {SIZES}) -> (Tensor, Tensor)"
        ),
        kernel=_backward_kernel,
        fake=_backward_fake,
        gradient=SCATTER_BACKWARD_GRADIENT,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(4, 5), on.rand(4 * on.world_size, 6), on.rand(6, 5), "sum", 0, on.group_name,
            True, True,
        ),
        internal=True,
    ),
)  # fmt: skip
