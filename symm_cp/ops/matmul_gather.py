"""The kernel of fused all-gather-matmul.

A `Split` says how the gathered dimension is divided. Where that is not the last dimension, tensors
are moved to have it in front: then a rank's shard is rows of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops.common import (
    check_dim,
    gather_split,
    group_of,
    in_test_mode,
    unfused_all_gather,
    what_is,
    world_size_of,
)
from symm_cp.ops.operands import check_matrices
from symm_cp.ops.products import Sum, at_last, moved
from symm_cp.tensors.alignment import aligned
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split
from symm_cp.tuning import Question, choose

GATHER = "fused_all_gather_matmul"

# How many rows are gathered at a time where a matmul cannot do without: bounds the extra memory.
_BLOCK_ROWS = 1024


def _check_gather(
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
) -> Split:
    if x_shard.dim() < 2:
        raise ValueError(
            f"{GATHER}: A must have at least 2 dimensions, has shape {list(x_shard.shape)}"
        )
    dim = check_dim(GATHER, "gather_dim", gather_dim, x_shard.dim())
    split = gather_split(GATHER, "gather_dim", dim, x_shard, sizes, rank, world_size)
    inner = split.length if dim == x_shard.dim() - 1 else x_shard.shape[-1]
    check_matrices(GATHER, x_shard, weights, inner)
    return split


def all_gather_matmul_kernel(
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The op, on this rank's shard; `sizes` is the length of every rank's where they differ."""
    group = group_of(group_name, rank)
    split = _check_gather(x_shard, weights, gather_dim, sizes, group.rank, group.world_size)
    if in_test_mode():
        gathered = unfused_all_gather(x_shard, split.dim, group_name, split)
        return (gathered if return_A else None), [torch.matmul(gathered, w) for w in weights]
    by_columns = split.dim == x_shard.dim() - 1
    multiply = _all_gather_columns if by_columns else _all_gather_rows
    return multiply(group, x_shard, weights, split, return_A)


@lru_cache(maxsize=512)
def _question(
    shard: torch.Size, columns: tuple[int, ...], dtype: torch.dtype, front: Split
) -> Question:
    """The work of a call, given the shape of a shard whose gathered dimension is in front."""
    *lead, inner = front.largest_shape(shard)
    rows = math.prod(lead)
    products = tuple((rows, inner, count) for count in columns)
    return Question("all_gather_matmul", dtype, products, shard=rows * inner * dtype.itemsize)


def _all_gather_rows(
    group: Group,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    split: Split,
    return_gathered: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers another dimension than the last: the shards' products are the result's rows."""
    shard, front = moved(x_shard, split.dim, 0), split.along(0)
    columns = tuple([weight.shape[1] for weight in weights])
    question = _question(shard.shape, columns, x_shard.dtype, front)
    whole = choose(group, x_shard.device, question) == "whole"
    shape = front.whole_shape(shard.shape)
    outs = [new_result(x_shard, [*shape[:-1], count]) for count in columns]
    gathered = new_result(x_shard, shape) if return_gathered or whole else None
    parts = [front.row_parts(out) for out in outs]

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        x_rows = aligned(shards[0]).flatten(0, -2)
        for part, weight in zip(parts, weights, strict=True):
            torch.mm(x_rows, weight, out=part[rank])

    def multiply() -> None:
        assert gathered is not None
        for out, weight in zip(outs, weights, strict=True):
            torch.mm(gathered.flatten(0, -2), weight, out=out.flatten(0, -2))

    detail = f"gather_dim={split.dim}"
    runtime.of(x_shard, group).all_gather_and_consume(
        group,
        [shard],
        at_last(multiply, group) if whole else consume,
        what_is(GATHER, x_shard, split=split, detail=detail),
        shapes=front.shard_shapes(shard),
        gathered=gathered,
        split=front,
    )
    kept = moved(gathered, 0, split.dim) if return_gathered and gathered is not None else None
    return kept, [moved(out, 0, split.dim) for out in outs]


def _all_gather_columns(
    group: Group,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    split: Split,
    return_gathered: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers the last dimension, which the matmul sums over."""
    x_columns, columns, lead = x_shard.flatten(0, -2), split.along(1), x_shard.shape[:-1]
    outs = [new_result(x_shard, (x_columns.shape[0], weight.shape[1])) for weight in weights]
    gathered = (
        new_result(x_shard, columns.whole_shape(x_columns.shape)) if return_gathered else None
    )
    name = what_is(GATHER, x_shard, split=split, detail=f"gather_dim={split.dim}")
    multiply = _multiply_blocks if x_shard.dtype.itemsize == 2 else _add_products_of_shards
    multiply(group, x_columns, weights, columns, outs, gathered, name)
    kept = gathered.view(*lead, split.length) if gathered is not None else None
    return kept, [out.view(*lead, out.shape[1]) for out in outs]


def _add_products_of_shards(
    group: Group,
    x_columns: torch.Tensor,
    weights: list[torch.Tensor],
    columns: Split,
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
    name: bytes,
) -> None:
    sums = [Sum(out, group.world_size) for out in outs]
    rows = columns.along(0)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        part = aligned(shards[0])
        for total, weight in zip(sums, weights, strict=True):
            total.add_product(part, rows.of(rank, weight))

    runtime.of(x_columns, group).all_gather_and_consume(
        group,
        [x_columns],
        consume,
        name,
        shapes=columns.shard_shapes(x_columns),
        gathered=gathered,
        split=columns,
    )
    for total in sums:
        total.finish()


def _multiply_blocks(
    group: Group,
    x_columns: torch.Tensor,
    weights: list[torch.Tensor],
    columns: Split,
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
    name: bytes,
) -> None:
    """For 16-bit types: products of shards would each be rounded, whole rows are rounded once."""
    count = x_columns.shape[0]
    at_a_time = _BLOCK_ROWS if x_columns.device.type == "cpu" else max(1, count)

    def combine(shards: list[torch.Tensor]) -> None:
        memory = new_result(x_columns, (min(count, at_a_time), columns.length))
        for begin in range(0, count, at_a_time):
            rows = slice(begin, begin + at_a_time)
            block = memory[: count - begin]
            torch.cat([shard[rows] for shard in shards], 1, out=block)
            if gathered is not None:
                gathered[rows] = block
            for out, weight in zip(outs, weights, strict=True):
                torch.mm(block, weight, out=out[rows])

    shapes = columns.shapes(x_columns.shape)
    on = runtime.of(x_columns, group)
    on.all_gather_and_combine(group, x_columns, combine, name, shapes=shapes)


def all_gather_matmul_fake(
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Shapes, strides and dtypes of what the op returns."""
    split = _check_gather(x_shard, weights, gather_dim, sizes, rank, world_size_of(group_name))
    front, shape = split.leading(split.whole_shape(x_shard.shape))

    def result(columns: int) -> torch.Tensor:
        return x_shard.new_empty([*shape[:-1], columns]).movedim(front.dim, split.dim)

    gathered = result(shape[-1]) if return_A else None
    return gathered, [result(weight.shape[1]) for weight in weights]
