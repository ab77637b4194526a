"""Masks for transformers' own flex attention; within a region they cover the whole sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionMaskInterface, masking_utils

from symm_cp.context_parallel.flex_hook import spread_region
from symm_cp.context_parallel.gathered_keys import in_tiles
from symm_cp.context_parallel.refusals import reporting_to_peers
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.integrations.transformers.attention import mask_of_region
from symm_cp.integrations.transformers.limits import FLEX_ATTENTION
from symm_cp.integrations.transformers.masks import with_packing


def register() -> Callable[[], None] | None:
    """Makes models with flex attention use `flex_mask_function`; returns a function that undoes it.

    Returns None and changes nothing if another function is registered already.
    """
    if (
        AttentionMaskInterface._global_mapping[FLEX_ATTENTION]
        is not masking_utils.flex_attention_mask
    ):
        return None
    AttentionMaskInterface.register(FLEX_ATTENTION, flex_mask_function)
    return lambda: AttentionMaskInterface.register(
        FLEX_ATTENTION, masking_utils.flex_attention_mask
    )


def flex_mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> BlockMask:
    """Returns the mask of a model's layers, as transformers' `flex_attention_mask` does.

    Within a region the mask covers the whole sequence, and the call is collective.
    """
    region = spread_region()
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if region is None:
        return masking_utils.flex_attention_mask(
            *arguments, mask_function, attention_mask, device=device, **kwargs
        )
    if not torch.compiler.is_compiling():
        mask_function = with_packing(mask_function, sys._getframe(1), batch_size)
    mask = reporting_to_peers(
        region.peers, mask_of_region, region, mask_function, arguments, attention_mask
    )
    return _as_blocks(region, mask, batch_size, (q_length, kv_length), torch.device(device))


def _as_blocks(
    region: ParallelRegion,
    mask: SequenceMask,
    batch_size: int,
    local: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """Converts a mask of the whole sequence to a `BlockMask`."""
    lengths = region.whole_length(local[0]), region.whole_length_of_keys(*local)
    if not in_tiles(device):
        return create_block_mask(
            mask.as_mask_mod(), batch_size, None, *lengths, device=device, _compile=True
        )
    # One block with a mask function: each rank evaluates it for tiles of its own queries only;
    # computing more blocks would evaluate all pairs of positions.
    count = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return BlockMask(
        lengths,
        count,
        first,
        *(None,) * 6,
        BLOCK_SIZE=lengths,
        mask_mod=mask.as_mask_mod(),
    )
