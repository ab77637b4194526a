"""The kernel of fused scaled-matmul-reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.ops.common import (
    check_dim,
    check_reduce_op,
    group_of,
    in_test_mode,
    scatter_split,
    sizes_text,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)
from symm_cp.ops.products import as_rows
from symm_cp.ops.scaled_mm import finish, scaled_mm_out
from symm_cp.ops.scaled_operands import (
    check_inner,
    check_kernel,
    check_operands,
    check_result,
    check_row_scale,
    check_weight_scale,
    dtype_of,
    partial_dtype_of,
)
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split

SCATTER = "fused_scaled_matmul_reduce_scatter"


@dataclass(frozen=True)
class _Product:
    """A scaled product, and how it is scattered. Rows of `a` are in the shape of the product's."""

    a: torch.Tensor
    a_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    shape: list[int]
    split: Split
    dtype: torch.dtype
    fast: bool

    @property
    def by_columns(self) -> bool:
        """Whether the last dimension is scattered."""
        return self.split.dim == len(self.shape) - 1

    def multiply(self, rank: int, part: torch.Tensor) -> None:
        """Writes the part of the product that is for a rank, as `Split.leading` moves it."""
        split, columns = self.split, self.split.along(1)
        weight, weight_scale = self.weight, self.weight_scale
        if self.by_columns:
            weight = columns.of(rank, weight)
            if weight_scale.numel() == split.length != 1:
                weight_scale = columns.of(rank, weight_scale)
        scale = self.a_scale
        if scale.numel() != 1:
            scale = self._rows(rank, scale)
        rows, out = self._rows(rank, self.a), part.flatten(0, -2)
        scaled_mm_out(rows, weight, scale, weight_scale, out, fast=self.fast)

    def _rows(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        if self.by_columns:
            return tensor.flatten(0, -2)
        return as_rows(self.split.of(rank, tensor), self.split.dim)


def _check_scatter(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    scatter_dims: tuple[int, int],
    output_shape: Sequence[int] | None,
    sizes: Sequence[int] | None,
    world_size: int,
) -> tuple[list[int], Split]:
    """Returns the shape of the product, and how it is scattered."""
    check_operands(SCATTER, a, weight, "B")
    check_inner(SCATTER, "B", a, weight, a.shape[-1])
    check_weight_scale(SCATTER, "B_scale", weight_scale, weight)
    check_row_scale(SCATTER, a, a_scale)
    product = [*a.shape[:-1], weight.shape[1]]
    shape = list(output_shape) if output_shape is not None else product
    if math.prod(shape) != math.prod(product) or not shape or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{SCATTER}: output_shape={shape} does not hold a product of shape {product}"
        )
    original, reshaped = scatter_dims
    dim = check_dim(SCATTER, "orig_scatter_dim", original, len(shape))
    check_dim(SCATTER, "scatter_dim_after_maybe_reshape", reshaped, a.dim())
    split = scatter_split(SCATTER, "orig_scatter_dim", dim, shape[dim], sizes, world_size)
    by_columns = dim == len(shape) - 1
    columns = list(split.sizes) if by_columns else [weight.shape[1]]
    scales = {"A_scale": a_scale, "B_scale": weight_scale}
    check_kernel(SCATTER, "B", a, weight, scales, torch.float32, columns)
    return shape, split


def scaled_matmul_reduce_scatter_kernel(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """The op; `sizes` is the length of every rank's part where they differ."""
    group = group_of(group_name, rank)
    dtype = dtype_of(SCATTER, out_dtype) or a.dtype
    check_result(SCATTER, dtype)
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    shape, split = _check_scatter(
        a, weight, a_scale, weight_scale, dims, output_shape, sizes, group.world_size
    )
    partial_dtype = partial_dtype_of(dtype)
    mean = check_reduce_op(SCATTER, "out_dtype", partial_dtype, reduce_op)
    # The rows of A are the rows of the output, in whatever shape A came: view A as the output is.
    rows = a.reshape(*shape[:-1], a.shape[-1])
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    scale = a_scale.reshape((1, 1) if a_scale.numel() == 1 else (*shape[:-1], 1))
    product = _Product(rows, scale, weight, weight_scale, shape, split, dtype, use_fast_accum)
    front, moved = split.leading(shape)
    if in_test_mode():
        parts = new_result(a, moved, partial_dtype)
        for rank in range(group.world_size):
            part = new_result(a, front.shape_of(rank, moved), partial_dtype)
            product.multiply(rank, part)
            front.of(rank, parts).copy_(part)
        total = unfused_reduce_scatter(parts, reduce_op, front.dim, group_name, front)
    else:
        total = new_result(a, front.shape_of(group.rank, moved), partial_dtype)
        detail = f"N={shape[-1]} scatter_dim={split.dim} {reduce_op}{sizes_text(split)}"
        name = what_is(SCATTER, a, detail=detail)
        runtime.of(total, group).produce_and_reduce_scatter(
            group, product.multiply, total, name, shapes=front.shapes(moved), mean=mean
        )
    if bias is not None and product.by_columns and bias.dim() > 0:
        bias = split.along(bias.dim() - 1).of(group.rank, bias)
    # The bias is added to the sum: once, not once a rank.
    total = total.movedim(front.dim, split.dim)
    return contiguous(finish(total, bias, result_scale, dtype))


def scaled_matmul_reduce_scatter_fake(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """Shape and dtype of what the op returns."""
    world_size = world_size_of(group_name)
    dtype = dtype_of(SCATTER, out_dtype) or a.dtype
    check_result(SCATTER, dtype)
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    shape, split = _check_scatter(
        a, weight, a_scale, weight_scale, dims, output_shape, sizes, world_size
    )
    check_reduce_op(SCATTER, "out_dtype", partial_dtype_of(dtype), reduce_op)
    return a.new_empty(split.shape_of(rank or 0, shape), dtype=dtype)
