"""Corrects computations that depend on a rank's positions, for the whole sequence.

Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the longest position,
which differs from rank to rank. Llama 4 scales queries of layers without rotary embeddings by their
index in the tensor, and ignores `position_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.flex_hook import spread_region
from symm_cp.context_parallel.load_balancers import positions_on
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.ops.attention.layouts import encoded
from symm_cp.schedule.layout import sequential

_NAME = "position_ids"


# --- rotary embeddings -------------------------------------------------------------------------


def _depends_on_length(module: nn.Module) -> bool:
    """Tells whether a module's rotary embedding depends on the longest position."""
    kinds: Any = module.rope_type
    types = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(t, str) and ("dynamic" in t or t == "longrope") for t in types)


def use_longest_position(stack: ExitStack, parts: Sequence[nn.Module]) -> None:
    """Has rotary embeddings use all ranks' longest position in a region, until the end of `stack`.

    Hooks append that position to `position_ids` as a column, and remove its column from results.
    """
    for module in parts:
        if "rope_type" in module.__dict__ and _depends_on_length(module):
            before = module.register_forward_pre_hook(_before, with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(_after, with_kwargs=True)
            stack.callback(after.remove)


def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    region = spread_region()
    if region is None:
        return None
    if _NAME in kwargs:
        return args, {**kwargs, _NAME: _with_longest(region, kwargs[_NAME])}
    return (args[0], _with_longest(region, args[1]), *args[2:]), kwargs


def _with_longest(region: ParallelRegion, positions: torch.Tensor) -> torch.Tensor:
    own = positions.flatten().amax(0, keepdim=True)
    ranks = encoded((sequential(region.world_size, region.world_size),))
    gathered = torch.ops.symm_mem._gather_sequence(
        own[None], ranks, region.world_size, region.group
    )
    longest = gathered.amax()
    return torch.cat([positions, longest.expand(*positions.shape[:-1], 1)], -1)


def _after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
    if spread_region() is None:
        return None
    columns = (kwargs[_NAME] if _NAME in kwargs else args[1]).shape[-1]
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if part.dim() < 2 or part.shape[-2] != columns:
            raise NotImplementedError(
                f"context_parallel: {type(module).__name__} returned a tensor of shape "
                f"{list(part.shape)} for {columns} positions; with rotary embeddings that depend "
                "on the length, the shape must be (..., positions, features)"
            )
    cut = tuple(part[..., :-1, :] for part in parts)
    return cut if isinstance(result, tuple) else cut[0]


# --- scales of queries -------------------------------------------------------------------------

#: The attribute of Llama 4's attention modules that turns on scales of queries by position.
SCALED = "attn_temperature_tuning"


def rescaled(region: ParallelRegion, module: Any, query: torch.Tensor) -> torch.Tensor:
    """Returns queries (B, H, S, E) scaled by their positions in the whole sequence.

    Llama 4's attention has scaled them by their index in the tensor, unless it has `use_rope`.
    """
    length = query.shape[2]
    if region.world_size == 1 or region.is_padding(length) or module.use_rope:
        return query
    positions = positions_on(query.device, region.layout(length), region.rank)
    local = torch.arange(length, device=query.device)
    ratio = _scales(module, positions) / _scales(module, local)
    return query * ratio.view(-1, 1, length, 1).to(query.dtype)


def _scales(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """Returns the scales of positions, as `Llama4TextAttention.forward` of transformers does."""
    floors = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return torch.log1p(floors) * module.attn_scale + 1.0
