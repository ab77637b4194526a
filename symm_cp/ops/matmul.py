"""Fused all-gather-matmul and matmul-reduce-scatter: schemas, registration and entry points.

Shapes: M, N, K are the dimensions of a matmul (..., M, K) @ (K, N) -> (..., M, N). W is the world
size. The kernels are in matmul_gather.py and matmul_scatter.py.

Gradients communicate through the same pipelines: that of an all-gather-matmul is a
matmul-reduce-scatter and a weight gradient that gathers the shards again (rather than keep the
gathered input alive); that of a matmul-reduce-scatter gathers the gradient once for both. They are
in matmul_derivatives.py.
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
    entry_point,
    lib,
    register_device_kernel,
    register_in_python,
    uneven_parts,
    with_sizes,
)
from symm_cp.ops.matmul_gather import GATHER, all_gather_matmul_fake, all_gather_matmul_kernel
from symm_cp.ops.matmul_scatter import (
    SCATTER,
    SUM,
    matmul_reduce_scatter_fake,
    matmul_reduce_scatter_kernel,
    matmuls_reduce_scatter_fake,
    matmuls_reduce_scatter_kernel,
)

lib.define(
    f"{WITH_SIZES[GATHER]}(Tensor A, Tensor[] Bs, int gather_dim, str group_name, {SIZES}, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])"
)
lib.define(
    f"{WITH_SIZES[SCATTER]}(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, "
    f"{SIZES}) -> Tensor"
)
lib.define(
    f"{SUM}(Tensor[] As, Tensor[] Bs, Tensor? addend, str reduce_op, int scatter_dim, "
    f"str group_name, {SIZES}) -> Tensor"
)

_KERNELS: dict[str, Op] = with_sizes(
    {
        GATHER: all_gather_matmul_kernel,
        SCATTER: matmul_reduce_scatter_kernel,
        SUM: matmuls_reduce_scatter_kernel,
    }
)
_FAKES = with_sizes(
    {
        GATHER: all_gather_matmul_fake,
        SCATTER: matmul_reduce_scatter_fake,
        SUM: matmuls_reduce_scatter_fake,
    }
)


def register() -> None:
    """Adds the kernels, and fake kernels (torch's are wrong for some dims)."""
    # csrc/fused_matmuls.cpp calls the kernels for all but small matrices.
    for name, kernel in _KERNELS.items():
        register_device_kernel(name, kernel, replaces_torch=name in (GATHER, SCATTER))
        register_in_python(name, kernel)
    for name, fake in _FAKES.items():
        lib.impl(name, fake, "Meta", allow_override=True)
    autocast.register(autocast.cast, GATHER, SCATTER)


@entry_point
def all_gather_matmul(
    shard: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: GroupLike,
    return_gathered: bool = False,
    sizes: Sequence[int] | None = None,
) -> Any:
    """Multiplies an all-gathered tensor with one or several matrices, without gathering it first.

    Same result as::

        gathered = all_gather_tensor(shard, gather_dim, group)
        outputs = [gathered @ weight for weight in weights]

    Args:
        shard: (..., M, K), this rank's part along `gather_dim`.
        weights: a (K, N) matrix or several (as many rows as the gathered tensor has columns).
        gather_dim: the dimension to gather, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        return_gathered: also return the gathered tensor.
        sizes: the length of every rank's shard along `gather_dim`; by default all are as this
            rank's.

    Returns the output, or a list of outputs for a sequence of weights; with `return_gathered` the
    pair (gathered, outputs). Differentiable in shard and weights. Contiguous shards in symmetric
    memory that was rendezvoused with the group are read in place by the peers, if all ranks pass
    such a one. Bits depend neither on where the shard lies nor on `return_gathered`. Raises
    `ValueError` or `TypeError` for arguments that do not fit, before any communication;
    `RuntimeError` when a peer fails or disagrees. Source: torch's
    `symm_mem::fused_all_gather_matmul`.
    """
    single = isinstance(weights, torch.Tensor)
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    name = group_name(group)
    gathered, outputs = call_op(
        GATHER,
        shard,
        matrices,
        gather_dim,
        name,
        uneven=uneven_parts(sizes, name),
        return_A=return_gathered,
    )
    result = outputs[0] if single else outputs
    return (gathered, result) if return_gathered else result


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
    result: torch.Tensor = call_op(
        SCATTER, a, weight, reduce_op, scatter_dim, name, uneven=uneven_parts(sizes, name)
    )
    return result
