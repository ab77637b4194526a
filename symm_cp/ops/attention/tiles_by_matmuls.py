"""Attention of one tile by torch's matmuls, a block of rows at a time (see native_tiles.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from symm_cp.ops.attention import philox
from symm_cp.ops.attention.scoring import Gradients, Scoring, TileMask, in_band
from symm_cp.tensors import dtypes

# Scores in a block of rows: bounds the temporary memory (32 MiB in float64 for 2^22).
_BLOCK_SCORES = 1 << 22


def _positions(known: torch.Tensor | None, length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, device=like.device) if known is None else known


class _Rows:
    """The scores of some rows of queries against all keys of a tile, in the dtype of sums."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scoring: Scoring,
        tile_mask: TileMask,
        rows: range,
    ) -> None:
        self.rows, self._scoring = rows, scoring
        at = slice(rows.start, rows.stop)
        wide = dtypes.wide(query.dtype)
        groups = key.shape[1]
        # (B, G, H / G, rows, E): the heads of a group share its keys.
        self.query = query[:, :, at].to(wide).unflatten(1, (groups, -1))
        self.key = key.to(wide).unsqueeze(2)
        score = torch.matmul(self.query, self.key.mT).flatten(1, 2) * scoring.scale
        self.slope: torch.Tensor | None = None  # of the soft cap
        if scoring.softcap is not None:
            capped = torch.tanh(score / scoring.softcap)
            self.slope = 1 - capped * capped
            score = capped * scoring.softcap
        q_at = _positions(tile_mask.query_positions, query.shape[2], query)[at]
        k_at = _positions(tile_mask.key_positions, key.shape[2], query)
        self.distance = k_at - q_at.unsqueeze(1) + scoring.bias_zero
        if scoring.bias is not None:
            score = score + scoring.bias.to(wide)[:, self.distance]
        if tile_mask.mask is not None:
            mask = tile_mask.mask
            score = score + (mask[..., at, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask)
        low, high = tile_mask.low, tile_mask.high
        if low is not None or high is not None:
            keys = key.shape[2]
            visible = in_band(len(rows), keys, low, high, score.device, first=rows.start)
            score = score.masked_fill(visible.logical_not(), -torch.inf)
        self.score = score
        self.factor: torch.Tensor | None = None  # of dropout
        if scoring.dropout_p > 0:
            B, H = score.shape[:2]
            samples = torch.arange(B, device=query.device) + scoring.sample_offset
            heads = torch.arange(H, device=query.device) + scoring.head_offset
            p, seed = scoring.dropout_p, scoring.dropout_seed
            kept = philox.kept(samples, heads, q_at, k_at, p=p, seed=seed)
            self.factor = kept.to(wide) * (1 / (1 - p) if p < 1 else 0.0)

    def weights(self, lse: torch.Tensor) -> torch.Tensor:
        """Returns the weights before dropout; rows that see no key have none."""
        fully_masked = lse.abs() == torch.inf
        return torch.exp(self.score - lse.masked_fill(fully_masked, torch.inf).unsqueeze(-1))

    def dropped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns weights after dropout; maps gradients after dropout to those before it."""
        return tensor if self.factor is None else tensor * self.factor


def _blocks(
    query: torch.Tensor, key: torch.Tensor, scoring: Scoring, tile_mask: TileMask
) -> Iterator[_Rows]:
    scores_in_row = max(1, query.shape[0] * query.shape[1] * key.shape[2])
    step = max(1, _BLOCK_SCORES // scores_in_row)
    for begin in range(0, query.shape[2], step):
        rows = range(begin, min(begin + step, query.shape[2]))
        yield _Rows(query, key, scoring, tile_mask, rows)


def _grouped(weights: torch.Tensor, groups: int) -> torch.Tensor:
    return weights.unflatten(1, (groups, -1))


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    tile_mask: TileMask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B, H, S, V) in the query's dtype and lse (B, H, S), on any device.

    A row that sees no key has out 0 and lse -inf.
    """
    B, H, S, _ = query.shape
    wide = dtypes.wide(query.dtype)
    out = query.new_zeros(B, S, H, value.shape[-1]).transpose(1, 2)
    lse = query.new_full((B, H, S), -torch.inf, dtype=wide)
    if query.shape[:3].numel() == 0 or key.shape[2] == 0:
        return out, lse
    values = value.to(wide).unsqueeze(2)
    for block in _blocks(query, key, scoring, tile_mask):
        at = slice(block.rows.start, block.rows.stop)
        lse[:, :, at] = torch.logsumexp(block.score, -1)
        weights = block.dropped(block.weights(lse[:, :, at]))
        out[:, :, at] = torch.matmul(_grouped(weights, key.shape[1]), values).flatten(1, 2)
    return out, lse


def add_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    inner: torch.Tensor,
    scoring: Scoring,
    tile_mask: TileMask,
    grads: Gradients,
) -> None:
    """Like `native_tiles.add_gradients`, on any device."""
    wide, groups = dtypes.wide(query.dtype), key.shape[1]
    if query.shape[:3].numel() == 0 or key.shape[2] == 0:
        return
    values = value.to(wide).unsqueeze(2)
    for block in _blocks(query, key, scoring, tile_mask):
        at = slice(block.rows.start, block.rows.stop)
        weights = block.weights(lse[:, :, at])
        grad = _grouped(grad_out[:, :, at].to(wide), groups)
        through = block.dropped(torch.matmul(grad, values.mT).flatten(1, 2))
        dropped = _grouped(block.dropped(weights), groups)
        grads.value.add_(torch.matmul(dropped.mT, grad).sum(2))
        grad_score = weights * (through - inner[:, :, at].unsqueeze(-1))
        if grads.bias is not None:
            grads.bias.index_add_(2, block.distance.flatten(), grad_score.flatten(2))
        if block.slope is not None:
            grad_score = grad_score * block.slope
        grad_score = _grouped(grad_score * scoring.scale, groups)
        grads.query[:, :, at] += torch.matmul(grad_score, block.key).flatten(1, 2)
        grads.key.add_(torch.matmul(grad_score.mT, block.query).sum(2))
