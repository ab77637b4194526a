"""Attention of one tile and its gradients as functions, by either of the project's kernels."""

from __future__ import annotations

from types import ModuleType

import torch

from symm_cp.ops.attention import native_tiles, tiles_by_matmuls
from symm_cp.ops.attention.scoring import Gradients, Scoring, TileMask
from symm_cp.tensors.dtypes import wide

KERNELS = {"native": native_tiles, "matmuls": tiles_by_matmuls}


def forward(
    kernel: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    tile_mask: TileMask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse; a row that sees no key has out 0 and lse -inf."""
    if kernel is tiles_by_matmuls:
        return tiles_by_matmuls.forward(query, key, value, scoring, tile_mask)
    out = query.new_full((*query.shape[:3], value.shape[-1]), torch.nan)  # is not read
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide(query.dtype))
    native_tiles.attend(query, key, value, scoring, tile_mask, out, lse)
    return out, lse


def backward(
    kernel: ModuleType,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scoring: Scoring,
    tile_mask: TileMask,
    *,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of query, key, value and bias (None without one), in lse's dtype."""
    like = [torch.zeros_like(t, dtype=lse.dtype) for t in (query, key, value)]
    bias = scoring.bias
    of_bias = None if bias is None else lse.new_zeros(query.shape[0], *bias.shape)
    inner = native_tiles.inner_products(grad_out, out, grad_lse)
    seen = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = Gradients(like[0], like[1], like[2], of_bias)
    kernel.add_gradients(grad_out, query, key, value, seen, inner, scoring, tile_mask, grads)
    return grads.query, grads.key, grads.value, None if of_bias is None else of_bias.sum(0)
