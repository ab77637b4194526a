"""Fused matmul-all-reduce, plain and with scales, for row-parallel linear layers.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. K may differ from rank to rank, and may be 0: every rank contributes its own product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp import runtime
from symm_cp.group import memory
from symm_cp.group.memory import Group, GroupLike
from symm_cp.ops import autocast
from symm_cp.ops.call import Call
from symm_cp.ops.common import (
    OnRank,
    call_signature,
    check_reduce_op,
    kernel_and_fake,
)
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.matmul import algorithms
from symm_cp.ops.matmul.derivatives import ALL_REDUCED_SUM_GRADIENT
from symm_cp.ops.matmul.operands import (
    WORDS,
    check_bias,
    check_float8,
    check_matrix,
    check_product,
    check_row_scale,
    check_terms,
    check_weight_scale,
    partial_dtype_of,
    result_dtype,
)
from symm_cp.ops.matmul.products import Terms
from symm_cp.ops.matmul.scaled_mm import ANY_SIZE, NO_GRADIENT, finish, scaled_mm_out
from symm_cp.ops.op import ONE_BY_ONE, BackwardOp, Op, arguments, declare, untouched
from symm_cp.ops.types import sum_of_products
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import AllReduceCall
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import ALGORITHMS, by_size, choose

ALL_REDUCE = "fused_matmul_all_reduce"
SUM = "_fused_matmuls_all_reduce"
SCALED_ALL_REDUCE = "fused_scaled_matmul_all_reduce"


def _check(
    op: str,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    reduce_op: str,
) -> list[int]:
    """Returns the shape of the sum."""
    first, name, shape = check_terms(op, lefts, rights, addend, bias)
    if first.is_complex():
        raise TypeError(f"{op}: {name} is {first.dtype}: complex numbers are not supported")
    check_reduce_op(op, name, first.dtype, reduce_op)
    if first.dim() < 2:
        raise ValueError(
            f"{op}: {name} must have at least 2 dimensions, has shape {list(first.shape)}"
        )
    return shape


def unfused_all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """The definition: torch's functional all-reduce, waited for."""
    return funcol.wait_tensor(funcol.all_reduce(tensor, reduce_op, group_name))


def _by_rows(group: Group, matrix: torch.Tensor) -> Split:
    return Split.nearly_equal(matrix.shape[0], group.world_size)


def produce_and_all_reduce(
    op: str,
    group: Group,
    produce: Callable[[int | None, torch.Tensor], None],
    out: torch.Tensor,
    reduce_op: str,
    detail: str = "",
    most: float = exchange.WHOLE_BYTES,
) -> None:
    """Writes the sum over ranks to `out`, a matrix. On CPU up to `most` bytes are summed at once.

    `produce(rank, partial)` writes this rank's contribution to rank `rank`'s rows by
    `Split.nearly_equal`, or for None to all rows.
    """
    if algorithms.at_once(group, "matmul_all_reduce", out, out.shape, most):
        name = call_signature(op, out, detail=f"{reduce_op}{detail}")
        exchange.traced(group, "produce", name, lambda: produce(None, out))
        exchange.all_reduce_(group, out, name, mean=reduce_op == "avg")
        return
    split = _by_rows(group, out)
    rows, columns = split.sizes[0], out.shape[1]
    # A nominal inner dimension: the real one may differ, and all ranks must choose the same way.
    question = algorithms.question("matmul_all_reduce", out.dtype, (rows, columns, columns))
    default = algorithms.for_sum(out.device, rows, columns)
    whole = choose(group, out.device, question, ALGORITHMS, by_size(default)) == "whole"
    name = call_signature(op, out, detail=f"{reduce_op}{detail}{' whole' * whole}")
    call = AllReduceCall(
        group,
        lambda rank, partial: produce(None if whole else rank, partial),
        out,
        algorithms.part_by_part(group, out, name),
        split=None if whole else split,
        mean=reduce_op == "avg",
    )
    runtime.run(call)


