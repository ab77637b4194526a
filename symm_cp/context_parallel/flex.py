"""`flex_attention` within a region: what torch's function takes, on this rank's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask

from symm_cp.context_parallel.attention import is_dtensor
from symm_cp.context_parallel.block_mask import local_block_mask, local_score_mod
from symm_cp.context_parallel.load_balancers import LoadBalancer, Sequential
from symm_cp.memory import resolve
from symm_cp.ops.attention.flex.captures import captures_tensors
from symm_cp.ops.attention.flex.mask import Modifier, whole_mask
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.attention.gather_kv import all_gather_kv

if TYPE_CHECKING:
    from symm_cp.context_parallel.region import Region

_OP = "flex_attention"
#: The module in which transformers defines its masks.
TRANSFORMERS = "transformers.masking_utils"


def attend_masked(
    region: Region,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` with a mask of the whole sequence."""
    queries, keys = _spread(region, query, key)
    lengths = (queries.seq_length, keys.seq_length)
    if attn_mask.dim() > 4 or tuple(attn_mask.shape[-2:]) != lengths:
        raise NotImplementedError(
            f"scaled_dot_product_attention: attn_mask of shape {list(attn_mask.shape)} within "
            f"context_parallel must be that of the whole sequence, (..., {lengths[0]}, "
            f"{lengths[1]}); use is_causal, or flex_attention with a BlockMask"
        )
    if attn_mask.requires_grad:
        raise NotImplementedError(
            "scaled_dot_product_attention: attn_mask has requires_grad=True within "
            "context_parallel, which is not supported: use flex_attention with a score_mod"
        )
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if not in_tiles(query.device):
        full_key, full_value = _gathered(region, keys, key, value)
        rows = queries.positions(resolve(region.group).rank).to(mask.device)
        columns = keys.permutation().to(mask.device)
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
    )
    return out


def in_tiles(device: torch.device) -> bool:
    """Tells whether keys are consumed as they arrive; otherwise torch's kernels get all of them."""
    return device.type == "cpu"


def _gathered(
    region: Region, keys: LoadBalancer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of all ranks, in the order of the ranks."""
    more = max(keys.lengths) - key.shape[2]
    full_key, full_value = all_gather_kv(
        *(F.pad(t, (0, 0, 0, more)) if more else t for t in (key, value)),
        seq_dim=2,
        group=region.group,
    )
    if len(set(keys.lengths)) == 1:
        return full_key, full_value
    rows = keys.gathered_rows().to(key.device)
    return full_key.index_select(2, rows), full_value.index_select(2, rows)


def _spread(
    region: Region, query: torch.Tensor, key: torch.Tensor
) -> tuple[LoadBalancer, LoadBalancer]:
    """How queries and keys are spread; keys of another length (cross-attention) are evenly."""
    if is_dtensor(query):
        raise NotImplementedError(
            "DTensors with a mask or score_mod are not supported within context_parallel: pass "
            "this rank's parts (to_local())"
        )
    queries = region.layout(query.shape[2])
    if key.shape[2] == query.shape[2]:
        return queries, queries
    return queries, Sequential(key.shape[2] * region.world_size, region.world_size)


def _by_position(mask_mod: Modifier) -> bool:
    """Tells whether a mask depends on positions alone, so that it holds for any sequence length.

    Masks of transformers without lookup tables do, such as causal masks and windows.
    """
    return getattr(mask_mod, "__module__", None) == TRANSFORMERS and not captures_tensors(mask_mod)


def attend(
    region: Region,
    original: Callable[..., Any],
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
    **unknown: Any,
) -> Any:
    """`flex_attention` on this rank's parts of the sequence; `original` is torch's function.

    `score_mod` and `block_mask` are those of the whole sequence. Masks that transformers makes for
    this rank's part are used for the whole where they depend on positions alone.
    """
    if any(option is not None for option in unknown.values()):
        raise NotImplementedError(f"{_OP}: {sorted(unknown)} within context_parallel")
    queries, keys = _spread(region, query, key)
    # A mask that was cut before remembers what it was cut from.
    block_mask = getattr(block_mask, "symm_cp_global", block_mask)
    block_mask, mask_mod = whole_mask(
        block_mask,
        local=(query.shape[2], key.shape[2]),
        whole=(queries.seq_length, keys.seq_length),
        by_position=block_mask is not None and _by_position(block_mask.mask_mod),
    )
    if not in_tiles(query.device):
        full_key, full_value = _gathered(region, keys, key, value)
        options = (scale, enable_gqa, return_lse, kernel_options)
        modifiers = _local_modifiers(region, queries, keys, score_mod, mask_mod, block_mask, query)
        return original(query, full_key, full_value, *modifiers, *options, return_aux=return_aux)
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{_OP}: max_scores within context_parallel")
    out, lse = flex_all_gather_attention(
        query,
        key,
        value,
        group=resolve(region.group),
        layout=queries.layout,
        kv_layout=keys.layout,
        mask_mod=mask_mod,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _local_modifiers(
    region: Region,
    queries: LoadBalancer,
    keys: LoadBalancer,
    score_mod: Modifier | None,
    mask_mod: Modifier | None,
    block_mask: BlockMask | None,
    query: torch.Tensor,
) -> tuple[Modifier | None, BlockMask | None]:
    """Returns the `score_mod` and the block mask of this rank's queries against all keys."""
    rank, device = resolve(region.group).rank, query.device
    if block_mask is None and mask_mod is not None:
        lengths = (queries.seq_length, keys.seq_length)
        block_mask = create_block_mask(mask_mod, None, None, *lengths, device=device)
    if block_mask is not None:
        block_mask = local_block_mask(block_mask, queries, rank, kv_load_balancer=keys)
    if score_mod is not None:
        score_mod = local_score_mod(score_mod, queries, rank, kv_load_balancer=keys, device=device)
    return score_mod, block_mask
