"""`F.scaled_dot_product_attention` within a region, on this rank's parts of the sequence."""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_attention import attend_sequence, rows_of
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.ops.error_reports import names_op

SDPA = "scaled_dot_product_attention"


def attend(region: ParallelRegion, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on this rank's parts of the sequence."""
    return reporting_to_peers(region.peers, _attend, region, *args, **kwargs)


@names_op(SDPA)
def _attend(
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    region.expect(SDPA)
    if query.dim() < 3:
        raise ValueError(
            f"{SDPA}: query has shape {list(query.shape)}, must be (..., heads, sequence, features)"
        )
    lead = query.shape[:-3]
    if len(lead) != 1:
        query, key, value = (
            t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4) for t in (query, key, value)
        )
    mask = None
    if attn_mask is not None:
        if is_causal:
            raise ValueError(f"{SDPA}: attn_mask and is_causal=True exclude each other")
        mask = mask_of(region, attn_mask, query, key)
    out, _ = attend_sequence(
        SDPA,
        region,
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
    )
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


def mask_of(
    region: ParallelRegion, attn_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> SequenceMask:
    """Checks and returns an `attn_mask` of the whole sequence; query and key are parts of it."""
    rows, keys = rows_of(query), rows_of(key)
    lengths = region.whole_length(rows), region.whole_length_of_keys(rows, keys)
    if attn_mask.dim() > 4 or tuple(attn_mask.shape[-2:]) != lengths:
        raise NotImplementedError(
            f"{SDPA}: attn_mask of shape {list(attn_mask.shape)} within "
            f"context_parallel must be that of the whole sequence, (..., {lengths[0]}, "
            f"{lengths[1]}); use is_causal, or flex_attention with a BlockMask. Models of "
            "transformers make masks of this rank's part: pass the model to "
            "context_parallel(model=...)"
        )
    if attn_mask.requires_grad:
        raise NotImplementedError(
            f"{SDPA}: attn_mask has requires_grad=True within "
            "context_parallel, which is not supported: use flex_attention with a score_mod"
        )
    return SequenceMask(matrix=attn_mask[(None,) * (4 - attn_mask.dim())])
