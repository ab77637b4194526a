"""The kernel of fused all-gather-scaled-matmul.

A scale of A is one number (tensor-wise), or one for each row of A: of this rank's rows (sharded) or
of all ranks' rows (replicated).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from symm_cp.ops.products import as_rows
from symm_cp.ops.scaled_operands import (
    Weight,
    check_bias,
    check_inner,
    check_kernel,
    check_operands,
    check_result,
    check_weight_scale,
    dtype_of,
)
from symm_cp.tensors.alignment import aligned
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

GATHER = "fused_all_gather_scaled_matmul"


def scale_mode(x_shard: torch.Tensor, scale: torch.Tensor, split: Split) -> str:
    """Returns "tensor", "sharded" or "replicated"; raises `ValueError` for another shape.

    When A has one column a scale of A's shape may be meant either way; as in torch it is taken as
    one for each row. Where shards differ, one number must have fewer dimensions than A: else a rank
    that has one row would take it for the scale of that row, and its peers for one of all.
    """
    own = [*x_shard.shape[:-1], 1]
    # Gathering the last dimension makes rows longer, not more.
    by_columns = split.dim == x_shard.dim() - 1
    full = own if by_columns else split.whole_shape(own)
    if list(scale.shape) == own:
        return "sharded"
    if scale.numel() == 1 and (split.is_equal or by_columns or scale.dim() < x_shard.dim()):
        return "tensor"
    if list(scale.shape) == full:
        return "replicated"
    one = "one number" if split.is_equal or by_columns else "one number of no dimensions"
    raise ValueError(
        f"{GATHER}: A_scale of shape {list(scale.shape)} fits no mode for A of shape "
        f"{list(x_shard.shape)}: needs {one}, {own} (this rank's rows) or {full} (all rows)"
    )


def _check_gather(
    x_shard: torch.Tensor,
    x_scale: torch.Tensor,
    matrices: list[torch.Tensor],
    gather_dim: int,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
    by_weight: Mapping[str, Sequence[Any]],
) -> tuple[Split, list[Weight]]:
    """`by_weight` are the arguments that have an entry for each weight."""
    for index, matrix in enumerate(matrices):
        check_operands(GATHER, x_shard, matrix, f"B[{index}]")
    for name, values in by_weight.items():
        if len(values) != len(matrices):
            raise ValueError(
                f"{GATHER}: {len(values)} {name} for {len(matrices)} Bs: needs as many"
            )
    dim = check_dim(GATHER, "gather_dim", gather_dim, x_shard.dim())
    split = gather_split(GATHER, "gather_dim", dim, x_shard, sizes, rank, world_size)
    inner = split.length if dim == x_shard.dim() - 1 else x_shard.shape[-1]
    weights = []
    for index, (matrix, scale, bias, result_scale, dtype, fast) in enumerate(
        zip(matrices, *by_weight.values(), strict=True)
    ):
        check_inner(GATHER, f"B[{index}]", x_shard, matrix, inner)
        check_weight_scale(GATHER, f"B_scales[{index}]", scale, matrix)
        out_dtype = dtype_of(GATHER, dtype) or x_shard.dtype
        check_result(GATHER, out_dtype)
        scales = {"A_scale": x_scale, f"B_scales[{index}]": scale}
        check_kernel(GATHER, f"B[{index}]", x_shard, matrix, scales, out_dtype, [matrix.shape[1]])
        check_bias(GATHER, f"biases[{index}]", bias, matrix, out_dtype)
        weights.append(Weight(matrix, scale, out_dtype, bias, result_scale, fast))
    return split, weights


def all_gather_scaled_matmul_kernel(
    x_shard: torch.Tensor,
    matrices: list[torch.Tensor],
    x_scale: torch.Tensor,
    weight_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The op, on this rank's shard; `sizes` is the length of every rank's where they differ."""
    group = group_of(group_name, rank)
    by_weight = {
        "B_scales": weight_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    split, weights = _check_gather(
        x_shard, x_scale, matrices, gather_dim, sizes, group.rank, group.world_size, by_weight
    )
    mode = scale_mode(x_shard, x_scale, split)
    if mode == "replicated" and not split.is_equal:
        # A rank that has all rows cannot tell which of the two it was given.
        x_scale, mode = split.of(group.rank, x_scale), "sharded"
    if split.dim == x_shard.dim() - 1 or in_test_mode():
        return _gathered_then_scaled(group, x_shard, x_scale, weights, split, mode)
    return _scaled_as_gathered(group, x_shard, x_scale, weights, split, mode)


def _gather_name(x_shard: torch.Tensor, x_scale: torch.Tensor, split: Split, mode: str) -> bytes:
    scale = list(x_scale.shape) if split.is_equal else mode
    return what_is(GATHER, x_shard, split=split, detail=f"scale {scale} gather_dim={split.dim}")


def _scaled_as_gathered(
    group: Group,
    x_shard: torch.Tensor,
    x_scale: torch.Tensor,
    weights: list[Weight],
    split: Split,
    mode: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers another dimension than the last: the shards' products are the result's rows."""
    dim, front = split.dim, split.along(0)
    shard = [x_shard.movedim(dim, 0)]
    if mode == "sharded":
        shard.append(x_scale.movedim(dim, 0))
    shape = front.whole_shape(shard[0].shape)
    outs = [new_result(x_shard, [*shape[:-1], w.matrix.shape[1]], w.dtype) for w in weights]
    gathered = new_result(x_shard, shape)

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        scale = x_scale
        if mode == "sharded":
            scale = aligned(shards[1]).flatten(0, -2)
        elif mode == "replicated":
            scale = as_rows(split.of(rank, x_scale), dim)
        rows = aligned(shards[0]).flatten(0, -2)
        for out, weight in zip(outs, weights, strict=True):
            weight.multiply(rows, scale, front.of(rank, out).flatten(0, -2))

    runtime.of(x_shard, group).all_gather_and_consume(
        group,
        shard,
        consume,
        _gather_name(x_shard, x_scale, split, mode),
        shapes=front.shard_shapes(*shard),
        gathered=gathered,
        split=front,
    )
    return gathered.movedim(0, dim), [out.movedim(0, dim) for out in outs]


def _gathered_then_scaled(
    group: Group,
    x_shard: torch.Tensor,
    x_scale: torch.Tensor,
    weights: list[Weight],
    split: Split,
    mode: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers A, then multiplies: for the last dimension, and as the definition in test mode.

    The last dimension is summed over. Products of its shards would each be rounded to the output
    type, and be scaled and biased once a rank, so the shards are brought together first. Their
    rows' scales are those of whole rows: the same on all ranks.
    """
    dim = split.dim
    if in_test_mode():
        # Bytes, because gloo does not know float8.
        as_bytes = unfused_all_gather(x_shard.view(torch.uint8), dim, group.name, split)
        gathered = as_bytes.view(x_shard.dtype)
        if mode == "sharded" and dim != x_shard.dim() - 1:
            x_scale = unfused_all_gather(x_scale, dim, group.name, split)
    else:
        x_columns, columns = x_shard.flatten(0, -2), split.along(1)
        gathered = new_result(x_shard, columns.whole_shape(x_columns.shape))
        runtime.of(x_shard, group).all_gather_and_consume(
            group,
            [x_columns],
            lambda shards, rank: None,
            _gather_name(x_shard, x_scale, split, mode),
            shapes=columns.shard_shapes(x_columns),
            gathered=gathered,
            split=columns,
        )
        gathered = gathered.view(*x_shard.shape[:-1], split.length)
    scale = x_scale if mode == "tensor" else x_scale.flatten(0, -2)
    lead = gathered.shape[:-1]
    outs = [new_result(x_shard, [*lead, w.matrix.shape[1]], w.dtype) for w in weights]
    for out, weight in zip(outs, weights, strict=True):
        weight.multiply(gathered.flatten(0, -2), scale, out.flatten(0, -2))
    return gathered, outs


def all_gather_scaled_matmul_fake(
    x_shard: torch.Tensor,
    matrices: list[torch.Tensor],
    x_scale: torch.Tensor,
    weight_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Shapes, strides and dtypes of what the op returns."""
    by_weight = {
        "B_scales": weight_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    world_size = world_size_of(group_name)
    split, weights = _check_gather(
        x_shard, x_scale, matrices, gather_dim, sizes, rank, world_size, by_weight
    )
    scale_mode(x_shard, x_scale, split)
    front, shape = split.leading(split.whole_shape(x_shard.shape))

    def result(columns: int, dtype: torch.dtype) -> torch.Tensor:
        out = x_shard.new_empty([*shape[:-1], columns], dtype=dtype)
        return out.movedim(front.dim, split.dim)

    outs = [result(weight.matrix.shape[1], weight.dtype) for weight in weights]
    return result(shape[-1], x_shard.dtype), outs
