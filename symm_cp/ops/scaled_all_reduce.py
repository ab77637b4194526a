"""Fused scaled-matmul-all-reduce: float8 with scales, as `torch._scaled_mm`; it has no gradient."""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.group import memory
from symm_cp.group.memory import GroupLike
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    check_reduce_op,
    entry_point,
    group_of,
    in_test_mode,
    lib,
    register_kernel,
    world_size_of,
)
from symm_cp.ops.matmul_all_reduce import produce_and_all_reduce, unfused_all_reduce
from symm_cp.ops.scaled_mm import finish, scaled_mm_out
from symm_cp.ops.scaled_operands import (
    check_bias,
    check_inner,
    check_kernel,
    check_operands,
    check_result,
    check_row_scale,
    check_weight_scale,
    dtype_of,
    partial_dtype_of,
)
from symm_cp.ops.transforms import register_no_gradient
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split

SCALED = "fused_scaled_matmul_all_reduce"

lib.define(
    f"{SCALED}(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
    "str group_name, Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False) -> Tensor"
)


def _check(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    reduce_op: str,
    bias: torch.Tensor | None,
    out_dtype: Any,
) -> tuple[list[int], torch.dtype, bool]:
    """Returns the shape of the result, its dtype, and whether to average."""
    dtype = dtype_of(SCALED, out_dtype) or a.dtype
    check_result(SCALED, dtype)
    check_operands(SCALED, a, weight, "B")
    check_inner(SCALED, "B", a, weight, a.shape[-1])
    check_weight_scale(SCALED, "B_scale", weight_scale, weight)
    check_row_scale(SCALED, a, a_scale)
    check_bias(SCALED, "bias", bias, weight, dtype)
    partial = partial_dtype_of(dtype)
    mean = check_reduce_op(SCALED, "out_dtype", partial, reduce_op)
    scales = {"A_scale": a_scale, "B_scale": weight_scale}
    check_kernel(SCALED, "B", a, weight, scales, partial, [weight.shape[1]])
    return [*a.shape[:-1], weight.shape[1]], dtype, mean


def _scaled_matmul_all_reduce_kernel(
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
    group = group_of(group_name)
    shape, dtype, _ = _check(a, weight, a_scale, weight_scale, reduce_op, bias, out_dtype)
    total = new_result(a, shape, partial_dtype_of(dtype))
    out, rows = total.flatten(0, -2), a.flatten(0, -2)
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    one_scale = a_scale.numel() == 1
    scale = a_scale.reshape(1, 1) if one_scale else a_scale.reshape(rows.shape[0], 1)
    split = Split.nearly_equal(rows.shape[0], group.world_size)

    def produce(rank: int | None, partial: torch.Tensor) -> None:
        left = rows if rank is None else split.of(rank, rows)
        left_scale = scale if rank is None or one_scale else split.of(rank, scale)
        scaled_mm_out(left, weight, left_scale, weight_scale, partial, fast=use_fast_accum)

    if in_test_mode():
        produce(None, out)
        total = unfused_all_reduce(total, reduce_op, group_name)
    else:
        produce_and_all_reduce(SCALED, group, produce, out, reduce_op)
    # The bias is added to the sum: once, not once a rank.
    return contiguous(finish(total, bias, result_scale, dtype))


def _scaled_matmul_all_reduce_fake(
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
    world_size_of(group_name)  # there is such a group
    shape, dtype, _ = _check(a, weight, a_scale, weight_scale, reduce_op, bias, out_dtype)
    return a.new_empty(shape, dtype=dtype)


def register() -> None:
    """Adds the kernel, the fake kernel, and what says that there is no gradient."""
    register_kernel(SCALED, _scaled_matmul_all_reduce_kernel)
    lib.impl(SCALED, _scaled_matmul_all_reduce_fake, "Meta")
    autocast.register(autocast.as_they_are, SCALED)
    register_no_gradient(
        SCALED, "as torch._scaled_mm; write a torch.autograd.Function whose backward scales"
    )


@entry_point
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
    `a` is float8 (..., M, K), its scale one number or (..., M, 1); K may differ from rank to rank.
    Results in float8 are reduced in float32. No gradient, as `_scaled_mm`. Errors as for
    `all_gather_matmul`.
    """
    name = memory.group_name(group)
    result: torch.Tensor = torch.ops.symm_mem.fused_scaled_matmul_all_reduce(
        a, weight, a_scale, weight_scale, reduce_op, name, bias, result_scale, out_dtype,
        use_fast_accum,
    )  # fmt: skip
    return result
