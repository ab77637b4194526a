"""Fused all-gather-matmul of float8 matrices with scales.

Shapes as in gather.py. A scale of A is one number (tensor-wise), or one for each row of A: of this
rank's rows (sharded) or of all ranks' rows (replicated); or one for each block of this rank's rows
(block_scales.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from symm_cp.group.memory import Group, GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    SIZES,
    WITH_SIZES,
    OnRank,
    Weights,
    caller,
    check_dim,
    gather_split,
    kernel_and_fake,
    name_of,
    uneven_parts,
)
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.matmul import algorithms
from symm_cp.ops.matmul.gather import (
    PreparedGather,
    fake_results,
    gather_rows,
    gather_shards,
    planned,
)
from symm_cp.ops.matmul.operands import (
    WORDS_OF_GATHERS,
    Operand,
    check_bias,
    check_float8,
    check_matrix,
    check_product,
    check_weight_scale,
    result_dtype,
)
from symm_cp.ops.matmul.scaled_mm import (
    ANY_SIZE,
    NO_GRADIENT,
    SCALED_GATHER,
    RowScales,
    ScaledRows,
    ScaledWeight,
    multiply_scaled,
)
from symm_cp.ops.op import ONE_BY_ONE, TORCHS, Arguments, Caller, Op, arguments, declare
from symm_cp.runtime import exchange
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

_LISTS = (list, tuple)


def _check_scaled(
    x_shard: torch.Tensor,
    x_scale: torch.Tensor,
    matrices: list[torch.Tensor],
    gather_dim: int,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
    by_weight: Mapping[str, Sequence[Any]],
) -> tuple[Split, list[ScaledWeight], RowScales]:
    """Checks the arguments; `by_weight` holds those with an entry for each weight."""
    op = SCALED_GATHER
    for index, matrix in enumerate(matrices):
        check_float8(op, x_shard, matrix, f"B[{index}]")
    for name, values in by_weight.items():
        if len(values) != len(matrices):
            raise ValueError(
                f"{op}: got {len(values)} {name} for {len(matrices)} Bs; counts must match"
            )
    dim = check_dim(op, "gather_dim", gather_dim, x_shard.dim())
    split = gather_split(op, "gather_dim", dim, x_shard, sizes, rank, world_size)
    inner = split.length if dim == x_shard.dim() - 1 else x_shard.shape[-1]
    weights = []
    for index, (matrix, scale, bias, result_scale, dtype, fast) in enumerate(
        zip(matrices, *by_weight.values(), strict=True)
    ):
        check_matrix(op, f"B[{index}]", matrix, x_shard, inner)
        check_weight_scale(op, f"B_scales[{index}]", scale, matrix)
        out_dtype = result_dtype(op, dtype, x_shard)
        scales = {"A_scale": x_scale, f"B_scales[{index}]": scale}
        check_product(op, f"B[{index}]", x_shard, matrix, scales, out_dtype)
        check_bias(op, f"biases[{index}]", bias, matrix, out_dtype)
        weights.append(ScaledWeight(matrix, scale, out_dtype, bias, result_scale, fast))
    return split, weights, RowScales.of(x_shard, x_scale, split)


def _all_gather_scaled_matmul(
    place: OnRank,
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
    names = ("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum")
    values = (weight_scales, biases, result_scales, out_dtypes, use_fast_accum)
    by_weight: dict[str, list[Any]] = dict(zip(names, values, strict=True))
    split, weights, scales = _check_scaled(
        x_shard, x_scale, matrices, gather_dim, sizes, place.rank, place.world_size, by_weight
    )
    columns, group = [weight.matrix.shape[1] for weight in weights], place.group
    if group is None:
        dtypes = [x_shard.dtype, *(weight.dtype for weight in weights)]
        inner = split.whole_shape(x_shard.shape)[-1]
        fake, *fakes = fake_results(x_shard, split, [inner, *columns], dtypes)
        return fake, fakes
    if scales.mode == "replicated" and not split.is_equal:
        # On a rank that has all rows, sharded and replicated scales cannot be told apart.
        scales = RowScales(split.of(group.rank, x_scale), "sharded", split)
    by_shape = split.is_equal and not scales.of_blocks
    kind = list(scales.scale.shape) if by_shape else scales.mode
    call = planned(SCALED_GATHER, Operand.of(x_shard), columns, split, f"scale {kind} ")
    if algorithms.at_once(group, SCALED_GATHER, x_shard, call.whole, ANY_SIZE):
        return _multiply_at_once(group, call, x_shard, scales, weights)
    call = call._replace(name=algorithms.part_by_part(group, x_shard, call.name))
    if call.by_columns:
        return _gather_columns(group, call, x_shard, scales, weights)
    outs = [
        new_result(x_shard, shape, weight.dtype)
        for shape, weight in zip(call.outs, weights, strict=True)
    ]
    gathered = new_result(x_shard, call.whole)
    gather_rows(group, call, x_shard, weights, outs, gathered, multiply_scaled, scales)
    return gathered.movedim(0, split.dim), [out.movedim(0, split.dim) for out in outs]


def _gather_columns(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    scales: RowScales,
    weights: list[ScaledWeight],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers the last dimension, which the matmul sums over, then multiplies.

    Products of shards would each be rounded to the output type, and be scaled and biased once a
    rank. Row scales belong to whole rows: they are the same on all ranks.
    """
    gathered = new_result(x_shard, call.whole)
    gather_shards(group, call, x_shard.flatten(0, -2), lambda shards, rank: None, gathered)
    gathered = gathered.view(*x_shard.shape[:-1], call.split.length)
    return _multiplied(gathered, scales.scale, scales, weights)


