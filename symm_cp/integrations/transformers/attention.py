"""The attention and mask functions that transformers calls for `attn_implementation="symm_cp"`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

from symm_cp.context_parallel import sdpa
from symm_cp.context_parallel.flex_hook import current_mode, handled
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_attention import attend_sequence
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.integrations.transformers import outside, spread
from symm_cp.integrations.transformers.limits import SYMM_CP
from symm_cp.integrations.transformers.masks import OP, sequence_mask
from symm_cp.integrations.transformers.positions import SCALED, rescaled
from symm_cp.integrations.transformers.tables import bias_by_distance
from symm_cp.ops.attention.mesh_calls import reporting_to_peers

NAME = SYMM_CP

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> SequenceMask | torch.Tensor | None:
    """Returns the mask of a model's layers; within a region, one for the whole sequence."""
    mode = current_mode()
    is_step = isinstance(q_offset, torch.Tensor) or q_offset != 0 or kv_offset != 0
    if mode is None or (mode.region.world_size == 1 and is_step):
        lengths = (q_length, kv_length, q_offset, kv_offset)
        return masking_utils.sdpa_mask(
            batch_size, *lengths, mask_function, attention_mask, **kwargs
        )
    if is_step:
        raise NotImplementedError(
            f"{OP}: a cache holds keys of earlier calls ({q_offset=}), on each rank only those of "
            "its part: generation within context_parallel is not supported. Generate outside of "
            "it"
        )
    return reporting_to_peers(
        mode.region.peers,
        sequence_mask,
        mode.region,
        mask_function,
        batch_size,
        (q_length, kv_length),
        attention_mask,
        kwargs,
    )


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: SequenceMask | torch.Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention of one layer: within a region over the whole sequence, else as usual.

    Shapes are transformers': query (B, H, S, E), key and value (B, G, S, E); returns (B, S, H, E)
    and no weights. Checkpoints recompute in the region of their mask.
    """
    tensors = query, key, value
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if (part := spread.part_of(module, key)) is not None:
        call = (part, module, tensors, attention_mask, options, is_causal, kwargs)
        out = reporting_to_peers(part.group, spread.attend, *call)
        return out.transpose(1, 2).contiguous(), None
    mode = current_mode()
    region = mode.region if mode is not None else getattr(attention_mask, "region", None)
    if mode is not None:
        mode.watch.called = True
    of_one = region is not None and region.world_size == 1 and key.shape[2] != query.shape[2]
    if (bias := kwargs.get("position_bias")) is not None and bias.numel() == 0:
        del kwargs["position_bias"]
    if region is None or (of_one and not isinstance(attention_mask, SequenceMask)):
        options["is_causal"] = is_causal
        return outside.attend(module, query, key, value, attention_mask, **options, **kwargs)
    out = reporting_to_peers(
        region.peers,
        handled,
        _attend,
        region,
        module,
        tensors,
        attention_mask,
        {"dropout_p": dropout, "scale": scaling},
        is_causal,
        kwargs,
    )
    return out.transpose(1, 2).contiguous(), None


def _attend(
    region: ParallelRegion,
    module: nn.Module,
    tensors: _Tensors,
    mask: SequenceMask | torch.Tensor | BlockMask | None,
    options: dict[str, Any],
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    name = type(module).__name__
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            f"{NAME}: {name} got output_attentions=True, but weights are not kept within "
            "context_parallel: call it without, or outside of the context"
        )
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            f"{NAME}: {name} has a paged cache, which is not supported within context_parallel"
        )
    query, *others = tensors
    if getattr(module, SCALED, None):
        tensors = (rescaled(region, module, query), *others)
    sinks, bias = kwargs.get("s_aux"), kwargs.get("position_bias")
    options = {
        **options,
        "enable_gqa": tensors[0].shape[1] != tensors[1].shape[1],
        "softcap": kwargs.get("softcap"),
        "bias": None if bias is None else bias_by_distance(name, bias),
        "sinks": getattr(module, "sinks", None) if sinks is None else sinks,
    }
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = SequenceMask(is_causal=causal)
    if isinstance(mask, BlockMask):  # of the whole sequence, from the model's caller
        mask = SequenceMask(block_mask=mask)
    elif isinstance(mask, torch.Tensor):  # likewise
        mask = sdpa.mask_of(region, mask, tensors[0], tensors[1])
    elif (documents := kwargs.get("cu_seq_lens_q")) is not None:
        mask = _with_documents(mask, documents, kwargs.get("cu_seq_lens_k"), query)
    out, _ = attend_sequence(NAME, region, *tensors, mask, **options)
    return out


def _with_documents(
    mask: SequenceMask, edges: torch.Tensor, edges_of_keys: torch.Tensor | None, query: torch.Tensor
) -> SequenceMask:
    """Adds the documents in `cu_seq_lens_q` of the whole batch to a mask."""
    if query.shape[0] != 1:
        raise NotImplementedError(
            f"{NAME}: cu_seq_lens_q with {query.shape[0]} samples is not supported within "
            "context_parallel: pack documents into one sample, or give them by position_ids"
        )
    if edges_of_keys is not None and edges_of_keys.shape != edges.shape:
        raise ValueError(
            f"{NAME}: cu_seq_lens_q has {len(edges)} boundaries and cu_seq_lens_k "
            f"{len(edges_of_keys)}, must be equal"
        )
    return replace(mask, cu_seqlens=edges)
