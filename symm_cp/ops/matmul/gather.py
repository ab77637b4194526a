"""Fused all-gather-matmul: multiplies shards as they arrive.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. A `Split` says how the gathered dimension is divided. Unless it is the last dimension,
tensors are moved to have it in front: then a rank's shard is rows of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group, GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    SIZES,
    WITH_SIZES,
    Weights,
    caller,
    check_dim,
    gather_split,
    group_of,
    name_of,
    uneven_parts,
    world_size_of,
)
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.matmul import algorithms, by_tiles
from symm_cp.ops.matmul.operands import (
    WORDS_OF_GATHERS,
    Operand,
    check_matrices,
    check_rows,
)
from symm_cp.ops.matmul.products import Sum, at_last
from symm_cp.ops.matmul.scaled_mm import RowScales, ScaledRows
from symm_cp.ops.op import ONE_BY_ONE, TORCHS, BackwardOp, Op, arguments, declare
from symm_cp.ops.types import products_of_gathered
from symm_cp.runtime import exchange
from symm_cp.runtime.calls import Consume, GatherCall, GatherIntoCall
from symm_cp.tensors.alignment import ALIGN, aligned
from symm_cp.tensors.dtypes import NARROW
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Shape, Shapes, Split
from symm_cp.tuning import LANES, TILES

GATHER = "fused_all_gather_matmul"

# Rows gathered at a time where a matmul needs gathered rows: bounds the extra memory.
_BLOCK_ROWS = 1024

#: Writes the product of rows and a weight to `out`: `torch.mm`, or with scales `multiply_scaled`.
Multiply: TypeAlias = Callable[..., object]


# --- prepared calls -------------------------------------------------------------------------------


class PreparedGather(NamedTuple):
    """The values that follow from arguments. Shards travel in shape `shard`, divided by `front`."""

    split: Split
    by_columns: bool
    front: Split
    shard: Shape
    shapes: list[Shapes] | None
    whole: list[int]
    outs: list[list[int]]
    rows: list[int]  # of each rank's part of a result
    name: bytes
    part: tuple[int, int]  # of a result, for the largest shard: rows and columns
    question: str


def _checked(
    x_shard: Operand,
    weights: Sequence[Operand],
    gather_dim: int,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
) -> Split:
    check_rows(GATHER, "A", x_shard)
    dim = check_dim(GATHER, "gather_dim", gather_dim, x_shard.dim())
    split = gather_split(GATHER, "gather_dim", dim, x_shard, sizes, rank, world_size)
    inner = split.length if dim == x_shard.dim() - 1 else x_shard.shape[-1]
    check_matrices(GATHER, x_shard, weights, inner)
    return split


def planned(
    op: str,
    x_shard: Operand,
    columns: Sequence[int],
    split: Split,
    detail: str = "",
) -> PreparedGather:
    """Returns the prepared call of checked arguments; `columns`: the number for each weight."""
    shape = tuple(x_shard.shape)
    by_columns = split.dim == len(shape) - 1
    if by_columns:
        front, shard = split.along(1), (math.prod(shape[:-1]), shape[-1])
    else:
        front = split.along(0)
        shard = (shape[split.dim], *shape[: split.dim], *shape[split.dim + 1 :])
    whole = front.whole_shape(shard)
    largest = front.largest_shape(shard)
    products = tuple((math.prod(largest[:-1]), largest[-1], count) for count in columns)
    each = math.prod(shard[1:-1])
    return PreparedGather(
        split=split,
        by_columns=by_columns,
        front=front,
        shard=shard,
        shapes=None if front.is_equal else [(part,) for part in front.shapes(shard) or ()],
        whole=whole,
        outs=[[*whole[:-1], count] for count in columns],
        rows=[size * each for size in front.sizes],
        name=name_of(op, x_shard.dtype, shape, f"{detail}gather_dim={split.dim}", split),
        part=(math.prod(largest[:-1]), max(columns, default=0)),
        question=algorithms.question("all_gather_matmul", x_shard.dtype, *products),
    )


@lru_cache(maxsize=512)
def prepare_gather(
    x_shard: tuple[Any, ...],
    weights: tuple[tuple[Any, ...], ...],
    gather_dim: int,
    sizes: tuple[int, ...] | None,
    rank: int,
    world_size: int,
) -> PreparedGather:
    """Returns a prepared call; tensors are given as the fields of an `Operand`.

    Raises `ValueError` or `TypeError` for arguments that do not fit.
    """
    x, matrices = Operand(*x_shard), [Operand(*weight) for weight in weights]
    split = _checked(x, matrices, gather_dim, sizes, rank, world_size)
    return planned(GATHER, x, [matrix.shape[1] for matrix in matrices], split)


# --- kernels ---------------------------------------------------------------------------------


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
    """Runs the op on this rank's shard; `sizes`: every rank's shard length, if they differ."""
    group = group_of(group_name, rank)
    call = prepare_gather(
        (x_shard.shape, x_shard.dtype, x_shard.device),
        tuple([(weight.shape, weight.dtype, weight.device) for weight in weights]),
        gather_dim,
        None if sizes is None else tuple(sizes),
        group.rank,
        group.world_size,
    )
    if algorithms.at_once(group, "all_gather_matmul", x_shard, call.whole):
        return _multiply_at_once(group, call, x_shard, weights, return_A)
    call = call._replace(name=algorithms.part_by_part(group, x_shard, call.name))
    if call.by_columns:
        return _gather_columns(group, call, x_shard, weights, return_A)
    tiles = partial(by_tiles.gathers, group, x_shard, weights, call.split)
    by_size = algorithms.for_gather(x_shard.device, *call.part)
    algorithm = algorithms.choose_pipelined(
        group, x_shard.device, call.question, by_size, call.part, tiles=tiles
    )
    whole = algorithm == "whole"
    outs = [new_result(x_shard, shape) for shape in call.outs]
    gathered = new_result(x_shard, call.whole) if return_A or whole else None
    if whole:
        assert gathered is not None
        _gather_whole(group, call, x_shard, weights, outs, gathered)
    elif algorithm == TILES:
        shard = x_shard.movedim(call.split.dim, 0)
        by_tiles.gather(group, shard, weights, outs, gathered, call.name)
    else:
        in_turn = algorithm == LANES
        gather_rows(group, call, x_shard, weights, outs, gathered, torch.mm, lanes=in_turn)
    kept = gathered if return_A else None
    dim = call.split.dim
    if dim == 0:
        return kept, outs
    return kept if kept is None else kept.movedim(0, dim), [out.movedim(0, dim) for out in outs]


def _multiply_at_once(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    return_gathered: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers by one exchange, then multiplies all rows."""
    dim, shape = call.split.dim, x_shard.shape
    shard = x_shard.flatten(0, -2) if call.by_columns else x_shard.movedim(dim, 0)
    gathered = exchange.all_gather(group, shard, call.front, call.name, keep=return_gathered)
    outs = [new_result(x_shard, out) for out in call.outs]

    def multiply() -> None:
        rows = gathered.flatten(0, -2)
        for out, weight in zip(outs, weights, strict=True):
            torch.mm(rows, weight, out=out.flatten(0, -2))

    exchange.traced(group, "consume", call.name, multiply)
    if call.by_columns:
        results = [each.view(*shape[:-1], each.shape[1]) for each in (gathered, *outs)]
    else:
        results = [each.movedim(0, dim) for each in (gathered, *outs)]
    return (results[0] if return_gathered else None), results[1:]