def _multiply_and_all_reduce(
    op: str,
    group: Group,
    terms: Terms,
    bias: torch.Tensor | None,
    reduce_op: str,
    shape: list[int],
) -> torch.Tensor:
    out = new_result(terms.like, shape)
    # One rank adds the bias to its contribution, which costs no pass over the result.
    added = bias if reduce_op == "sum" else None

    def produce(rank: int | None, partial: torch.Tensor) -> None:
        adds = group.rank == (0 if rank is None else rank)
        terms.add_up(partial, rank, added if adds else None)

    detail = " bias" * (bias is not None)
    produce_and_all_reduce(op, group, produce, out.flatten(0, -2), reduce_op, detail)
    return out if bias is added else out.add_(bias)


def _matmul_all_reduce(
    place: OnRank,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    shape = _check(ALL_REDUCE, [a], [weight], None, bias, reduce_op)
    if place.group is None:
        return a.new_empty(shape)
    terms = _terms([a], [weight], None, place.group)
    return _multiply_and_all_reduce(ALL_REDUCE, place.group, terms, bias, reduce_op, shape)


def _matmuls_all_reduce(
    place: OnRank,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    shape, group = _check(SUM, lefts, rights, addend, bias, reduce_op), place.group
    if group is None:
        return (lefts[0] if addend is None else addend).new_empty(shape)
    if not lefts and bias is None and addend is not None:
        return Call(SUM, group).all_reduce(addend, reduce_op)
    terms = _terms(lefts, rights, addend, group)
    return _multiply_and_all_reduce(SUM, group, terms, bias, reduce_op, shape)


def _terms(
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    group: Group,
) -> Terms:
    """Returns the terms as matrices, whose rows are divided among the ranks."""
    return Terms.of(
        [left.flatten(0, -2) for left in lefts],
        rights,
        None if addend is None else addend.flatten(0, -2),
        lambda shape: Split.nearly_equal(shape[0], group.world_size),
    )


# --- with scales -----------------------------------------------------------------------------


def _check_scaled(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    reduce_op: str,
    bias: torch.Tensor | None,
    out_dtype: Any,
) -> tuple[list[int], torch.dtype]:
    """Returns the shape of the result, and its dtype."""
    dtype = result_dtype(SCALED_ALL_REDUCE, out_dtype, a)
    check_float8(SCALED_ALL_REDUCE, a, weight, "B")
    check_matrix(SCALED_ALL_REDUCE, "B", weight, a, a.shape[-1])
    check_weight_scale(SCALED_ALL_REDUCE, "B_scale", weight_scale, weight)
    check_row_scale(SCALED_ALL_REDUCE, a, a_scale)
    check_bias(SCALED_ALL_REDUCE, "bias", bias, weight, dtype)
    partial = partial_dtype_of(dtype)
    check_reduce_op(SCALED_ALL_REDUCE, "out_dtype", partial, reduce_op)
    scales = {"A_scale": a_scale, "B_scale": weight_scale}
    check_product(SCALED_ALL_REDUCE, "B", a, weight, scales, partial)
    return [*a.shape[:-1], weight.shape[1]], dtype


def _scaled_matmul_all_reduce(
    place: OnRank,
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    reduce_op: str,
    group_name: str,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    shape, dtype = _check_scaled(a, weight, a_scale, weight_scale, reduce_op, bias, out_dtype)
    group = place.group
    if group is None:
        return a.new_empty(shape, dtype=dtype)
    total = new_result(a, shape, partial_dtype_of(dtype))
    out, rows = total.flatten(0, -2), a.flatten(0, -2)
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    one_scale = a_scale.numel() == 1
    scale = (
        a_scale.reshape(1, 1) if one_scale else a_scale.reshape(rows.shape[0], a_scale.shape[-1])
    )
    split = Split.nearly_equal(rows.shape[0], group.world_size)

    def produce(rank: int | None, partial: torch.Tensor) -> None:
        left = rows if rank is None else split.of(rank, rows)
        left_scale = scale if rank is None or one_scale else split.of(rank, scale)
        scaled_mm_out(left, weight, left_scale, weight_scale, partial, fast=use_fast_accum)

    produce_and_all_reduce(SCALED_ALL_REDUCE, group, produce, out, reduce_op, most=ANY_SIZE)
    # The bias is added to the sum: once, not once a rank.
    with exchange.exchanged():
        return contiguous(finish(total, bias, result_scale, dtype))


# --- declarations ----------------------------------------------------------------------------

_matmul_all_reduce_kernel, _matmul_all_reduce_fake = kernel_and_fake(_matmul_all_reduce)
_matmuls_all_reduce_kernel, _matmuls_all_reduce_fake = kernel_and_fake(_matmuls_all_reduce)
_scaled_kernel, _scaled_fake = kernel_and_fake(_scaled_matmul_all_reduce)


def _types(t: Any, A: Any, B: Any, reduce_op: Any, bias: Any = None, **rest: Any) -> Any:
    t.ignore(rest)
    return t.add(t.all_reduce(t.matmul(A, B), reduce_op), bias)


def _types_of_sum(t: Any, As: Any, Bs: Any, reduce_op: Any, bias: Any, **rest: Any) -> Any:
    return t.add(t.all_reduce(sum_of_products(t, As, Bs, rest["addend"]), reduce_op), bias)


declare(
    Op(
        name=ALL_REDUCE,
        schema="(Tensor A, Tensor B, Tensor? bias, str reduce_op, str group_name) -> Tensor",
        types=_types,
        kernel=_matmul_all_reduce_kernel,
        fake=_matmul_all_reduce_fake,
        gradient=BackwardOp(f"_{ALL_REDUCE}_backward"),
        autocast=autocast.cast,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.rand(5, on.rank + 1), on.rand(on.rank + 1, 3), on.ones(3), "avg", on.group_name
        ),
    ),
    Op(
        name=SUM,
        schema=(
            "(Tensor[] As, Tensor[] Bs, Tensor? addend, Tensor? bias, str reduce_op, "
            "str group_name) -> Tensor"
        ),
        types=_types_of_sum,
        kernel=_matmuls_all_reduce_kernel,
        fake=_matmuls_all_reduce_fake,
        gradient=ALL_REDUCED_SUM_GRADIENT,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(4, 6)], [on.rand(6, 5)], None, on.ones(5), "sum", on.group_name
        ),
        internal=True,
    ),
    Op(
        name=SCALED_ALL_REDUCE,
        schema=(
            "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
            "str group_name, Tensor? bias=None, Tensor? result_scale=None, "
            "ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
        ),
        types=_types,
        kernel=_scaled_kernel,
        fake=_scaled_fake,
        gradient=NO_GRADIENT,
        autocast=autocast.as_they_are,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.float8(4, 16), on.float8(16, 16).t(), torch.tensor(1.0), torch.tensor(1.0), "sum",
            on.group_name, out_dtype=torch.float32,
        ),
    ),
)  # fmt: skip


