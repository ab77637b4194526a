"""Attention of models with our implementation outside of any context: the same as transformers'."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_EAGER = "eager_attention_forward"


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls `F.scaled_dot_product_attention`, or eager attention for soft caps and sinks."""
    if kwargs.get("softcap") is None and not has_sinks(module, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, **kwargs
        )
    eager = getattr(sys.modules[type(module).__module__], _EAGER, None)
    if eager is None:
        raise NotImplementedError(
            f"symm_cp: {type(module).__name__} has a soft cap or sinks, but its module "
            f"{type(module).__module__} has no {_EAGER}: use another attn_implementation outside "
            "of context_parallel"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = _additive(query, key, attention_mask, is_causal=is_causal)
    out, weights = eager(module, query, key, value, mask, **kwargs)
    if mask is not None:  # zeros, as in a region and by sdpa; eager attention takes the mean
        blind = (mask <= torch.finfo(mask.dtype).min / 2).all(-1).transpose(1, 2)[..., None]
        out = out.masked_fill(blind, 0)
    return out, weights


def has_sinks(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Tells whether the softmax of attention has a logit that belongs to no key."""
    return kwargs.get("s_aux") is not None or getattr(module, "sinks", None) is not None


def _additive(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool
) -> torch.Tensor | None:
    """Converts a mask of `F.scaled_dot_product_attention` to the one that eager attention adds."""
    rows, keys = query.shape[2], key.shape[2]
    if mask is None and is_causal and rows > 1:
        q, k = (torch.arange(size, device=query.device) for size in (rows, keys))
        mask = (k <= q[:, None])[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)
