"""Attention to a cache that is spread over ranks: to the keys that `SpreadCache` returns."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.flex_hook import current_mode
from symm_cp.context_parallel.spread_keys import SpreadKeys
from symm_cp.ops.attention.spread_cache import spread_cache_attention

_OP = "SpreadCache"
_COLUMNS = "_symm_cp_columns"


@dataclass
class Turn:
    """The layer whose keys the cache returned last; None once the model has attended to them."""

    layer: int | None = None


@dataclass(frozen=True)
class Part:
    """This rank's part of a layer's keys, as the cache returns it to the model."""

    group: str
    kept: SpreadKeys
    turn: Turn
    config: Any  # of the model

    def awaits(self, module: Any, keys: torch.Tensor) -> bool:
        """Tells whether a module attends to this part, or to keys made from it (latent attention).

        The cache has just returned the part for the module's layer.
        """
        return (
            self.turn.layer is not None
            and getattr(module, "layer_idx", None) == self.turn.layer
            and getattr(module, "config", None) is self.config
            and keys.dim() == 4
            and keys.shape[2] == self.kept.keys.shape[2]
        )

    def columns(self, mask: torch.Tensor) -> torch.Tensor:
        """Returns the columns of a mask for this rank's keys; kept with the mask for all layers."""
        if mask.dim() != 4 or mask.shape[3] != self.kept.length:
            raise ValueError(
                f"{_OP}: attention_mask has shape {list(mask.shape)}, must be (batch, heads, "
                f"queries, {self.kept.length}): of all positions in the cache"
            )
        key = (self.kept.blocks, self.kept.length)
        known = getattr(mask, _COLUMNS, None)
        if known is None or known[0] != key:
            known = key, mask.index_select(3, self.kept.positions)
            setattr(mask, _COLUMNS, known)
        own: torch.Tensor = known[1]
        return own


class _Last(threading.local):
    #: The part that a cache returned last in this thread.
    part: Part | None = None


last = _Last()


def part_of(module: Any, keys: torch.Tensor) -> Part | None:
    """Returns the part that keys from a cache belong to; None for all other tensors."""
    part = last.part
    return part if part is not None and part.awaits(module, keys) else None


def attend(
    part: Part,
    module: nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    options: dict[str, Any],
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attends to the keys of all ranks; arguments are transformers'. Returns (B, H, S, E)."""
    part.turn.layer = None
    name = type(module).__name__
    if current_mode() is not None:
        raise NotImplementedError(
            f"{_OP}: {name} was called within context_parallel, where each rank has a part of the "
            "sequence, but with this cache every rank decodes all new tokens: call it outside of "
            "that context"
        )
    bias = kwargs.get("position_bias")
    for feature, asked in (
        ("output_attentions", bool(kwargs.get("output_attentions"))),
        ("dropout", options["dropout"] > 0),
        ("position_bias", bias is not None and bias.numel() > 0),
        ("a mask other than a tensor", not (mask is None or isinstance(mask, torch.Tensor))),
    ):
        if asked:
            raise NotImplementedError(f"{_OP}: {name} has {feature}, which is not supported")
    query, key, value = tensors
    sinks = kwargs.get("s_aux")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    places: dict[str, Any] = {}
    if mask is None and causal and query.shape[2] > 1:
        places["key_positions"] = part.kept.positions
        places["first_query"] = part.kept.length - query.shape[2]
    out, _ = spread_cache_attention(
        query,
        key,
        value,
        group=part.group,
        mask=None if mask is None else part.columns(mask),
        scale=options["scaling"],
        softcap=kwargs.get("softcap"),
        sinks=getattr(module, "sinks", None) if sinks is None else sinks,
        **places,
    )
    return out
