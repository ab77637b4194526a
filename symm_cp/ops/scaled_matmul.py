"""Fused all-gather-scaled-matmul and scaled-matmul-reduce-scatter: float8 with scales.

As torch's `_scaled_mm`, the ops have no gradient: float8 training computes its own from scaled ops.
A scale of A is one number (tensor-wise), or one for each row of A: of this rank's rows (sharded) or
of all ranks' rows (replicated).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.alignment import aligned
from symm_cp.memory import GroupLike, group_name
from symm_cp.ops.common import (
    check_dim,
    check_divisible,
    check_reduce_op,
    group_of,
    in_test_mode,
    lib,
    new_result,
    register_kernel,
    rows_of,
    unfused_all_gather,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)
from symm_cp.ops.scaled_mm import finish, scaled_mm_out
from symm_cp.ops.transforms import register_no_gradient
from symm_cp.shards import Split

_GATHER = "fused_all_gather_scaled_matmul"
_SCATTER = "fused_scaled_matmul_reduce_scatter"

# ScalarType arguments reach Python kernels as torch's numbers.
_DTYPES = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
}


def _dtype(op: str, given: Any) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if given not in _DTYPES:
        raise TypeError(f"{op}: out_dtype number {given} is not a floating dtype")
    return _DTYPES[given]


def _check_operands(op: str, A: torch.Tensor, B: torch.Tensor, name: str) -> None:
    if A.dim() < 2:
        raise ValueError(f"{op}: A must have at least 2 dimensions, has shape {list(A.shape)}")
    if B.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix, has shape {list(B.shape)}")


def _check_weight_scale(op: str, name: str, scale: torch.Tensor, B: torch.Tensor) -> None:
    if scale.numel() != 1 and list(scale.shape) != [1, B.shape[1]]:
        raise ValueError(
            f"{op}: {name} of shape {list(scale.shape)} does not fit B of shape {list(B.shape)}: "
            f"needs one number or {[1, B.shape[1]]}"
        )


def scale_mode(A: torch.Tensor, scale: torch.Tensor, dim: int, world_size: int) -> str:
    """Returns "tensor", "sharded" or "replicated"; raises `ValueError` for another shape.

    When A has one column a scale of A's shape may be meant either way; as in torch it is taken as
    one for each row.
    """
    full = list(A.shape[:-1])
    if dim < len(full):  # gathering the last dimension makes rows longer, not more
        full[dim] *= world_size
    if scale.shape[:-1] == A.shape[:-1] and scale.dim() == A.dim() and scale.shape[-1] == 1:
        return "sharded"
    if scale.numel() == 1:
        return "tensor"
    if list(scale.shape[:-1]) == full and scale.shape[-1] == 1:
        return "replicated"
    raise ValueError(
        f"{_GATHER}: A_scale of shape {list(scale.shape)} fits no mode for A of shape "
        f"{list(A.shape)}: needs one number, {[*A.shape[:-1], 1]} (this rank's rows) or "
        f"{[*full, 1]} (all rows)"
    )


def _check_gather(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    dim: int,
    world_size: int,
    lists: Mapping[str, Sequence[Any]],
) -> int:
    for index, B in enumerate(Bs):
        _check_operands(_GATHER, A, B, f"B[{index}]")
    for name, values in lists.items():
        if len(values) != len(Bs):
            raise ValueError(f"{_GATHER}: {len(values)} {name} for {len(Bs)} Bs: needs as many")
    dim = check_dim(_GATHER, "gather_dim", dim, A.dim())
    inner = A.shape[-1] * (world_size if dim == A.dim() - 1 else 1)
    for index, B in enumerate(Bs):
        if B.shape[0] != inner:
            raise ValueError(
                f"{_GATHER}: B[{index}] of shape {list(B.shape)} needs {inner} rows to follow A of "
                f"shape {list(A.shape)}"
            )
        _check_weight_scale(_GATHER, f"B_scales[{index}]", lists["B_scales"][index], B)
    return dim


def _all_gather_scaled_matmul_kernel(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of(group_name)
    W = group.world_size
    lists = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    dim = _check_gather(A, Bs, gather_dim, W, lists)
    mode = scale_mode(A, A_scale, dim, W)
    dtypes = [_dtype(_GATHER, given) or A.dtype for given in out_dtypes]
    options: list[dict[str, Any]] = [
        {"bias": bias, "scale_result": result_scale, "fast": fast}
        for bias, result_scale, fast in zip(biases, result_scales, use_fast_accum, strict=True)
    ]
    what = what_is(_GATHER, A, detail=f"scale {list(A_scale.shape)} gather_dim={dim}")
    columns = dim == A.dim() - 1
    if columns or in_test_mode():
        return _gathered_then_scaled(
            A, Bs, A_scale, B_scales, dim, mode, dtypes, options, group_name, what
        )
    shard = [A.movedim(dim, 0)]
    if mode == "sharded":
        shard.append(A_scale.movedim(dim, 0))
    rows = shard[0].shape[:-1].numel()
    outs = [new_result(A, (rows * W, B.shape[1]), d) for B, d in zip(Bs, dtypes, strict=True)]
    lead = [shard[0].shape[0] * W, *shard[0].shape[1:-1]]
    A_full = new_result(A, [*lead, A.shape[-1]])

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        A_rows = aligned(shards[0]).view(rows, A.shape[-1])
        if mode == "sharded":
            scale = aligned(shards[1]).view(rows, 1)
        elif mode == "replicated":
            scale = rows_of(A_scale, dim, rank, W).contiguous()
        else:
            scale = A_scale
        for out, B, scale_b, extra in zip(outs, Bs, B_scales, options, strict=True):
            part = out.narrow(0, rank * rows, rows)
            scaled_mm_out(A_rows, B, scale, scale_b, part, **extra)

    runtime.of(A, group).all_gather_and_consume(group, shard, consume, what, gathered=A_full)
    results = [out.view(*lead, out.shape[1]).movedim(0, dim) for out in outs]
    return A_full.movedim(0, dim), results


def _gathered_then_scaled(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    dim: int,
    mode: str,
    dtypes: list[torch.dtype],
    options: list[dict[str, Any]],
    group_name: str,
    what: bytes,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers A, then multiplies: for the last dimension, and as the definition in test mode.

    The last dimension is summed over. Products of its shards would each be rounded to the output
    type, and be scaled and biased once a rank, so the shards are brought together first. Their
    rows' scales are those of whole rows: the same on all ranks.
    """
    group = group_of(group_name)
    columns = dim == A.dim() - 1
    scale = A_scale
    if in_test_mode():
        # Bytes, because gloo does not know float8.
        A_full = unfused_all_gather(A.view(torch.uint8), dim, group_name).view(A.dtype)
        if mode == "sharded" and not columns:
            scale = unfused_all_gather(A_scale, dim, group_name)
    else:
        rows = A.flatten(0, -2)
        A_full = new_result(A, (rows.shape[0], rows.shape[1] * group.world_size))
        runtime.of(A, group).all_gather_and_consume(
            group,
            [rows],
            lambda shards, rank: None,
            what,
            gathered=A_full,
            split=Split.equal(rows.shape[1], group.world_size, dim=1),
        )
        A_full = A_full.view(*A.shape[:-1], A_full.shape[-1])
    lead = A_full.shape[:-1]
    if mode != "tensor":
        scale = scale.flatten(0, -2).contiguous()
    results = []
    for B, scale_b, dtype, extra in zip(Bs, B_scales, dtypes, options, strict=True):
        out = A.new_empty(lead.numel(), B.shape[1], dtype=dtype)
        scaled_mm_out(A_full.flatten(0, -2), B, scale, scale_b, out, **extra)
        results.append(out.view(*lead, B.shape[1]))
    return A_full, results


