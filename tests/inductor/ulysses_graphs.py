"""Attention by heads, as programs write it with torch's all-to-all; and exchanges of other kinds.

B batch, S positions, H heads of E features, D features of the model; s and h are a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

Exchange = Callable[[torch.Tensor, Any], torch.Tensor]


# (B, s, H, E) to (B, S, h, E), and back, as a transformer for images does.


def functional_to_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    B, s, H, E = x.shape
    W = group.size()
    parts = x.reshape(B, s, W, H // W, E).permute(2, 1, 0, 3, 4).contiguous()
    arrived = funcol.all_to_all_single_autograd(parts.flatten(), None, None, group)
    return arrived.reshape(W * s, B, H // W, E).permute(1, 0, 2, 3).contiguous()


def functional_to_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    B, S, h, E = x.shape
    W = group.size()
    parts = x.reshape(B, W, S // W, h, E).permute(1, 3, 2, 0, 4).contiguous()
    arrived = funcol.all_to_all_single_autograd(parts, None, None, group)
    return arrived.reshape(W * h, S // W, B, E).permute(2, 1, 0, 3)


# The same with concatenated chunks.


def chunked_to_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = torch.cat(x.chunk(group.size(), dim=2))
    arrived = funcol.all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(arrived.chunk(group.size()), dim=1)


def chunked_to_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = torch.cat(x.chunk(group.size(), dim=1))
    arrived = funcol.all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(arrived.chunk(group.size()), dim=2)


class SeqAllToAll(torch.autograd.Function):
    """An exchange into a preallocated tensor, as in DeepSpeed-Ulysses."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Any, scatter: int, gather: int, batch: int) -> Any:
        ctx.others = group, scatter, gather, batch
        W, shape = group.size(), list(x.shape)
        shape[scatter : scatter + 1] = [W, shape[scatter] // W]
        order = [scatter, *(dim for dim in range(5) if dim != scatter)]
        sent = x.reshape(shape).permute(order).contiguous()
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=group)
        order = [*range(1, gather + 1), 0, *range(gather + 1, 5)]
        arrived = arrived.permute(order).contiguous()
        return arrived.flatten(gather, gather + 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        group, scatter, gather, batch = ctx.others
        return None, SeqAllToAll.apply(group, grad, gather, scatter, batch), None, None, None


def scatter_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    return SeqAllToAll.apply(group, x, 2, 1, 0)


def gather_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    return SeqAllToAll.apply(group, x, 1, 2, 0)


# Positions first, (s, B, H, E) to (S, B, h, E).


def scatter_heads_of_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    return SeqAllToAll.apply(group, x, 2, 0, 1)


def gather_heads_of_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    return SeqAllToAll.apply(group, x, 0, 2, 1)


@dataclass(frozen=True)
class Ordered:
    """A projection, an exchange and an exchange back, with dimensions in any order."""

    sizes: dict[str, int]  # of B, s, h, E and the ranks, W
    sent: tuple[str, str]  # BshE, in the order of what each exchange sends to a rank
    between: tuple[str, str]  # WBshE, in the order of shapes and of memory between them
    flat: int  # the last dimension that is joined with the first one to be sent

    def exchange(self, x: torch.Tensor, order: str, group: Any) -> torch.Tensor:
        """W of (W, B, s, h, E) counts the parts sent to ranks, then the parts received."""
        shape = [self.sizes[dim] for dim in "W" + order]
        sent = x.permute(["WBshE".index(dim) for dim in "W" + order]).contiguous()
        sent = sent.flatten(0, self.flat)
        arrived = funcol.all_to_all_single_autograd(sent, None, None, group).reshape(shape)
        return arrived.permute([("W" + order).index(dim) for dim in "WBshE"])

    def __call__(self, group: Any, x: Any, w: Any, u: Any) -> Any:
        shape, memory = self.between
        W, h = self.sizes["W"], self.sizes["h"]
        heads = F.linear(x, w).unflatten(2, (W, h, -1)).permute(2, 0, 1, 3, 4)
        y = self.exchange(heads, self.sent[0], group)
        y = y.permute(["WBshE".index(dim) for dim in shape]).contiguous().flatten(0, 1).sin()
        y = y.unflatten(0, (self.sizes[shape[0]], -1))
        y = y.permute([shape.index(dim) for dim in memory]).contiguous().cos()
        y = y.permute([memory.index(dim) for dim in "WBshE"])
        y = self.exchange(y, self.sent[1], group)
        return F.linear(y.permute(1, 2, 0, 3, 4).flatten(2), u)


@dataclass(frozen=True)
class Ulysses:
    """A layer of attention, over the group or, without one, of the whole sequence."""

    to_heads: Exchange
    to_sequence: Exchange
    rows_first: bool = False
    rotated: bool = False  # queries and keys are changed before they are exchanged

    def __call__(self, group: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any, b: Any) -> Any:
        batch_dim = int(self.rows_first)
        q, k, v = (F.linear(x, w, b).unflatten(2, (-1, E)) for w in (wq, wk, wv))
        if self.rotated:
            q, k = q.sin(), k.cos()
        if group is not None:
            q, k, v = (self.to_heads(t, group) for t in (q, k, v))
        # To (B, h, S, E), which attention takes.
        order = (batch_dim, 2, 1 - batch_dim, 3)
        q, k, v = (t.permute(order) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        out = out.permute([order.index(dim) for dim in range(4)])
        if group is not None:
            out = self.to_sequence(out, group)
        return F.linear(out.flatten(2), wo)


D, E = 6, 2
PROGRAMS = {
    "functional": Ulysses(functional_to_heads, functional_to_sequence),
    "chunks": Ulysses(chunked_to_heads, chunked_to_sequence),
    "scatter and gather": Ulysses(scatter_heads, gather_heads),
    "positions first": Ulysses(scatter_heads_of_rows, gather_heads_of_rows, rows_first=True),
    "rotated": Ulysses(functional_to_heads, functional_to_sequence, rotated=True),
}


# --- exchanges other than of heads; x is (2, 4, D), w (4 * E, D), u (D, 4 * E), W = 2 -----------


def _exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x.contiguous(), None, None, group)


def _heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).unflatten(2, (-1, E))


