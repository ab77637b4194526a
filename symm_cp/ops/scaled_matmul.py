"""Fused all-gather-scaled-matmul and scaled-matmul-reduce-scatter: float8 with scales.

Schemas, registration and entry points; the kernels are in scaled_gather.py and scaled_scatter.py.
As torch's `_scaled_mm`, the ops have no gradient: float8 training computes its own from scaled ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    SIZES,
    WITH_SIZES,
    Op,
    call_op,
    check_dim,
    entry_point,
    lib,
    named_with_sizes,
    register_kernel,
    uneven_parts,
    with_sizes,
)
from symm_cp.ops.override import fake_kernel
from symm_cp.ops.scaled_gather import (
    GATHER,
    all_gather_scaled_matmul_fake,
    all_gather_scaled_matmul_kernel,
)
from symm_cp.ops.scaled_scatter import (
    SCATTER,
    scaled_matmul_reduce_scatter_fake,
    scaled_matmul_reduce_scatter_kernel,
)
from symm_cp.ops.transforms import register_no_gradient

lib.define(
    f"{WITH_SIZES[GATHER]}(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, "
    "int gather_dim, str group_name, Tensor?[] biases, Tensor?[] result_scales, "
    f"ScalarType?[] out_dtypes, bool[] use_fast_accum, {SIZES}) -> (Tensor, Tensor[])"
)
lib.define(
    f"{WITH_SIZES[SCATTER]}(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
    "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
    "SymInt[]? output_shape, Tensor? bias, Tensor? result_scale, ScalarType? out_dtype, "
    f"bool use_fast_accum, {SIZES}) -> Tensor"
)

_KERNELS: dict[str, Op] = {
    GATHER: all_gather_scaled_matmul_kernel,
    SCATTER: scaled_matmul_reduce_scatter_kernel,
}
_FAKES: dict[str, Op] = {
    GATHER: all_gather_scaled_matmul_fake,
    SCATTER: scaled_matmul_reduce_scatter_fake,
}
# torch's kernels for CUDA take scales of blocks as well.
_TORCHS_FAKES = {
    GATHER: "_fused_all_gather_scaled_matmul_fallback",
    SCATTER: "_fused_scaled_matmul_reduce_scatter_fallback",
}


def register() -> None:
    """Adds the kernels, and fake kernels (torch's are wrong for the last dimension)."""
    for name, kernel in with_sizes(_KERNELS).items():
        register_kernel(name, kernel, replaces_torch=name in _KERNELS)
    for name, fake in with_sizes(_FAKES).items():
        torchs = _TORCHS_FAKES.get(name)
        served = fake if torchs is None else fake_kernel(fake, torchs)
        lib.impl(name, served, "Meta", allow_override=True)
    autocast.register(autocast.as_they_are, GATHER, SCATTER)
    for name in named_with_sizes(GATHER, SCATTER):
        register_no_gradient(
            name,
            "as torch._scaled_mm; write a torch.autograd.Function whose backward scales",
            is_torchs=name in _KERNELS,
        )


def _as_list(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


@entry_point
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
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Any]:
    """Multiplies an all-gathered float8 tensor with matrices, rescaling as `torch._scaled_mm` does.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [torch._scaled_mm(gathered.flatten(0, -2), w, scale, w_scale, ...) ...]

    Args:
        shard: float8 (..., M, K); weights: float8 (K, N), column-major as `_scaled_mm` needs.
        shard_scale: float32; one number, (..., M, 1) of this rank's rows, or of all ranks' rows.
            With sizes one number must have fewer dimensions than the shard.
        weight_scales: float32; one number, or (1, N), for each weight.
        bias, result_scale, out_dtype: as in `_scaled_mm`, one for all weights or one for each.
        gather_dim, group, sizes: as in `all_gather_matmul`.

    Returns (gathered, outputs), a list of outputs for a sequence of weights. No gradient, as
    `_scaled_mm`. Errors as for `all_gather_matmul`. Source: torch's
    `symm_mem::fused_all_gather_scaled_matmul`.
    """
    single = isinstance(weights, torch.Tensor)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    count, name = len(matrices), group_name(group)
    gathered, outputs = call_op(
        GATHER,
        shard,
        matrices,
        shard_scale,
        _as_list(weight_scales, count),
        gather_dim,
        name,
        _as_list(bias, count),
        _as_list(result_scale, count),
        _as_list(out_dtype, count),
        [use_fast_accum] * count,
        uneven=uneven_parts(sizes, name),
    )
    return gathered, outputs[0] if single else outputs


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
    bias then added once. `a` is float8 (..., M, K), its scale one number or (..., M, 1). Results in
    float8 are reduced in float32. `sizes` as in `matmul_reduce_scatter`. No gradient, as
    `_scaled_mm`. Errors as for `all_gather_matmul`. Source: torch's
    `symm_mem::fused_scaled_matmul_reduce_scatter`.
    """
    dim = check_dim(SCATTER, "scatter_dim", scatter_dim, a.dim())
    name = group_name(group)
    result: torch.Tensor = call_op(
        SCATTER, a, weight, a_scale, weight_scale, reduce_op, dim, dim, name,
        [*a.shape[:-1], weight.shape[-1]], bias, result_scale, out_dtype, use_fast_accum,
        uneven=uneven_parts(sizes, name),
    )  # fmt: skip
    return result
