"""Attention of one tile with everything that torch's kernels lack: this project's own kernels.

Shapes: query (B, H, S, E), key (B, G, K, E) and value (B, G, K, V) for a divisor G of H, features
contiguous. A score is `scale * q.k`; `softcap * tanh(score / softcap)`; plus a bias by distance;
plus a mask. Its weight is dropped or divided by 1 - p, which the log-sum-exp does not know of.

    CPU       csrc/attention_tile.cpp
    others    matmuls, a block of rows at a time

Which keys a query sees is said by `mask`, additive and broadcastable to (B, H, S, K), and by a
band: query i sees key j when low <= j - i <= high (None: no limit). What the band hides is not
computed. Scores that are NaN spread to their row, and to the gradients.
"""

from __future__ import annotations

import torch

from symm_cp.ops.attention import tiles_by_matmuls
from symm_cp.ops.attention.scoring import Scoring, Sight

__all__ = ["Scoring", "Sight", "backward", "forward"]


def _options(scoring: Scoring, sight: Sight) -> tuple[object, ...]:
    """The arguments of the native ops behind their tensors."""
    return (
        sight.mask,
        sight.low,
        sight.high,
        scoring.scale,
        scoring.softcap,
        scoring.bias,
        scoring.bias_zero,
        sight.query_positions,
        sight.key_positions,
        scoring.dropout_p,
        scoring.dropout_seed,
        scoring.sample_offset,
        scoring.head_offset,
    )


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B, H, S, V) in the query's dtype and lse (B, H, S) in float32 or float64.

    A row that sees no key has out 0 and lse -inf.
    """
    if query.device.type == "cpu":
        options = _options(scoring, sight)
        return torch.ops.symm_cp.attention_tile(query, key, value, *options)  # type: ignore[no-any-return]
    return tiles_by_matmuls.forward(query, key, value, scoring, sight)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scoring: Scoring,
    sight: Sight,
    *,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of query, key, value and bias (None without one), in lse's dtype.

    `out` and `lse` are those of all keys, of which the tile's are a part: -inf or inf marks rows
    that see none at all. `grad_lse` (B, H, S) is what flows back to lse.
    """
    if query.device.type == "cpu":
        grads = torch.ops.symm_cp.attention_tile_backward(
            grad_out, query, key, value, out, lse, grad_lse, *_options(scoring, sight)
        )
        return grads if scoring.bias is not None else (*grads[:3], None)
    return tiles_by_matmuls.backward(
        grad_out, query, key, value, out, lse, scoring, sight, grad_lse
    )
