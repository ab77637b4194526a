"""Fused matmul-reduce-scatter, of one product and of a sum of products.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. Each part of the product is sent as soon as it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
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
from symm_cp.ops.matmul import algorithms, by_tiles
from symm_cp.ops.matmul.derivatives import SUM_GRADIENT
from symm_cp.ops.matmul.operands import WORDS, check_terms
from symm_cp.ops.matmul.products import Terms
from symm_cp.ops.op import (
    ONE_BY_ONE,
    TORCHS,
    BackwardOp,
    Op,
    arguments,
    declare,
    untouched,
)
from symm_cp.ops.types import sum_of_products
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import ScatterCall
from symm_cp.tensors.dtypes import real
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import LANES, TILES

SCATTER = "fused_matmul_reduce_scatter"
SUM = "_fused_matmuls_reduce_scatter"


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


def _algorithm(group: Group, terms: Terms) -> str:
    """Returns the algorithm; "whole" computes the whole sum before it sends any."""
    if terms.by_columns or not terms.lefts:
        return "shards"
    like = terms.like
    *lead, columns = terms.front.largest_shape(terms.moved)
    rows = math.prod(lead)
    products = tuple(
        (rows, left.shape[-1], right.shape[1])
        for left, right in zip(terms.lefts, terms.rights, strict=True)
    )
    question = algorithms.question("matmul_reduce_scatter", like.dtype, *products)
    by_size = algorithms.for_sum(like.device, rows, columns)
    tiles = partial(by_tiles.scatters, group, terms)
    return algorithms.choose_pipelined(
        group, like.device, question, by_size, (rows, columns), tiles=tiles
    )


def _multiply_and_reduce_scatter(
    op: str, place: OnRank, terms: Terms, reduce_op: str, mean: bool
) -> torch.Tensor:
    like, split, front, group = terms.like, terms.split, terms.front, place.group
    if group is None:
        return like.new_empty(split.shape_of(place.rank, terms.shape))
    # The name omits K and the algorithm, which follows from K: they may differ from rank to rank.
    detail = f"scatter_dim={split.dim} {reduce_op}{sizes_text(split)}"
    name = name_of(op, like.dtype, terms.shape, detail)
    if algorithms.at_once(group, "matmul_reduce_scatter", like, terms.shape):
        out = _scatter_at_once(group, terms, name, mean=mean)
        return out if terms.by_columns else contiguous(out.movedim(0, split.dim))
    name = algorithms.part_by_part(group, like, name)
    out = new_result(like, front.shape_of(group.rank, terms.moved))
    algorithm, is_complex = _algorithm(group, terms), out.is_complex()
    summed: list[torch.Tensor] = []

    def produce(rank: int, numbers: torch.Tensor) -> None:
        partial = torch.view_as_complex(numbers) if is_complex else numbers
        if algorithm != "whole":
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
    if algorithm == TILES:
        by_tiles.scatter(group, terms, out, name, mean=mean)
    else:
        lanes = algorithm == LANES
        runtime.run(ScatterCall(group, produce, numbers, name, shapes, mean=mean, lanes=lanes))
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
    place: OnRank,
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
    return _multiply_and_reduce_scatter(SCATTER, place, terms, reduce_op, mean)


def _matmuls_scattered(
    place: OnRank,
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


# --- declarations ----------------------------------------------------------------------------

matmul_reduce_scatter_kernel, matmul_reduce_scatter_fake = kernel_and_fake(_matmul_scattered)
matmuls_reduce_scatter_kernel, matmuls_reduce_scatter_fake = kernel_and_fake(_matmuls_scattered)


def _types(t: Any, A: Any, B: Any, reduce_op: Any, scatter_dim: Any, **rest: Any) -> Any:
    return t.reduce_scatter(t.matmul(A, B), scatter_dim, reduce_op)


def _types_of_sum(t: Any, As: Any, Bs: Any, scatter_dim: Any, reduce_op: Any, **rest: Any) -> Any:
    return t.reduce_scatter(sum_of_products(t, As, Bs, rest["addend"]), scatter_dim, reduce_op)


_SCATTER_OP = Op(
    types=_types,
    name=SCATTER,
    schema=TORCHS,
    kernel=matmul_reduce_scatter_kernel,
    fake=matmul_reduce_scatter_fake,
    gradient=BackwardOp(f"_{SCATTER}_backward"),
    autocast=autocast.cast,
    vmap=ONE_BY_ONE,
    example=lambda on: arguments(
        on.rand(2 * on.world_size, 4), on.rand(4, 3), "avg", 0, on.group_name
    ),
    replaces_torch=True,
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
        types=_types_of_sum,
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
)  # fmt: skip


# --- entry points ----------------------------------------------------------------------------


@entry_point(SCATTER, WORDS)
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