def gather_rows(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    weights: Sequence[Any],
    outs: Sequence[torch.Tensor],
    gathered: torch.Tensor | None,
    multiply: Multiply,
    scales: RowScales | None = None,
    *,
    lanes: bool = False,
) -> None:
    """Gathers a dimension other than the last: the shards' products are the result's rows."""
    shard = [x_shard if call.split.dim == 0 else x_shard.movedim(call.split.dim, 0)]
    shapes = call.shapes
    if scales is not None and scales.sharded:
        shard.append(scales.scale.movedim(call.split.dim, 0))
        shapes = call.front.shard_shapes(*shard)
    parts = [out.flatten(0, -2).split_with_sizes(call.rows) for out in outs]

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        shard = shards[0]
        if 1 in shard.shape or shard.data_ptr() % ALIGN or not shard.is_contiguous():
            shard = aligned(shard)
        rows: Any = shard.flatten(0, -2)
        if scales is not None:
            rows = ScaledRows(rows, scales.of_rank(rank, shards))
        for part, weight in zip(parts, weights, strict=True):
            multiply(rows, weight, out=part[rank])

    runtime.run(
        GatherCall(group, shard, consume, call.name, shapes, gathered, call.front, lanes=lanes)
    )


def gather_shards(
    group: Group,
    call: PreparedGather,
    shard: torch.Tensor,
    consume: Consume,
    gathered: torch.Tensor | None,
) -> None:
    """Calls `consume` for the shards of all ranks as they arrive; collects them, if wanted."""
    shapes, split = call.shapes, call.front
    runtime.run(
        GatherCall(
            group, [shard], consume, call.name, shapes=shapes, gathered=gathered, split=split
        )
    )


