"""Attention over a sequence that is split over ranks: fused, unfused, and its compute alone.

Each function returns an `attend` for the model. Each rank has two chunks of the sequence
(head-tail), so that all ranks have the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from symm_cp.commands.demo.model import attend
from symm_cp.context_parallel import HeadTail, all_gather_attention
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import Backward, Forward
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter
from symm_cp.schedule.mask import CAUSAL

Exchange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Exchanged(torch.autograd.Function):
    """Runs one exchange in the forward pass, and another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Exchange, backward: Exchange) -> torch.Tensor:
        """Runs the exchange `forward`."""
        ctx.backward_exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Runs the exchange `backward` on the gradient."""
        return ctx.backward_exchange(grad), None, None


def fused(group: dist.ProcessGroup, layout: HeadTail) -> Attend:
    """Returns attention that gathers keys and values while it computes."""
    if group.size() == 1:
        return attend
    return lambda q, k, v: all_gather_attention(
        q, k, v, group=group, is_causal=True, enable_gqa=True, load_balancer=layout
    )


def unfused(group: dist.ProcessGroup, layout: HeadTail) -> Attend:
    """Returns attention that first gathers keys and values with torch's collectives."""
    if group.size() == 1:
        return attend
    name = group.group_name

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return unfused_all_gather(shard, 2, name)

    def scatter(full: torch.Tensor) -> torch.Tensor:
        return unfused_reduce_scatter(full, "sum", 2, name)

    visible = layout.positions(group.rank())[:, None] >= layout.permutation()

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (Exchanged.apply(t, gather, scatter) for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True)

    return masked


def compute_alone(group: dist.ProcessGroup, layout: HeadTail) -> Attend:
    """Returns the tiles of fused attention, computed on this rank's keys instead of peers'."""
    if group.size() == 1:
        return attend
    rank, world_size = group.rank(), group.size()
    return lambda q, k, v: _Tiles.apply(q, k, v, layout, rank, world_size)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: HeadTail,
        rank: int,
        world_size: int,
    ) -> torch.Tensor:
        ctx.spec = spec = AttentionSpec(layout=layout.layout, mask=CAUSAL)
        ctx.tiles = [spec.tiles(rank, owner, q.shape[2]) for owner in range(world_size)]
        state = Forward(q, spec, sum(map(len, ctx.tiles)))
        for owner, owner_tiles in enumerate(ctx.tiles):
            for tile in owner_tiles:
                state.add(tile, k, v, owner)
        out, lse = state.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        state = Backward(grad, q, out, lse, ctx.spec)
        B, G, S, E = k.shape
        partials = tuple(k.new_empty((2, B, S, G, E), dtype=lse.dtype).transpose(2, 3))
        for owner, owner_tiles in enumerate(ctx.tiles):
            state.add_tiles(owner_tiles, k, v, partials, owner)
        grad_k, grad_v = (t.to(k.dtype) for t in partials)
        return state.grad_query(), grad_k, grad_v, None, None, None
