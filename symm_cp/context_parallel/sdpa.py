"""`F.scaled_dot_product_attention` within a region, on this rank's parts of the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from symm_cp.context_parallel import flex
from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.load_balancers import LoadBalancer, permutation_on, positions_on
from symm_cp.context_parallel.refusals import reporting_to_peers
from symm_cp.context_parallel.region import (
    ParallelRegion,
    outside_graph_if_empty,
    without_padding,
)
from symm_cp.context_parallel.sequence_attention import attend_sequence, by_sample
from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.error_reports import names_op

SDPA = "scaled_dot_product_attention"


def attend(region: ParallelRegion, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on this rank's parts of the sequence."""
    if region.holds_none and torch.compiler.is_dynamo_compiling():
        return outside_graph_if_empty()(attend, region, *args, **kwargs)  # type: ignore[no-any-return]
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
    if dropout_p != 0.0 and attn_mask is not None:
        raise NotImplementedError(
            f"{SDPA}: {dropout_p=} with an attn_mask within context_parallel is not supported: use "
            "0.0, or is_causal without attn_mask"
        )
    if query.dim() < 3:
        raise ValueError(
            f"{SDPA}: query has shape {list(query.shape)}, must be (..., heads, sequence, features)"
        )
    lead = query.shape[:-3]
    if len(lead) != 1:
        query, key, value = (
            t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4) for t in (query, key, value)
        )
    if dropout_p != 0.0:
        out = attend_sequence(
            region,
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            dropout_p=dropout_p,
        )
    else:

        def attend(
            own: ParallelRegion,
            index: int | None,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
        ) -> torch.Tensor:
            mask = attn_mask
            if mask is not None and index is not None and mask.dim() >= 4 and len(mask) != 1:
                mask = mask[index : index + 1]
            return _attend_batch(own, q, k, v, mask, is_causal, scale, enable_gqa)

        def attend_all(*tensors: torch.Tensor) -> torch.Tensor:
            return by_sample(SDPA, region, tensors, attend)

        out = without_padding(region, attend_all, 2, query, key, value)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


def _attend_batch(
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    if attn_mask is not None:
        if is_causal:
            raise ValueError(f"{SDPA}: attn_mask and is_causal=True exclude each other")
        return _attend_masked(region, query, key, value, attn_mask, scale, enable_gqa)
    queries, keys = _length(query), _length(key)
    balancer: LoadBalancer | torch.Tensor | None = region.layouts_in_graph(query.device)
    if balancer is None and is_causal:
        balancer = region.layout(queries)
    elif balancer is None:
        balancer = region.layout_of_keys(queries, keys, ordered=False)
    return all_gather_attention(  # type: ignore[no-any-return]
        query,
        key,
        value,
        group=region.group,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        load_balancer=balancer,
        method=region.method,
    )


def _length(query: torch.Tensor) -> int:
    local = query.to_local() if hasattr(query, "to_local") else query
    return int(local.shape[2])


def _attend_masked(
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    queries, keys = flex.spread(region, query, key)
    lengths = (queries.seq_length, keys.seq_length)
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
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if not flex.in_tiles(query.device):
        full_key, full_value = flex.gathered(region, keys, key, value)
        rows = positions_on(mask.device, queries, resolve(region.group).rank)
        columns = permutation_on(mask.device, keys)
        return F.scaled_dot_product_attention(
            query,
            full_key,
            full_value,
            attn_mask=mask[..., rows, :][..., columns],
            scale=scale,
            enable_gqa=enable_gqa,
        )
    batch, heads = (size - 1 for size in mask.shape[:2])  # a size of 1 applies to all

    def mask_entry(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return mask[b.clamp(max=batch), h.clamp(max=heads), q_idx, kv_idx]

    def biased(score: torch.Tensor, *indices: Any) -> torch.Tensor:
        return score + mask_entry(*indices)

    is_bool = attn_mask.dtype == torch.bool
    out, _ = flex_all_gather_attention(
        query,
        key,
        value,
        group=resolve(region.group),
        layout=queries.layout,
        kv_layout=keys.layout,
        mask_mod=mask_entry if is_bool else None,
        score_mod=None if is_bool else biased,
        scale=scale,
        enable_gqa=enable_gqa,
        method=region.method,
    )
    return out
