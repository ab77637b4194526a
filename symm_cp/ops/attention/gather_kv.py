"""All-gather of keys and values together; its gradient is a reduce-scatter of both.

For attention that needs all keys at once, unlike `fused_all_gather_attention`.
"""

from __future__ import annotations

from typing import Any

import torch

from symm_cp import runtime
from symm_cp.memory import GroupLike, group_name
from symm_cp.ops.common import (
    attention_runs,
    check_dim,
    check_divisible,
    check_reduce_op,
    group_of,
    lib,
    new_result,
    register_kernel,
    what_is,
    world_size_of,
)
from symm_cp.ops.transforms import register_gradient

_GATHER = "all_gather_kv"
_SCATTER = "_all_gather_kv_backward"

lib.define(f"{_GATHER}(Tensor key, Tensor value, int seq_dim, str group_name) -> (Tensor, Tensor)")
lib.define(
    f"{_SCATTER}(Tensor grad_key, Tensor grad_value, int seq_dim, str group_name)"
    " -> (Tensor, Tensor)"
)


def _check(key: torch.Tensor, value: torch.Tensor, seq_dim: int) -> int:
    dim = check_dim(_GATHER, "seq_dim", seq_dim, key.dim())
    if value.dtype != key.dtype or value.device != key.device:
        raise TypeError(
            f"{_GATHER}: value is {value.dtype} on {value.device}, key {key.dtype} on {key.device}"
        )
    if value.dim() != key.dim() or value.shape[dim] != key.shape[dim]:
        raise ValueError(
            f"{_GATHER}: value {list(value.shape)} and key {list(key.shape)} must have the same "
            f"number of dimensions and the same length of dimension {seq_dim}"
        )
    return dim


def _gathered_shape(tensor: torch.Tensor, dim: int, world_size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] *= world_size
    return shape


def _shard_shape(tensor: torch.Tensor, dim: int, world_size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] //= world_size
    return shape


def _gather_kernel(
    key: torch.Tensor, value: torch.Tensor, seq_dim: int, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    attention_runs.count += 1
    group = group_of(group_name)
    dim = _check(key, value, seq_dim)
    rows_per_rank = key.shape[dim]
    keys, values = (new_result(t, _gathered_shape(t, dim, group.world_size)) for t in (key, value))

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        for gathered, shard in zip((keys, values), shards, strict=True):
            gathered.narrow(dim, rank * rows_per_rank, rows_per_rank).copy_(shard)

    call_name = what_is(_GATHER, key, value, detail=f"seq_dim={dim}")
    runtime.of(key, group).all_gather_and_consume(group, [key, value], consume, call_name)
    return keys, values


def _scatter_kernel(
    grad_key: torch.Tensor, grad_value: torch.Tensor, seq_dim: int, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of(group_name)
    dim = _check(grad_key, grad_value, seq_dim)
    check_divisible(_SCATTER, "seq_dim", dim, grad_key.shape[dim], group.world_size)
    check_reduce_op(_SCATTER, "grad_key", grad_key.dtype)
    rows_per_rank = grad_key.shape[dim] // group.world_size
    grads = (grad_key, grad_value)
    shapes = [_shard_shape(grad, dim, group.world_size) for grad in grads]
    counts = [torch.Size(shape).numel() for shape in shapes]
    total = new_result(grad_key, (sum(counts),))

    def produce(rank: int, partial: torch.Tensor) -> None:
        for grad, shape, part in zip(grads, shapes, partial.split(counts), strict=True):
            part.view(shape).copy_(grad.narrow(dim, rank * rows_per_rank, rows_per_rank))

    call_name = what_is(_SCATTER, *grads, detail=f"seq_dim={dim}")
    runtime.of(grad_key, group).produce_and_reduce_scatter(group, produce, total, call_name)
    # Copies: the results of an op share no memory.
    key, value = (part.view(s) for part, s in zip(total.split(counts), shapes, strict=True))
    return key.clone(), value.clone()


def _gather_fake(
    key: torch.Tensor, value: torch.Tensor, seq_dim: int, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dim, world_size = _check(key, value, seq_dim), world_size_of(group_name)
    keys, values = (t.new_empty(_gathered_shape(t, dim, world_size)) for t in (key, value))
    return keys, values


def _scatter_fake(
    grad_key: torch.Tensor, grad_value: torch.Tensor, seq_dim: int, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dim, world_size = _check(grad_key, grad_value, seq_dim), world_size_of(group_name)
    key, value = (t.new_empty(_shard_shape(t, dim, world_size)) for t in (grad_key, grad_value))
    return key, value


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.seq_dim, ctx.group_name = inputs


def _gather_backward(ctx: Any, grad_key: torch.Tensor, grad_value: torch.Tensor) -> tuple[Any, ...]:
    grads = torch.ops.symm_mem._all_gather_kv_backward(
        grad_key, grad_value, ctx.seq_dim, ctx.group_name
    )
    return (*grads, None, None)


def _scatter_backward(
    ctx: Any, grad_key: torch.Tensor, grad_value: torch.Tensor
) -> tuple[Any, ...]:
    grads = torch.ops.symm_mem.all_gather_kv(grad_key, grad_value, ctx.seq_dim, ctx.group_name)
    return (*grads, None, None)


def register() -> None:
    """Adds the kernels, the fake kernels and the gradients."""
    register_kernel(_GATHER, _gather_kernel)
    register_kernel(_SCATTER, _scatter_kernel)
    lib.impl(_GATHER, _gather_fake, "Meta")
    lib.impl(_SCATTER, _scatter_fake, "Meta")
    # Each is the gradient of the other.
    register_gradient(_GATHER, _gather_backward, _setup)
    register_gradient(_SCATTER, _scatter_backward, _setup)


def all_gather_kv(
    key: torch.Tensor, value: torch.Tensor, *, seq_dim: int = 2, group: GroupLike
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gathers keys and values along their sequence, in one pipelined call.

    Same result as::

        all_gather_tensor(key, seq_dim, group), all_gather_tensor(value, seq_dim, group)

    Args:
        key, value: equal numbers of dimensions, lengths along `seq_dim` and dtypes; equal shapes on
            all ranks.
        seq_dim: the dimension to gather, negative counts from the end.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns contiguous tensors, in rank order. Differentiable: gradients are reduce-scattered, added
    in rank order, in float32 for 16-bit types. Raises `ValueError` or `TypeError` for invalid
    arguments, before any communication; `RuntimeError` if a peer fails or calls it with other
    arguments. Source: `flex_cp_allgather` of torch's context parallelism.
    """
    name = group_name(group)
    gathered: tuple[torch.Tensor, torch.Tensor] = torch.ops.symm_mem.all_gather_kv(
        key, value, seq_dim, name
    )
    return gathered
