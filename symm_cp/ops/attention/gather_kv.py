"""All-gather of keys and values together; its gradient is a reduce-scatter of both.

For attention that needs all keys at once, unlike `fused_all_gather_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from symm_cp import runtime
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import (
    SIZES,
    OnRank,
    call_signature,
    check_dim,
    check_reduce_op,
    count_attention_run,
    gather_split,
    kernel_and_fake,
    scatter_split,
    uneven_of,
    uneven_parts,
)
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.op import ONE_BY_ONE, BackwardOp, Gradient, Op, arguments, declare, untouched
from symm_cp.runtime.calls import GatherIntoCall, ScatterCall
from symm_cp.tensors.results import copied, new_result

_GATHER = "all_gather_kv"
_SCATTER = "_all_gather_kv_backward"


def _check(key: torch.Tensor, value: torch.Tensor, seq_dim: int) -> int:
    dim = check_dim(_GATHER, "seq_dim", seq_dim, key.dim())
    if value.dtype != key.dtype or value.device != key.device:
        raise TypeError(
            f"{_GATHER}: value is {value.dtype} on {value.device}, key {key.dtype} on {key.device}"
        )
    if value.dim() != key.dim() or value.shape[dim] != key.shape[dim]:
        raise ValueError(
            f"{_GATHER}: value {list(value.shape)} and key {list(key.shape)} need the same number "
            f"of dimensions and the same length of dimension {seq_dim}"
        )
    return dim


def _gather(
    place: OnRank,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = place.group
    if group is not None:
        count_attention_run()
    dim = _check(key, value, seq_dim)
    split = gather_split(_GATHER, "seq_dim", dim, key, sizes, place.rank, place.world_size)
    new = torch.Tensor.new_empty if group is None else new_result
    keys, values = (new(t, split.whole_shape(t.shape)) for t in (key, value))
    if group is not None:
        name = call_signature(_GATHER, key, value, split=split, detail=f"seq_dim={dim}")
        runtime.run(GatherIntoCall(group, [key, value], [keys, values], split, name))
    return keys, values


def _scatter(
    place: OnRank,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    seq_dim: int,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dim, grads = _check(grad_key, grad_value, seq_dim), (grad_key, grad_value)
    length = grad_key.shape[dim]
    split = scatter_split(_SCATTER, "seq_dim", dim, length, sizes, place.world_size)
    group = place.group
    if group is None:
        key, value = (t.new_empty(split.shape_of(place.rank, t.shape)) for t in grads)
        return key, value
    check_reduce_op(_SCATTER, "grad_key", grad_key.dtype)

    def parts_of(rank: int, memory: torch.Tensor) -> list[torch.Tensor]:
        shapes = [split.shape_of(rank, grad.shape) for grad in grads]
        parts = memory.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    counts = [
        sum(math.prod(split.shape_of(rank, grad.shape)) for grad in grads)
        for rank in range(group.world_size)
    ]
    total = new_result(grad_key, (counts[group.rank],))

    def produce(rank: int, partial: torch.Tensor) -> None:
        for grad, part in zip(grads, parts_of(rank, partial), strict=True):
            part.copy_(split.of(rank, grad))

    name = call_signature(_SCATTER, *grads, split=split, detail=f"seq_dim={dim}")
    shapes = [(count,) for count in counts]
    runtime.run(ScatterCall(group, produce, total, name, shapes=shapes))
    # Copies, because an op's results must share no memory.
    key, value = parts_of(group.rank, total)
    return copied(key), copied(value)


_gather_kernel, _gather_fake = kernel_and_fake(_gather)
_scatter_kernel, _scatter_fake = kernel_and_fake(_scatter)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.seq_dim, ctx.group_name, *last = inputs
    ctx.uneven = uneven_of(last)


def _scatter_backward(
    ctx: Any, grad_key: torch.Tensor, grad_value: torch.Tensor
) -> tuple[Any, ...]:
    grads = direct("all_gather_kv")(grad_key, grad_value, ctx.seq_dim, ctx.group_name, *ctx.uneven)
    return (*grads, None, None, *(None for _ in ctx.uneven))


declare(
    Op(
        name=_GATHER,
        types=(
            lambda t, key, value, seq_dim, **_: (
                t.all_gather(key, seq_dim),
                t.all_gather(value, seq_dim),
            )
        ),
        schema=(
            f"(Tensor key, Tensor value, int seq_dim, str group_name, {SIZES}) -> (Tensor, Tensor)"
        ),
        kernel=_gather_kernel,
        fake=_gather_fake,
        gradient=BackwardOp(_SCATTER),
        autocast=autocast.widen,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(on.rand(1, 2, 4, 3), on.rand(1, 2, 4, 3), 2, on.group_name),
    ),
    Op(
        name=_SCATTER,
        types=(
            lambda t, grad_key, grad_value, seq_dim, **_: (
                t.reduce_scatter(grad_key, seq_dim),
                t.reduce_scatter(grad_value, seq_dim),
            )
        ),
        schema=(
            "(Tensor grad_key, Tensor grad_value, int seq_dim, str group_name, "
            f"{SIZES}) -> (Tensor, Tensor)"
        ),
        kernel=_scatter_kernel,
        fake=_scatter_fake,
        gradient=Gradient(_scatter_backward, _setup),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            *(on.rand(1, 2, 4 * on.world_size, 3) for _ in range(2)), 2, on.group_name
        ),
        internal=True,
    ),
)


@entry_point()
def all_gather_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_dim: int = 2,
    group: GroupLike,
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gathers keys and values along their sequence, in one pipelined call.

    Same result as::

        all_gather_tensor(key, seq_dim, group), all_gather_tensor(value, seq_dim, group)

    Args:
        key, value: equal numbers of dimensions, lengths along `seq_dim` and dtypes.
        seq_dim: the dimension to gather, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        sizes: the length of every rank's shard along `seq_dim`; by default all equal this rank's.

    Returns contiguous tensors, in rank order. Differentiable: gradients are reduce-scattered, added
    in rank order, in float32 for 16-bit types. Raises `ValueError` or `TypeError` for arguments
    that do not fit, before any communication; `RuntimeError` when a peer fails or disagrees.
    Source: `flex_cp_allgather` of torch's context parallelism.
    """
    name = group_name(group)
    gathered: tuple[torch.Tensor, torch.Tensor] = direct("all_gather_kv")(
        key, value, seq_dim, name, *uneven_parts(sizes, name)
    )
    return gathered