def _gather_whole(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    outs: Sequence[torch.Tensor],
    gathered: torch.Tensor,
) -> None:
    """Gathers a dimension other than the last, then multiplies all rows at once."""

    def multiply() -> None:
        for out, weight in zip(outs, weights, strict=True):
            torch.mm(gathered.flatten(0, -2), weight, out=out.flatten(0, -2))

    gather_shards(
        group, call, x_shard.movedim(call.split.dim, 0), at_last(multiply, group), gathered
    )


def _gather_columns(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    return_gathered: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers the last dimension, which the matmul sums over."""
    x_columns, lead = x_shard.flatten(0, -2), x_shard.shape[:-1]
    outs = [new_result(x_shard, shape) for shape in call.outs]
    gathered = new_result(x_shard, call.whole) if return_gathered else None
    multiply = _multiply_blocks if x_shard.dtype in NARROW else _add_products_of_shards
    multiply(group, call, x_columns, weights, outs, gathered)
    kept = gathered.view(*lead, call.split.length) if gathered is not None else None
    return kept, [out.view(*lead, out.shape[1]) for out in outs]


def _add_products_of_shards(
    group: Group,
    call: PreparedGather,
    x_columns: torch.Tensor,
    weights: list[torch.Tensor],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    sums = [Sum(out, group.world_size) for out in outs]
    rows = call.front.along(0)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        part = aligned(shards[0])
        for total, weight in zip(sums, weights, strict=True):
            total.add_product(part, rows.of(rank, weight))

    gather_shards(group, call, x_columns, consume, gathered)
    for total in sums:
        total.finish()


def _multiply_blocks(
    group: Group,
    call: PreparedGather,
    x_columns: torch.Tensor,
    weights: list[torch.Tensor],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """For 16-bit types: products of shards would each be rounded, whole rows are rounded once."""
    count, split = x_columns.shape[0], call.front.along(1)
    at_a_time = _BLOCK_ROWS if x_columns.device.type == "cpu" else max(1, count)

    def multiply(block: torch.Tensor, rows: slice) -> None:
        for out, weight in zip(outs, weights, strict=True):
            torch.mm(block, weight, out=out[rows])

    with group.own_lock():  # no other call of this rank comes in between
        for begin in range(0, max(1, count), at_a_time):
            rows = slice(begin, min(count, begin + at_a_time))
            if gathered is None:
                block = new_result(x_columns, (rows.stop - begin, split.length))
            else:
                block = gathered[rows]
            runtime.run(GatherIntoCall(group, [x_columns[rows]], [block], split, call.name))
            more = rows.stop < count and runtime.exchanges(group, x_columns)
            run = partial(multiply, block, rows)
            exchange.traced(group, "consume", call.name, run, before=more)


def fake_results(
    x_shard: torch.Tensor, split: Split, columns: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Returns tensors of the gathered shape, except for the last dimension."""
    front, shape = split.leading(split.whole_shape(x_shard.shape))
    return [
        x_shard.new_empty([*shape[:-1], count], dtype=dtype).movedim(front.dim, split.dim)
        for count, dtype in zip(columns, dtypes, strict=True)
    ]


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
    """Returns the results' shapes, strides and dtypes (torch's are wrong for some dims)."""
    # Symbolic sizes have no hash, so no prepared call is looked up.
    split = _checked(
        Operand.of(x_shard), list(map(Operand.of, weights)), gather_dim, sizes, rank,
        world_size_of(group_name),
    )  # fmt: skip
    inner = split.whole_shape(x_shard.shape)[-1]
    columns = [inner, *(weight.shape[1] for weight in weights)]
    gathered, *outs = fake_results(x_shard, split, columns, [x_shard.dtype] * len(columns))
    return (gathered if return_A else None), outs


# --- declarations ----------------------------------------------------------------------------

_GATHER_OP = Op(
    name=GATHER,
    types=products_of_gathered,
    schema=TORCHS,
    kernel=all_gather_matmul_kernel,
    fake=all_gather_matmul_fake,
    prepare=prepare_gather,
    gradient=BackwardOp(f"_{GATHER}_backward"),
    autocast=autocast.cast,
    vmap=ONE_BY_ONE,
    example=lambda on: arguments(on.rand(4, 6), [on.rand(6, 5), on.rand(6, 3)], 0, on.group_name),
    replaces_torch=True,
)
declare(
    _GATHER_OP,
    _GATHER_OP.with_sizes(
        WITH_SIZES[GATHER],
        f"(Tensor A, Tensor[] Bs, int gather_dim, str group_name, {SIZES}, *, bool return_A=True)"
        " -> (Tensor?, Tensor[])",
        lambda on: arguments(
            on.rand(on.rows, 4),
            [on.rand(4, 3)],
            0,
            on.group_name,
            *on.uneven,
            return_A=False,
        ),
    ),
)


# --- entry points ----------------------------------------------------------------------------


@overload
def all_gather_matmul(
    shard: torch.Tensor,
    weights: Weights,
    *,
    gather_dim: int = 0,
    group: GroupLike,
    return_gathered: Literal[False] = False,
    sizes: Sequence[int] | None = None,
) -> Weights: ...


@overload
def all_gather_matmul(
    shard: torch.Tensor,
    weights: Weights,
    *,
    gather_dim: int = 0,
    group: GroupLike,
    return_gathered: Literal[True],
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Weights]: ...


@entry_point(GATHER, WORDS_OF_GATHERS)
def all_gather_matmul(
    shard: torch.Tensor,
    weights: Weights,
    *,
    gather_dim: int = 0,
    group: GroupLike,
    return_gathered: bool = False,
    sizes: Sequence[int] | None = None,
) -> Weights | tuple[torch.Tensor, Weights]:
    """Multiplies an all-gathered tensor with one or several matrices, without gathering it first.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [gathered @ weight for weight in weights]

    Args:
        shard: (..., M, K), this rank's part along `gather_dim`.
        weights: a (K, N) matrix or several (K: the columns of the gathered tensor).
        gather_dim: the dimension to gather, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        return_gathered: also return the gathered tensor.
        sizes: the length of every rank's shard along `gather_dim`; by default all are as this
            rank's.

    Returns the output, or a list of outputs for a sequence of weights; with `return_gathered` the
    pair (gathered, outputs). Differentiable in shard and weights. Peers read a contiguous shard in
    symmetric memory that was rendezvoused with the group in place, if all ranks pass such shards
    (on CPU where the gathered tensor has more than 64 MiB). Bits depend neither on where
    the shard lies nor on `return_gathered`. Raises `ValueError` or `TypeError` for arguments that
    do not fit, before any communication; `RuntimeError` when a peer fails or disagrees. Source:
    torch's `symm_mem::fused_all_gather_matmul`.
    """
    name = group_name(group)
    uneven = uneven_parts(sizes, name)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    gathered, outputs = caller(GATHER, shard, uneven)(
        shard, matrices, gather_dim, name, *uneven, return_A=return_gathered
    )
    result: Weights = outputs[0] if isinstance(weights, torch.Tensor) else outputs
    return (gathered, result) if return_gathered else result
