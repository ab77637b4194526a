"""Describes for our ops how diffusers spreads sequences: over which ranks, in which parts.

W is the world size. diffusers cuts a sequence into W parts in rank order: equal parts or, with
`ring_anything` and `ulysses_anything`, the parts of `torch.tensor_split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.group.memory import group_name, resolve
from symm_cp.ops.attention.layouts import in_rank_order
from symm_cp.ops.attention.methods import Method, split_by
from symm_cp.ops.collectives.low_contention import low_contention_all_gather

_OP = "enable_parallelism"
_KEPT = "_symm_cp_spread"


@dataclass(frozen=True)
class SpreadModel:
    """The group over which sequences are spread, and how its ranks attend to all of it."""

    group: str
    method: Method
    #: Whether the ranks hold parts of different lengths.
    uneven: bool


def spread_of(config: ContextParallelConfig) -> SpreadModel:
    """Returns how a config spreads sequences; cached in it, since graphs cannot hold meshes."""
    kept: SpreadModel | None = getattr(config, _KEPT, None)
    if kept is None:
        kept = _spread_of(config)
        setattr(config, _KEPT, kept)
    return kept


def _spread_of(config: ContextParallelConfig) -> SpreadModel:
    mesh: Any
    method: Any
    if config.ulysses_degree == 1:
        mesh, method = config._ring_mesh, "allgather"
    elif config.ring_degree == 1:
        mesh, method = config._ulysses_mesh, "ulysses"
    else:
        mesh, method = config._mesh["ring", "ulysses"], ("allgather", "ulysses")
    uneven = config.ring_anything or config.ulysses_anything
    return SpreadModel(*split_by(_OP, mesh, method), uneven)


def gathered(shard: torch.Tensor, group: str, sizes: list[int] | None = None) -> torch.Tensor:
    """Returns the shards of all ranks along the first dimension; `sizes` are their lengths."""
    whole = low_contention_all_gather(shard.contiguous(), group=group, sizes=sizes)
    return torch.ops._c10d_functional.wait_tensor(whole)


def lengths_of(length: int, group: str) -> torch.Tensor:
    """Returns the number of positions on each rank, (W,) of int64 on CPU. Collective."""
    return gathered(torch.full((1,), length, dtype=torch.int64, device="cpu"), group)


def spread_over(group: str, queries: int, keys: int) -> torch.Tensor:
    """Returns how keys and queries are spread, from this rank's numbers of both. Collective.

    The result is a tensor that attention accepts as a load balancer; graphs need not have its
    values.
    """
    of_keys = lengths_of(keys, group)
    if queries == keys:
        return in_rank_order(of_keys)
    return in_rank_order(of_keys, lengths_of(queries, group))


class _Whole(torch.autograd.Function):
    """Gathers; the gradient is this rank's part of the incoming gradient, as in diffusers.

    So a loss that every rank computes from the whole output counts once, not once for each rank.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, dim: int, group: str, sizes: list[int] | None
    ) -> torch.Tensor:
        rank = resolve(group).rank
        length = shard.shape[dim]
        begin = rank * length if sizes is None else sum(sizes[:rank])
        ctx.part = (dim, begin, length)
        return gathered(shard.movedim(dim, 0), group, sizes).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad.narrow(*ctx.part), None, None, None


def unshard_even(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """Replaces diffusers' `EquipartitionSharder.unshard`: gathers equal parts along a dimension."""
    return _Whole.apply(tensor, dim, group_name(mesh.get_group()), None)


def unshard_uneven(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """Replaces diffusers' `PartitionAnythingSharder.unshard_anything`: gathers any parts."""
    group = group_name(mesh.get_group())
    sizes = lengths_of(tensor.shape[dim], group).tolist()
    return _Whole.apply(tensor, dim, group, sizes)