def _multiply_at_once(
    group: Group,
    call: PreparedGather,
    x_shard: torch.Tensor,
    scales: RowScales,
    weights: list[ScaledWeight],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers A by one exchange, and the scales of its rows by another; multiplies all rows."""
    dim, by_columns, scale = call.split.dim, call.by_columns, scales.scale

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(0, -2) if by_columns else tensor.movedim(dim, 0)

    gathered = exchange.all_gather(group, moved(x_shard), call.front, call.name, keep=True)
    if scales.mode != "tensor":
        scale = moved(scale)
        if scales.sharded and not by_columns:
            detail = f"gather_dim={dim} scales"
            name = name_of(SCALED_GATHER, scale.dtype, scales.scale.shape, detail, call.split)
            scale = exchange.all_gather(group, scale, call.front, name)

    def multiply() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return _multiplied(gathered, scale, scales, weights)

    whole, outs = exchange.traced(group, "consume", call.name, multiply)
    if by_columns:
        lead = x_shard.shape[:-1]
        return whole.view(*lead, whole.shape[1]), [out.view(*lead, out.shape[1]) for out in outs]
    return whole.movedim(0, dim), [out.movedim(0, dim) for out in outs]


def _multiplied(
    gathered: torch.Tensor, scale: torch.Tensor, scales: RowScales, weights: list[ScaledWeight]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the gathered tensor and its products; `scale` is in the order of its rows."""
    rows = ScaledRows(
        gathered.flatten(0, -2), scale if scales.mode == "tensor" else scale.flatten(0, -2)
    )
    lead = gathered.shape[:-1]
    outs = [new_result(gathered, [*lead, w.matrix.shape[1]], w.dtype) for w in weights]
    for out, weight in zip(outs, weights, strict=True):
        multiply_scaled(rows, weight, out=out.flatten(0, -2))
    return gathered, outs


# --- declaration -------------------------------------------------------------------------------

all_gather_scaled_matmul_kernel, all_gather_scaled_matmul_fake = kernel_and_fake(
    _all_gather_scaled_matmul
)


def _scaled_example(on: Caller, rows: int, *last: Any) -> Arguments:
    one = torch.tensor(1.0)
    return arguments(
        on.float8(rows, 16), [on.float8(16, 16).t()], one, [one.clone()], 0, on.group_name, [None],
        [None], [torch.float32], [False], *last,
    )  # fmt: skip


def _types(t: Any, A: Any, Bs: Any, gather_dim: Any, biases: Any, **rest: Any) -> Any:
    t.ignore(rest)
    gathered = t.all_gather(A, gather_dim)
    added = biases or [None] * len(Bs)
    products = [t.add(t.matmul(gathered, B), b) for B, b in zip(Bs, added, strict=True)]
    return gathered, products


_SCALED_GATHER_OP = Op(
    types=_types,
    name=SCALED_GATHER,
    schema=TORCHS,
    kernel=all_gather_scaled_matmul_kernel,
    fake=all_gather_scaled_matmul_fake,
    gradient=NO_GRADIENT,
    autocast=autocast.as_they_are,
    vmap=ONE_BY_ONE,
    example=lambda on: _scaled_example(on, 4),
    replaces_torch=True,
    # torch's kernels for CUDA take scales of blocks as well.
    torchs_fake="_fused_all_gather_scaled_matmul_fallback",
)
declare(
    _SCALED_GATHER_OP,
    _SCALED_GATHER_OP.with_sizes(
        WITH_SIZES[SCALED_GATHER],
        "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, "
        "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, "
        f"bool[] use_fast_accum, {SIZES}) -> (Tensor, Tensor[])",
        lambda on: _scaled_example(on, on.rows, *on.uneven),
    ),
)


@entry_point(SCALED_GATHER, WORDS_OF_GATHERS)
def scaled_all_gather_matmul(
    shard: torch.Tensor,
    weights: Weights,
    shard_scale: torch.Tensor,
    weight_scales: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: GroupLike,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    result_scale: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | Sequence[torch.dtype | None] | None = None,
    use_fast_accum: bool = False,
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Weights]:
    """Multiplies an all-gathered float8 tensor with matrices, rescaling as `torch._scaled_mm` does.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [torch._scaled_mm(gathered.flatten(0, -2), w, scale, w_scale, ...) ...]

    Args:
        shard: float8 (..., M, K); weights: float8 (K, N), column-major as `_scaled_mm` needs.
            With scales of blocks also float4.
        shard_scale: float32; one number, (..., M, 1) of this rank's rows, or of all ranks' rows.
            With sizes one number must have fewer dimensions than the shard. Or, on CPU, one for
            each block of this rank's rows: MXFP8 or NVFP4 (symm_cp/ops/matmul/block_scales.py).
        weight_scales: float32; one number, or (1, N), for each weight; or of the blocks of (N, K).
        bias, result_scale, out_dtype: as in `_scaled_mm`, one for all weights or one for each.
        gather_dim, group, sizes: as in `all_gather_matmul`.

    Returns (gathered, outputs), a list of outputs for a sequence of weights. No gradient, like
    `_scaled_mm`. Errors as for `all_gather_matmul`. Source: torch's
    `symm_mem::fused_all_gather_scaled_matmul`.
    """
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    count, name = len(matrices), group_name(group)
    scales, *options = [
        list(given) if isinstance(given, _LISTS) else [given] * count
        for given in (weight_scales, bias, result_scale, out_dtype, use_fast_accum)
    ]
    uneven = uneven_parts(sizes, name)
    call = caller(SCALED_GATHER, shard, uneven)
    gathered, outputs = call(
        shard, matrices, shard_scale, scales, gather_dim, name, *options, *uneven
    )
    return gathered, outputs[0] if isinstance(weights, torch.Tensor) else outputs