def _all_gather_scaled_matmul_fake(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    W = world_size_of(group_name)
    lists = {"B_scales": B_scales, "biases": biases, "out_dtypes": out_dtypes}
    dim = _check_gather(A, Bs, gather_dim, W, lists)
    scale_mode(A, A_scale, dim, W)
    dtypes = [_dtype(_GATHER, given) or A.dtype for given in out_dtypes]
    shape = list(A.shape)
    shape[dim] *= W
    if dim == A.dim() - 1:
        front, dim = shape, 0
    else:
        front = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    return A.new_empty(front).movedim(0, dim), [
        A.new_empty([*front[:-1], B.shape[1]], dtype=d).movedim(0, dim)
        for B, d in zip(Bs, dtypes, strict=True)
    ]


# --- fused_scaled_matmul_reduce_scatter ------------------------------------------------------


def _check_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_dim: int,
    dim: int,
    output_shape: Sequence[int] | None,
    world_size: int,
    out_dtype: torch.dtype,
) -> tuple[list[int], int, int, bool]:
    """Returns the unscattered output's shape, both scatter dims as numbers >= 0, and `mean`."""
    _check_operands(_SCATTER, A, B, "B")
    if A.shape[-1] != B.shape[0]:
        raise ValueError(
            f"{_SCATTER}: B of shape {list(B.shape)} needs {A.shape[-1]} rows to follow A of shape "
            f"{list(A.shape)}"
        )
    _check_weight_scale(_SCATTER, "B_scale", B_scale, B)
    if A_scale.numel() != 1 and list(A_scale.shape) != [*A.shape[:-1], 1]:
        raise ValueError(
            f"{_SCATTER}: A_scale of shape {list(A_scale.shape)} does not fit A of shape "
            f"{list(A.shape)}: needs one number or {[*A.shape[:-1], 1]}"
        )
    shape = [*A.shape[:-1], B.shape[1]]
    full = list(output_shape) if output_shape is not None else shape
    if math.prod(full) != math.prod(shape) or not full or full[-1] != B.shape[1]:
        raise ValueError(
            f"{_SCATTER}: output_shape={full} does not hold a product of shape {shape}"
        )
    orig_dim = check_dim(_SCATTER, "orig_scatter_dim", orig_dim, len(full))
    check_dim(_SCATTER, "scatter_dim_after_maybe_reshape", dim, A.dim())
    check_divisible(_SCATTER, "orig_scatter_dim", orig_dim, full[orig_dim], world_size)
    mean = check_reduce_op(_SCATTER, "out_dtype", _partial_dtype(out_dtype), reduce_op)
    return full, orig_dim, dim % A.dim(), mean