def every_other_head(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Each rank gets every W-th head."""
    return _exchanged(_heads(x, w).unflatten(2, (-1, 2)).permute(3, 0, 1, 2, 4), group)


def last_heads_first(group: Any, x: Any, w: Any, u: Any) -> Any:
    """The first rank gets the last heads."""
    return _exchanged(_heads(x, w).unflatten(2, (2, -1)).flip(2).permute(2, 0, 1, 3, 4), group)


def positions(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Positions are sent, not heads: tokens to experts."""
    return F.linear(_exchanged(F.linear(x, w).flatten(0, 1), group), u)


def features(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Each rank gets a part of the features of every head."""
    return _exchanged(_heads(x, w).permute(3, 0, 1, 2), group)


def ranks_inside(group: Any, x: Any, w: Any, u: Any) -> Any:
    """The heads that arrive are interleaved by rank."""
    parts = _exchanged(_heads(x, w).sin().unflatten(1, (2, -1)).transpose(0, 1), group)
    return F.linear(parts.permute(1, 2, 3, 0, 4).flatten(2), torch.cat([u, u], 1))


def uneven(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Rank 0 gets three heads, rank 1 gets one."""
    W, r = group.size(), group.rank()
    given = [3, 1]
    sent = _heads(x, w).permute(2, 0, 1, 3).contiguous()
    arrived = funcol.all_to_all_single_autograd(sent, [given[r]] * W, given, group)
    return arrived.sum(0)


def used_twice(group: Any, x: Any, w: Any, u: Any) -> Any:
    """The product is also used without the exchange."""
    heads = _heads(x, w)
    return functional_to_heads(heads, group), heads.sin()


def parts_of_one(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Queries and keys are parts of one product."""
    q, k = _heads(x, w).chunk(2, 2)
    return functional_to_heads(q, group) * functional_to_heads(k, group)


def cast(group: Any, x: Any, w: Any, u: Any) -> Any:
    """The product is cast before it is sent."""
    return functional_to_heads(_heads(x, w).float(), group)


def summed(group: Any, x: Any, w: Any, u: Any) -> Any:
    """The result of an exchange feeds two products."""
    parts = functional_to_sequence(_heads(x, w).sin(), group).flatten(2)
    return F.linear(parts, torch.cat([u, u], 1)), F.linear(parts, torch.cat([u, u], 1).sin())


#: Why the first all-to-all of the forward graph is left alone.
OTHERS = {
    every_other_head: "equal runs of heads",
    last_heads_first: "equal runs of heads",
    positions: "exchanges whole rows",
    features: "equal runs of heads",
    ranks_inside: "equal runs of heads",
    uneven: "splits are unequal",
    used_twice: "has other uses",
    parts_of_one: "part of what is computed at once",
    cast: "equal runs of heads",
    summed: "several matmuls",
}
