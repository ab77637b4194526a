"""Fused matmul-reduce-scatter of float8 matrices with scales.

Shapes as in scatter.py. Block scales: block_scales.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group, GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    SIZES,
    WITH_SIZES,
    OnRank,
    caller,
    check_dim,
    check_reduce_op,
    kernel_and_fake,
    name_of,
    scatter_split,
    sizes_text,
    uneven_parts,
)
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.matmul import algorithms
from symm_cp.ops.matmul.block_scales import FORMATS
from symm_cp.ops.matmul.operands import (
    WORDS,
    check_float8,
    check_matrix,
    check_product,
    check_row_scale,
    check_weight_scale,
    partial_dtype_of,
    result_dtype,
)
from symm_cp.ops.matmul.products import as_rows
from symm_cp.ops.matmul.scaled_mm import ANY_SIZE, NO_GRADIENT, finish, scaled_mm_out
from symm_cp.ops.op import ONE_BY_ONE, TORCHS, Arguments, Caller, Op, arguments, declare
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import ScatterCall
from symm_cp.tensors.dtypes import dtype_name
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split

SCALED_SCATTER = "fused_scaled_matmul_reduce_scatter"


@dataclass(frozen=True)
class _Product:
    """A scaled product, and how it is scattered. `a` has the product's leading dimensions.

    `dtype` is the dtype of the products that ranks add up.
    """

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
        """Writes a rank's part of the product, as `Split.leading` moves it."""
        split, columns = self.split, self.split.along(1)
        weight, weight_scale = self.weight, self.weight_scale
        if self.by_columns:
            weight = columns.of(rank, weight)
            if weight_scale.dtype in FORMATS:
                weight_scale = split.along(0).of(rank, weight_scale)
            elif weight_scale.numel() == split.length != 1:
                weight_scale = columns.of(rank, weight_scale)
        scale = self.a_scale
        if scale.numel() != 1:
            scale = self._rows(rank, scale)
        rows, out = self._rows(rank, self.a), part.flatten(0, -2)
        scaled_mm_out(rows, weight, scale, weight_scale, out, fast=self.fast)

    def multiply_all(self, parts: torch.Tensor) -> None:
        """Writes the parts of all ranks one after the other, each as `multiply` does."""
        split, rows = self.split, self._rows(None, self.a)
        scale = self.a_scale if self.a_scale.numel() == 1 else self._rows(None, self.a_scale)
        # A product for each rank's columns would make torch convert A once per rank.
        apart = self.by_columns and len(split.sizes) > 1
        matrix = (rows.shape[0], self.shape[-1])
        out = new_result(parts, matrix) if apart else parts.view(matrix)
        scaled_mm_out(rows, self.weight, scale, self.weight_scale, out, fast=self.fast)
        if apart:
            sizes = [size * rows.shape[0] for size in split.sizes]
            each = zip(parts.split_with_sizes(sizes), split.along(1).parts(out), strict=True)
            for part, columns in each:
                part.view(columns.shape).copy_(columns)

    def _rows(self, rank: int | None, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a rank's rows, or those of all ranks in the order in which they are scattered."""
        if self.by_columns:
            return tensor.flatten(0, -2)
        own = tensor if rank is None else self.split.of(rank, tensor)
        return as_rows(own, self.split.dim)


def _check_scaled(
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
    check_float8(SCALED_SCATTER, a, weight, "B")
    check_matrix(SCALED_SCATTER, "B", weight, a, a.shape[-1])
    check_weight_scale(SCALED_SCATTER, "B_scale", weight_scale, weight)
    check_row_scale(SCALED_SCATTER, a, a_scale)
    product = [*a.shape[:-1], weight.shape[1]]
    shape = list(output_shape) if output_shape is not None else product
    if math.prod(shape) != math.prod(product) or not shape or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{SCALED_SCATTER}: output_shape={shape} does not hold a product of shape {product}"
        )
    original, reshaped = scatter_dims
    dim = check_dim(SCALED_SCATTER, "orig_scatter_dim", original, len(shape))
    check_dim(SCALED_SCATTER, "scatter_dim_after_maybe_reshape", reshaped, a.dim())
    split = scatter_split(SCALED_SCATTER, "orig_scatter_dim", dim, shape[dim], sizes, world_size)
    by_columns = dim == len(shape) - 1
    scales = {"A_scale": a_scale, "B_scale": weight_scale}
    columns = split.sizes if by_columns else None
    check_product(SCALED_SCATTER, "B", a, weight, scales, torch.float32, columns)
    return shape, split


def _scaled_matmul_scattered(
    place: OnRank,
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
    dtype = result_dtype(SCALED_SCATTER, out_dtype, a)
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    shape, split = _check_scaled(
        a, weight, a_scale, weight_scale, dims, output_shape, sizes, place.world_size
    )
    partial_dtype = partial_dtype_of(dtype)
    check_reduce_op(SCALED_SCATTER, "out_dtype", partial_dtype, reduce_op)
    group = place.group
    if group is None:
        return a.new_empty(split.shape_of(place.rank, shape), dtype=dtype)
    # The rows of A are the rows of the output, whatever A's shape: view A in the output's shape.
    rows = a.reshape(*shape[:-1], a.shape[-1])
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    scale = a_scale.reshape((1, 1) if a_scale.numel() == 1 else (*shape[:-1], a_scale.shape[-1]))
    product = _Product(
        rows, scale, weight, weight_scale, shape, split, partial_dtype, use_fast_accum
    )
    front, _ = split.leading(shape)
    if bias is not None and product.by_columns and bias.dim() > 0:
        bias = split.along(bias.dim() - 1).of(group.rank, bias)

    def finished(total: torch.Tensor) -> torch.Tensor:
        # The bias is added to the sum: once, not once a rank.
        total = total.movedim(front.dim, split.dim)
        return contiguous(finish(total, bias, result_scale, dtype))

    # K and A's dtype are equal on all ranks.
    detail = f"scatter_dim={split.dim} {reduce_op} {dtype_name(a.dtype)}[{a.shape[-1]}]"
    name = name_of(SCALED_SCATTER, partial_dtype, shape, detail + sizes_text(split))
    if not algorithms.at_once(group, SCALED_SCATTER, a, shape, ANY_SIZE):
        name = algorithms.part_by_part(group, a, name)
        return finished(_by_shards(group, product, name, mean=reduce_op == "avg"))
    total = _at_once(group, product, name, mean=reduce_op == "avg")
    return exchange.traced(group, "consume", name, lambda: finished(total))


def _by_shards(group: Group, product: _Product, name: bytes, *, mean: bool) -> torch.Tensor:
    front, moved = product.split.leading(product.shape)
    total = new_result(product.a, front.shape_of(group.rank, moved), product.dtype)
    shapes = front.shapes(moved)
    runtime.run(ScatterCall(group, product.multiply, total, name, shapes=shapes, mean=mean))
    return total


def _at_once(group: Group, product: _Product, name: bytes, *, mean: bool) -> torch.Tensor:
    front, moved = product.split.leading(product.shape)
    parts = new_result(product.a, (math.prod(moved),), product.dtype)
    exchange.traced(group, "produce", name, lambda: product.multiply_all(parts))
    shapes = [front.shape_of(rank, moved) for rank in range(group.world_size)]
    return exchange.reduce_scatter(group, parts, shapes, name, mean=mean)


# --- declarations ----------------------------------------------------------------------------

scaled_matmul_reduce_scatter_kernel, scaled_matmul_reduce_scatter_fake = kernel_and_fake(
    _scaled_matmul_scattered
)


def _scaled_example(on: Caller, rows: int, *last: Any) -> Arguments:
    one = torch.tensor(1.0)
    return arguments(
        on.float8(rows, 16), on.float8(16, 16).t(), one, one.clone(), "sum", 0, 0, on.group_name,
        [rows, 16], None, None, torch.float32, *last,
    )  # fmt: skip


def _types(t: Any, A: Any, B: Any, reduce_op: Any, orig_scatter_dim: Any, **rest: Any) -> Any:
    t.ignore(rest)
    return t.reduce_scatter(t.matmul(A, B), orig_scatter_dim, reduce_op)


_SCALED_SCATTER_OP = Op(
    types=_types,
    name=SCALED_SCATTER,
    schema=TORCHS,
    kernel=scaled_matmul_reduce_scatter_kernel,
    fake=scaled_matmul_reduce_scatter_fake,
    gradient=NO_GRADIENT,
    autocast=autocast.as_they_are,
    vmap=ONE_BY_ONE,
    example=lambda on: _scaled_example(on, 4 * on.world_size),
    replaces_torch=True,
    torchs_fake="_fused_scaled_matmul_reduce_scatter_fallback",
)
declare(
    _SCALED_SCATTER_OP,
    _SCALED_SCATTER_OP.with_sizes(
        WITH_SIZES[SCALED_SCATTER],
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
        "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
        "SymInt[]? output_shape, Tensor? bias, Tensor? result_scale, ScalarType? out_dtype, "
        f"bool use_fast_accum, {SIZES}) -> Tensor",
        lambda on: _scaled_example(on, sum(on.sizes), False, *on.uneven),
    ),
)


@entry_point(SCALED_SCATTER, WORDS)
def scaled_matmul_reduce_scatter(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    group: GroupLike,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reduce-scatters a scaled float8 product, sending each part as soon as it is computed.

    Same result as `torch._scaled_mm` without a bias, reduce-scattered along `scatter_dim`, with the
    bias then added once. `a` is float8 (..., M, K), its scale one number or (..., M, 1); or both
    have scales of blocks, as in `scaled_all_gather_matmul`. Results in float8 are reduced in
    float32. `sizes` as in `matmul_reduce_scatter`. No gradient, like `_scaled_mm`. Errors as for
    `all_gather_matmul`. Source: torch's `symm_mem::fused_scaled_matmul_reduce_scatter`.
    """
    dim = check_dim(SCALED_SCATTER, "scatter_dim", scatter_dim, a.dim())
    name = group_name(group)
    uneven = uneven_parts(sizes, name)
    call = caller(SCALED_SCATTER, a, uneven)
    result: torch.Tensor = call(
        a, weight, a_scale, weight_scale, reduce_op, dim, dim, name,
        [*a.shape[:-1], weight.shape[-1]], bias, result_scale, out_dtype, use_fast_accum, *uneven,
    )  # fmt: skip
    return result
