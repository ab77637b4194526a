"""Attention of one tile with everything that torch's kernels lack: this project's own kernels.

Shapes: query (B, H, S, E), key (B, G, K, E) and value (B, G, K, V) for a divisor G of H, features
contiguous. A score is `scale * q.k`; `softcap * tanh(score / softcap)`; plus a bias by distance;
plus a mask. Dropout drops its weight or divides it by 1 - p; the log-sum-exp ignores dropout.

    CPU       csrc/attention/tile.cpp
    others    matmuls, a block of rows at a time

`mask`, additive and broadcastable to (B, H, S, K), and a band hide keys: query i sees key j when
low <= j - i <= high (None: no limit). The kernels skip scores outside the band. NaN scores
propagate to their row and to the gradients.
"""

from __future__ import annotations

from functools import cache

import torch

from symm_cp.ops.attention import kernels, tiles_by_matmuls
from symm_cp.ops.attention.scoring import Gradients, Scoring, TileMask
from symm_cp.tensors import dtypes


@cache
def has_blocks(dtype: torch.dtype) -> bool:
    """Whether these kernels beat torch's for a dtype on this processor."""
    with torch._C._DisableTorchDispatch():  # the first call may be recorded, or captured
        return bool(torch.ops.symm_cp.attention_has_blocks(dtype))


def _options(scoring: Scoring, tile_mask: TileMask) -> tuple[object, ...]:
    """The arguments of the native ops after their tensors."""
    return (
        tile_mask.mask,
        tile_mask.low,
        tile_mask.high,
        scoring.scale,
        scoring.softcap,
        scoring.bias,
        scoring.bias_zero,
        tile_mask.query_positions,
        tile_mask.key_positions,
        scoring.dropout_p,
        scoring.dropout_seed,
        scoring.sample_offset,
        scoring.head_offset,
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    tile_mask: TileMask,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merges attention to further keys into `out` and `lse`.

    `out` (B, H, S, V) has the dtype of the query or of `lse` (B, H, S), float32 or float64. A row
    that has seen no key so far has lse -inf and, on CPU, any values in `out`; if it sees none of
    these keys either, `out` becomes 0.
    """
    if query.device.type == "cpu":
        options = _options(scoring, tile_mask)
        torch.ops.symm_cp.attention_tile(query, key, value, out, lse, *options)
        return
    kernels.merge(out, lse, *tiles_by_matmuls.forward(query, key, value, scoring, tile_mask))


def inner_products(
    grad_out: torch.Tensor, out: torch.Tensor, grad_lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the term that the gradients of a row's scores share, (B, H, S) in lse's dtype.

    `grad_lse` (B, H, S) is the gradient of lse.
    """
    if out.device.type == "cpu":
        return torch.ops.symm_cp.attention_inner(grad_out, out, grad_lse)  # type: ignore[no-any-return]
    wide = dtypes.wide(out.dtype)
    inner = (grad_out.to(wide) * out.to(wide)).sum(-1)
    return inner if grad_lse is None else inner - grad_lse.to(wide)


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
    """Adds a tile's gradients to `grads`, which have lse's dtype.

    `lse` and `inner` (see `inner_products`) cover all keys, not only the tile's;
    lse is inf in rows that see no key.
    """
    if query.device.type == "cpu":
        torch.ops.symm_cp.attention_tile_backward(
            grad_out, query, key, value, lse, inner, *grads, *_options(scoring, tile_mask)
        )
        return
    tiles_by_matmuls.add_gradients(
        grad_out, query, key, value, lse, inner, scoring, tile_mask, grads
    )
