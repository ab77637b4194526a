"""Read this first: the forward pass of `fused_all_gather_attention`, all ranks in one process.

Tests compare the op with it. It leaves out shared memory and flags (comments say where ranks copy
and wait), heads that share keys, changes of scores, and the kernels of tiles.

Shapes: B batch, H heads, S rows of a rank's shard, E features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.patterns import peers
from symm_cp.schedule.tiles import Tile, seen_by_peers, tiles

Shards = Sequence[torch.Tensor]


def all_gather_attention(
    query: Shards, key: Shards, value: Shards, layout: SequenceLayout, mask: Mask
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns each rank's output (B, H, S, E) and log-sum-exp (B, H, S) from all (B, H, S, E)."""
    # Each rank copies the rows that peers see into its slot, and raises its flag at each peer.
    sent = seen_by_peers(layout, (mask,))
    slots = [
        (key[owner][:, :, first:end], value[owner][:, :, first:end])
        for owner, (first, end) in enumerate(sent)
    ]
    results = []
    for rank in range(layout.world_size):  # at the same time
        out = torch.zeros_like(query[rank])
        lse = query[rank].new_full(query[rank].shape[:3], -torch.inf)
        keys, values, first = key[rank], value[rank], 0  # this rank's own
        for owner in (rank, *peers(rank, layout.world_size)):
            if owner != rank:
                # Waits until the owner's flag has reached this call. The owner then leaves its slot
                # unchanged until this rank has raised its own flag in the next call.
                (keys, values), (first, _) = slots[owner], sent[owner]
            for tile in tiles(layout, mask, rank, owner):
                q = slice(tile.q_begin, tile.q_end)
                k = slice(tile.k_begin - first, tile.k_end - first)
                part = _attend(query[rank][:, :, q], keys[:, :, k], values[:, :, k], tile)
                _merge(out[:, :, q], lse[:, :, q], part)
        results.append((out, lse))
    return results


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to the keys j of a tile with low <= j - i <= high, for each query i."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    offset = torch.arange(key.shape[2]) - torch.arange(query.shape[2]).unsqueeze(1)
    if tile.low is not None:
        score = score.masked_fill(offset < tile.low, -torch.inf)
    if tile.high is not None:
        score = score.masked_fill(offset > tile.high, -torch.inf)
    lse = score.logsumexp(-1)
    return _weight(score, lse.unsqueeze(-1)) @ value, lse


def _merge(out: torch.Tensor, lse: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Adds attention to further keys, in place: each part is scaled by its share of the weights."""
    total = torch.logaddexp(lse, part[1])
    own, other = (_weight(each, total).unsqueeze(-1) for each in (lse, part[1]))
    out.copy_(own * out + other * part[0])
    lse.copy_(total)


def _weight(score: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns exp(score - total), 0 in rows that see no key."""
    return (score - total.masked_fill(total == -torch.inf, torch.inf)).exp()