def _partial_dtype(out_dtype: torch.dtype) -> torch.dtype:
    # Sums of float8 numbers would lose nearly all digits: float8 results are reduced in float32.
    return torch.float32 if out_dtype.itemsize == 1 else out_dtype


def _own_columns(
    bias: torch.Tensor | None, columns: bool, rank: int, world_size: int
) -> torch.Tensor | None:
    if bias is None or not columns or bias.dim() == 0:
        return bias
    return bias.chunk(world_size, -1)[rank]


def _scaled_matmul_reduce_scatter_kernel(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    group = group_of(group_name)
    W = group.world_size
    dtype = _dtype(_SCATTER, out_dtype) or A.dtype
    full, dim, _, mean = _check_scatter(
        A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape,
        output_shape, W, dtype,
    )  # fmt: skip
    # The rows of A are the rows of the output, in whatever shape A came: view A as the output is.
    view = A.reshape(*full[:-1], A.shape[-1])
    # (1, 1) is one number to `_scaled_mm`, and also the scale of a single row.
    scale = A_scale.reshape((1, 1) if A_scale.numel() == 1 else (*full[:-1], 1))
    columns = dim == len(full) - 1
    n = B.shape[1] // W if columns else B.shape[1]

    def multiply(rank: int, into: torch.Tensor) -> None:
        rows = view.flatten(0, -2) if columns else rows_of(view, dim, rank, W)
        scale_a, scale_b, right = scale, B_scale, B
        if scale.numel() != 1:
            part = scale.flatten(0, -2) if columns else rows_of(scale, dim, rank, W)
            scale_a = part.contiguous()
        if columns:
            right = B.narrow(1, rank * n, n)
            if B_scale.numel() == B.shape[1] != 1:
                scale_b = B_scale.narrow(-1, rank * n, n).contiguous()
        scaled_mm_out(
            rows.contiguous(), right, scale_a, scale_b, into.flatten(0, -2), fast=use_fast_accum
        )

    bias = _own_columns(bias, columns, group.rank, W)
    front = list(full)
    front[dim] //= W
    if not columns:
        front = [front[dim], *front[:dim], *front[dim + 1 :]]
    out = new_result(A, front, _partial_dtype(dtype))
    if in_test_mode():
        parts = []
        for rank in range(W):
            multiply(rank, out)
            parts.append(out.clone())
        total = unfused_reduce_scatter(torch.cat(parts), reduce_op, 0, group_name).view(front)
    else:
        what = what_is(_SCATTER, A, detail=f"N={B.shape[1]} scatter_dim={dim} {reduce_op}")
        runtime.of(out, group).produce_and_reduce_scatter(group, multiply, out, what, mean=mean)
        total = out
    if not columns:
        total = total.movedim(0, dim)
    # The bias is added to the sum: once, not once a rank.
    return finish(total, bias, result_scale, dtype).contiguous()


def _scaled_matmul_reduce_scatter_fake(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    W = world_size_of(group_name)
    dtype = _dtype(_SCATTER, out_dtype) or A.dtype
    full, dim, _, _ = _check_scatter(
        A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape,
        output_shape, W, dtype,
    )  # fmt: skip
    full[dim] //= W
    return A.new_empty(full, dtype=dtype)


def register() -> None:
    """Adds the kernels, and fake kernels (torch's are wrong for the last dimension)."""
    register_kernel(_GATHER, _all_gather_scaled_matmul_kernel, replaces_torch=True)
    register_kernel(_SCATTER, _scaled_matmul_reduce_scatter_kernel, replaces_torch=True)
    lib.impl(_GATHER, _all_gather_scaled_matmul_fake, "Meta", allow_override=True)
    lib.impl(_SCATTER, _scaled_matmul_reduce_scatter_fake, "Meta", allow_override=True)
    for name in (_GATHER, _SCATTER):
        register_no_gradient(
            name, "as torch._scaled_mm; write a torch.autograd.Function whose backward scales"
        )


# --- entry points ----------------------------------------------------------------------------


def _as_list(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


def scaled_all_gather_matmul(
    shard: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    shard_scale: torch.Tensor,
    weight_scales: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: GroupLike,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    result_scale: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | Sequence[torch.dtype | None] | None = None,
    use_fast_accum: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Multiplies an all-gathered float8 tensor with matrices, rescaling as `torch._scaled_mm` does.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [torch._scaled_mm(gathered.flatten(0, -2), w, scale, w_scale, ...) ...]

    Args:
        shard: float8 (..., M, K); weights: float8 (K, N), column-major as `_scaled_mm` needs.
        shard_scale: float32; one number, (..., M, 1) of this rank's rows, or of all ranks' rows.
        weight_scales: float32; one number, or (1, N), for each weight.
        bias, result_scale, out_dtype: as in `_scaled_mm`, one for all weights or one for each.

    Returns (gathered, outputs), a list of outputs for a sequence of weights. No gradient, as
    `_scaled_mm`. Errors as for `all_gather_matmul`. Source: torch's
    `symm_mem::fused_all_gather_scaled_matmul`.
    """
    single = isinstance(weights, torch.Tensor)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    count = len(matrices)
    gathered, outputs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        shard,
        matrices,
        shard_scale,
        _as_list(weight_scales, count),
        gather_dim,
        group_name(group),
        _as_list(bias, count),
        _as_list(result_scale, count),
        _as_list(out_dtype, count),
        [use_fast_accum] * count,
    )
    return gathered, outputs[0] if single else outputs


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
) -> torch.Tensor:
    """Reduce-scatters a scaled float8 product, sending each part as soon as it is computed.

    Same result as `torch._scaled_mm` without a bias, reduce-scattered along `scatter_dim`, with the
    bias then added once. `a` is float8 (..., M, K), its scale one number or (..., M, 1). Results in
    float8 are reduced in float32. No gradient, as `_scaled_mm`. Errors as for `all_gather_matmul`.
    Source: torch's `symm_mem::fused_scaled_matmul_reduce_scatter`.
    """
    dim = check_dim(_SCATTER, "scatter_dim", scatter_dim, a.dim())
    result: torch.Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        a, weight, a_scale, weight_scale, reduce_op, dim, dim, group_name(group),
        [*a.shape[:-1], weight.shape[-1]], bias, result_scale, out_dtype, use_fast_accum,
    )  # fmt: skip
    return result
