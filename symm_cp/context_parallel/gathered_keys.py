"""Attention by torch's kernels over gathered keys, with masks and scores that are functions.

This is how GPUs attend with such masks: no kernel there consumes keys tile by tile as they arrive.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from symm_cp.context_parallel.block_mask import Cuts, local_score_mod
from symm_cp.context_parallel.load_balancers import (
    LoadBalancer,
    gathered_rows_on,
    permutation_on,
    positions_on,
)
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.cuda.cached import capturing
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.gather_kv import all_gather_kv


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: A copy of torch's `flex_attention` that keeps its code while flex_hook.py replaces torch's.
original = _copy(torch_flex_attention.flex_attention)


def compiled_flex(*args: Any, **kwargs: Any) -> Any:
    """Torch's `flex_attention`, compiled."""
    return torch.compile(original)(*args, **kwargs)


def in_tiles(device: torch.device) -> bool:
    """Whether keys are consumed as they arrive; otherwise torch's kernels get all keys at once."""
    return device.type == "cpu"


def attend_gathered(
    region: ParallelRegion,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    balancers: tuple[LoadBalancer, LoadBalancer],
    mask: SequenceMask,
    score_mod: Modifier | None,
    torch_flex: Callable[..., Any],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends to the keys of all ranks, gathered in rank order. Collective.

    `tensors` are query, key and value, this rank's parts; `balancers` say how queries and keys are
    spread; `mask` and `score_mod` are of the whole sequence; `torch_flex` is torch's
    `flex_attention`, compiled or not. `options` are `scale` and `enable_gqa`. Returns the output
    and its log-sum-exp, which a mask that is a matrix does not have.
    """
    query, key, value = tensors
    queries, keys = balancers
    full_key, full_value = _gathered(region, keys, key, value)
    if mask.matrix is not None:
        rows = positions_on(mask.matrix.device, queries, region.rank)
        columns = permutation_on(mask.matrix.device, keys)
        own = mask.matrix[..., rows, :][..., columns]
        out = F.scaled_dot_product_attention(query, full_key, full_value, attn_mask=own, **options)
        return out, None
    if score_mod is not None:
        score_mod = local_score_mod(
            score_mod, queries, region.rank, kv_load_balancer=keys, device=query.device
        )
    out, more = torch_flex(
        query,
        full_key,
        full_value,
        score_mod=score_mod,
        block_mask=_own_blocks(mask, len(query), queries, keys, region.rank, query.device),
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, more.lse


# All layers of a model share a few masks.
_blocks_of: weakref.WeakKeyDictionary[SequenceMask, BlockMask] = weakref.WeakKeyDictionary()
_cuts = Cuts()


def _own_blocks(
    mask: SequenceMask,
    batch: int,
    queries: LoadBalancer,
    keys: LoadBalancer,
    rank: int,
    device: torch.device,
) -> BlockMask | None:
    """Returns the block mask of this rank's queries against all keys."""
    whole = mask.whole_blocks
    if whole is None:
        if not mask.is_function:
            return None
        lengths = (queries.seq_length, keys.seq_length)
        whole = _blocks_of.get(mask)
        if whole is None or tuple(whole.seq_lengths) != lengths:
            whole = _blocks_of[mask] = create_block_mask(
                mask.as_mask_mod(), batch, None, *lengths, device=device
            )
    elif getattr(mask.block_mask, "symm_cp_cut", None) == (queries, keys, rank):
        return mask.block_mask
    if capturing(whole.kv_num_blocks.device):
        raise RuntimeError(
            "flex_attention: block_mask of the whole sequence cannot be cut while a CUDA graph is "
            "captured, since the host must read it: pass local_block_mask(block_mask, "
            "load_balancer, rank) of symm_cp.context_parallel.block_mask, made before, and keep it "
            "as long as the graph"
        )
    return _cuts.get(whole, queries, keys, rank)


def _gathered(
    region: ParallelRegion, keys: LoadBalancer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of all ranks, in rank order."""
    padding = max(keys.lengths) - key.shape[2]
    full_key, full_value = all_gather_kv(
        *(F.pad(t, (0, 0, 0, padding)) if padding else t for t in (key, value)),
        seq_dim=2,
        group=region.group,
    )
    if len(set(keys.lengths)) == 1:
        return full_key, full_value
    rows = gathered_rows_on(key.device, keys)
    return full_key.index_select(2, rows), full_value.index_select(2, rows)