# --- entry points ----------------------------------------------------------------------------


@entry_point(ALL_REDUCE, WORDS)
def matmul_all_reduce(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduce_op: str = "sum",
    group: GroupLike,
) -> torch.Tensor:
    """All-reduces a matrix product.

    Same result as::

        total = all_reduce(a @ weight, reduce_op, group)
        total if bias is None else total + bias

    Args:
        a: (..., M, K); K may differ from rank to rank, all else is equal on all ranks.
        weight: (K, N).
        bias: (N,), equal on all ranks; it is added once.
        reduce_op: "sum" or "avg".
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns (..., M, N), contiguous, with the same bits on all ranks: partial sums are added in rank
    order, in float32 for 16-bit types. Differentiable (twice) in all three, like torch's functional
    all-reduce: the gradient of the sum is all-reduced. Errors as for `all_gather_matmul`; complex
    numbers raise `TypeError`.
    """
    name = memory.group_name(group)
    result: torch.Tensor = direct(ALL_REDUCE)(a, weight, bias, reduce_op, name)
    return result


@entry_point(SCALED_ALL_REDUCE, WORDS)
def scaled_matmul_all_reduce(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    reduce_op: str = "sum",
    group: GroupLike,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """All-reduces a scaled float8 product.

    Same result as `torch._scaled_mm` without a bias, all-reduced, with the bias then added once.
    `a` is float8 (..., M, K), its scale one number or (..., M, 1); or both have scales of blocks,
    as in `scaled_all_gather_matmul`. K may differ from rank to rank. Results in float8 are reduced
    in float32. No gradient, like `_scaled_mm`. Errors as for `all_gather_matmul`.
    """
    name = memory.group_name(group)
    result: torch.Tensor = direct(SCALED_ALL_REDUCE)(
        a, weight, a_scale, weight_scale, reduce_op, name, bias, result_scale, out_dtype,
        use_fast_accum,
    )  # fmt: skip
    return result
