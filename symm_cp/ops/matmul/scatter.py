"""Fused matmul-reduce-scatter, of one product and of a sum of products, plain and with scales.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. Each part of the product is sent as soon as it is computed.
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
    Place,
    call_signature,
    caller,
    check_dim,
    check_reduce_op,
    in_test_mode,
    kernel_and_fake,
    name_of,
    scatter_split,
    sizes_text,
    uneven_parts,
    unfused_reduce_scatter,
)
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.matmul import by_tiles, ways
from symm_cp.ops.matmul.block_scales import FORMATS
from symm_cp.ops.matmul.derivatives import SUM_GRADIENT
from symm_cp.ops.matmul.operands import (
    check_float8,
    check_matrix,
    check_product,
    check_row_scale,
    check_terms,
    check_weight_scale,
    partial_dtype_of,
    result_dtype,
)
from symm_cp.ops.matmul.products import Terms, as_rows
from symm_cp.ops.matmul.scaled_mm import NO_GRADIENT, finish, scaled_mm_out
from symm_cp.ops.op import (
    NATIVE_GRADIENT,
    ONE_BY_ONE,
    TORCHS,
    Arguments,
    Caller,
    Op,
    arguments,
    declare,
    untouched,
)
from symm_cp.runtime import exchange
from symm_cp.tensors.dtypes import real
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import TILES, WAYS, choose

SCATTER = "fused_matmul_reduce_scatter"
SUM = "_fused_matmuls_reduce_scatter"
SCALED_SCATTER = "fused_scaled_matmul_reduce_scatter"


def _check_scatter(
    op: str,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    sizes: Sequence[int] | None,
    world_size: int,
) -> tuple[Terms, bool]:
    """Returns the terms to sum, and whether to average."""
    first, name, _ = check_terms(op, lefts, rights, addend)

    def divided(shape: list[int]) -> Split:
        dim = check_dim(op, "scatter_dim", scatter_dim, len(shape))
        return scatter_split(op, "scatter_dim", dim, shape[dim], sizes, world_size)

    terms = Terms.of(lefts, rights, addend, divided)
    return terms, check_reduce_op(op, name, first.dtype, reduce_op)


def _way(group: Group, terms: Terms) -> str:
    """Returns "shards", "tiles", or "whole", which computes the whole sum before it sends any."""
    if terms.by_columns or not terms.lefts:
        return "shards"
    like = terms.like
    *lead, columns = terms.front.largest_shape(terms.moved)
    rows = math.prod(lead)
    products = tuple(
        (rows, left.shape[-1], right.shape[1])
        for left, right in zip(terms.lefts, terms.rights, strict=True)
    )
    question = ways.question("matmul_reduce_scatter", like.dtype, *products)
    served = (*WAYS, TILES) if by_tiles.scatters(group, terms) else WAYS
    return choose(group, like.device, question, served, ways.for_sum(like.device, rows, columns))


def _multiply_and_reduce_scatter(
    op: str, place: Place, terms: Terms, reduce_op: str, mean: bool
) -> torch.Tensor:
    like, split, front, group = terms.like, terms.split, terms.front, place.group
    if group is None:
        return like.new_empty(split.shape_of(place.rank, terms.shape))
    # The name omits K and the way, which follows from K: they may differ from rank to rank.
    detail = f"scatter_dim={split.dim} {reduce_op}{sizes_text(split)}"
    name = name_of(op, like.dtype, terms.shape, detail)
    if ways.at_once(group, "matmul_reduce_scatter", like, terms.shape):
        out = _scatter_at_once(group, terms, name, mean=mean)
        return out if terms.by_columns else contiguous(out.movedim(0, split.dim))
    name = ways.part_by_part(name)
    out = new_result(like, front.shape_of(group.rank, terms.moved))
    way, is_complex = _way(group, terms), out.is_complex()
    summed: list[torch.Tensor] = []

    def produce(rank: int, numbers: torch.Tensor) -> None:
        partial = torch.view_as_complex(numbers) if is_complex else numbers
        if way == "shards":
            terms.add_up(partial, rank)
            return
        if not summed:
            # Within the call, so that a failure is reported to the peers.
            summed.append(new_result(like, terms.moved))
            terms.add_up(summed[0])
        partial.copy_(front.of(rank, summed[0]))

    numbers = real(out)
    shapes = None
    if not split.is_equal:
        shapes = front.shapes([*out.shape, *numbers.shape[out.dim() :]])
    if way == TILES:
        by_tiles.scatter(group, terms, out, name, mean=mean)
    else:
        runtime.of(out, group).produce_and_reduce_scatter(
            group, produce, numbers, name, shapes=shapes, mean=mean
        )
    return out if terms.by_columns else contiguous(out.movedim(0, split.dim))


def _scatter_at_once(group: Group, terms: Terms, name: bytes, *, mean: bool) -> torch.Tensor:
    """Computes the parts for all ranks, then exchanges them; rows are parts of one matrix."""
    shapes = [terms.front.shape_of(rank, terms.moved) for rank in range(group.world_size)]
    parts = new_result(terms.like, (math.prod(terms.moved),))

    def produce() -> None:
        if not terms.by_columns or group.world_size == 1:
            terms.add_up(parts.view(terms.moved))
            return
        each = parts.split_with_sizes([math.prod(shape) for shape in shapes])
        for rank, (part, shape) in enumerate(zip(each, shapes, strict=True)):
            terms.add_up(part.view(shape), rank)

    exchange.traced(group, "produce", name, produce)
    return exchange.reduce_scatter(group, parts, shapes, name, mean=mean)


def _matmul_scattered(
    place: Place,
    a: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    terms, mean = _check_scatter(
        SCATTER, [a], [weight], None, reduce_op, scatter_dim, sizes, place.world_size
    )
    if place.group is not None and in_test_mode():
        dim = terms.split.dim
        return unfused_reduce_scatter(a @ weight, reduce_op, dim, group_name, terms.split)
    return _multiply_and_reduce_scatter(SCATTER, place, terms, reduce_op, mean)


def _matmuls_scattered(
    place: Place,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    addend: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    terms, mean = _check_scatter(
        SUM, lefts, rights, addend, reduce_op, scatter_dim, sizes, place.world_size
    )
    return _multiply_and_reduce_scatter(SUM, place, terms, reduce_op, mean)


# --- with scales -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """A scaled product, and how it is scattered. `a` has the product's leading dimensions."""

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

    def _rows(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        if self.by_columns:
            return tensor.flatten(0, -2)
        return as_rows(self.split.of(rank, tensor), self.split.dim)


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
    place: Place,
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
    mean = check_reduce_op(SCALED_SCATTER, "out_dtype", partial_dtype, reduce_op)
    group = place.group
    if group is None:
        return a.new_empty(split.shape_of(place.rank, shape), dtype=dtype)
    # The rows of A are the rows of the output, whatever A's shape: view A in the output's shape.
    rows = a.reshape(*shape[:-1], a.shape[-1])
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    scale = a_scale.reshape((1, 1) if a_scale.numel() == 1 else (*shape[:-1], a_scale.shape[-1]))
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
        name = call_signature(SCALED_SCATTER, a, detail=detail)
        runtime.of(total, group).produce_and_reduce_scatter(
            group, product.multiply, total, name, shapes=front.shapes(moved), mean=mean
        )
    if bias is not None and product.by_columns and bias.dim() > 0:
        bias = split.along(bias.dim() - 1).of(group.rank, bias)
    # The bias is added to the sum: once, not once a rank.
    total = total.movedim(front.dim, split.dim)
    return contiguous(finish(total, bias, result_scale, dtype))


# --- declarations ----------------------------------------------------------------------------

matmul_reduce_scatter_kernel, matmul_reduce_scatter_fake = kernel_and_fake(_matmul_scattered)
matmuls_reduce_scatter_kernel, matmuls_reduce_scatter_fake = kernel_and_fake(_matmuls_scattered)
scaled_matmul_reduce_scatter_kernel, scaled_matmul_reduce_scatter_fake = kernel_and_fake(
    _scaled_matmul_scattered
)


def _scaled_example(on: Caller, rows: int, *last: Any) -> Arguments:
    one = torch.tensor(1.0)
    return arguments(
        on.float8(rows, 16), on.float8(16, 16).t(), one, one.clone(), "sum", 0, 0, on.group_name,
        [rows, 16], None, None, torch.float32, *last,
    )  # fmt: skip


_SCATTER_OP = Op(
    name=SCATTER,
    schema=TORCHS,
    kernel=matmul_reduce_scatter_kernel,
    fake=matmul_reduce_scatter_fake,
    gradient=NATIVE_GRADIENT,
    autocast=autocast.cast,
    vmap=ONE_BY_ONE,
    example=lambda on: arguments(
        on.rand(2 * on.world_size, 4), on.rand(4, 3), "avg", 0, on.group_name
    ),
    replaces_torch=True,
)
_SCALED_SCATTER_OP = Op(
    name=SCALED_SCATTER,
    schema=TORCHS,
    kernel=scaled_matmul_reduce_scatter_kernel,  # csrc/ops/scaled_matmuls.cpp serves CPU tensors
    fake=scaled_matmul_reduce_scatter_fake,
    gradient=NO_GRADIENT,
    autocast=autocast.as_they_are,
    vmap=ONE_BY_ONE,
    example=lambda on: _scaled_example(on, 4 * on.world_size),
    native=True,
    replaces_torch=True,
    torchs_fake="_fused_scaled_matmul_reduce_scatter_fallback",
)
declare(
    _SCATTER_OP,
    _SCATTER_OP.with_sizes(
        WITH_SIZES[SCATTER],
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, "
        f"{SIZES}) -> Tensor",
        lambda on: arguments(
            on.rand(sum(on.sizes), 4), on.rand(4, 3), "sum", 0, on.group_name, *on.uneven
        ),
    ),
    Op(
        name=SUM,
        schema=(
            "(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, "
            f"str group_name, {SIZES}) -> Tensor"
        ),
        kernel=matmuls_reduce_scatter_kernel,
        fake=matmuls_reduce_scatter_fake,
        gradient=SUM_GRADIENT,
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            [on.rand(4 * on.world_size, 6)], [on.rand(6, 5)], on.rand(4 * on.world_size, 5),
            "sum", 0, on.group_name,
        ),
        internal=True,
    ),
    _SCALED_SCATTER_OP,
    _SCALED_SCATTER_OP.with_sizes(
        WITH_SIZES[SCALED_SCATTER],
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
        "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
        "SymInt[]? output_shape, Tensor? bias, Tensor? result_scale, ScalarType? out_dtype, "
        f"bool use_fast_accum, {SIZES}) -> Tensor",
        lambda on: _scaled_example(on, sum(on.sizes), False, *on.uneven),
    ),
)  # fmt: skip


# --- entry points ----------------------------------------------------------------------------


@entry_point
def matmul_reduce_scatter(
    a: torch.Tensor,
    weight: torch.Tensor,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    group: GroupLike,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reduce-scatters a matrix product, sending each part as soon as it is computed.

    Same result as::

        reduce_scatter_tensor(a @ weight, reduce_op, scatter_dim, group)

    Args:
        a: (..., M, K); K may differ from rank to rank, all else is equal on all ranks.
        weight: (K, N).
        scatter_dim: the dimension of the product to scatter.
        reduce_op: "sum" or "avg".
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        sizes: the length of every rank's part along `scatter_dim`; by default all are equal, and
            the length must be divisible by W.

    Returns this rank's part, contiguous. Partial sums are added in rank order, in float32 for
    16-bit types, so results do not depend on timing. Differentiable in both. Errors as for
    `all_gather_matmul`. Source: torch's `symm_mem::fused_matmul_reduce_scatter`.
    """
    name = group_name(group)
    uneven = uneven_parts(sizes, name)
    call = caller(SCATTER, a, uneven)
    result: torch.Tensor = call(a, weight, reduce_op, scatter_dim, name, *uneven)
    return result


@entry_point
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
