"""Calls of models of transformers: their positions, caches and losses."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.guards import Watch
from symm_cp.cuda.cached import capturing
from symm_cp.group.memory import resolve
from symm_cp.integrations.transformers.limits import WATCHED, call_limits, first_position
from symm_cp.integrations.transformers.recurrent import is_recurrent


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _argument(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    names = _parameters(module.__class__)
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else kwargs.get(name)


def check_call(watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses calls in which a model would treat this rank's part as the whole sequence."""
    asked = [n for n in WATCHED if kwargs.get(n) is not None and kwargs[n] is not False]
    for limit in call_limits(module, asked) if asked else ():
        raise limit.error(module)
    _check_recurrent(watch, module, args, kwargs)
    _check_cache(module, args, kwargs)
    _check_kept(module, args, kwargs)
    _check_positions(module, args, kwargs)
    _check_decoder_input(module, args, kwargs)


def _check_recurrent(watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses documents and padding of which recurrent layers do not hear.

    Mamba 2 with its head keeps documents to itself. If this rank holds one position, transformers
    takes the call for a step of decoding, and keeps the padding.
    """
    rank, name = resolve(watch.group).rank, type(module).__name__
    mask = _argument(module, "attention_mask", args, kwargs)
    padded = mask is not None and any(each.lengths[rank] == 1 for each in watch.balancers)
    unheard = kwargs.get("cu_seq_lens_q") is not None and watch.recurred_without_documents
    if not (padded or unheard) or not any(map(is_recurrent, map(type, module.modules()))):
        return
    if unheard:
        raise NotImplementedError(
            f"context_parallel: {name} was called with cu_seq_lens_q, which it does not pass on to "
            "its recurrent layers: they did not keep documents apart. Call its base model, and its "
            "head on the result"
        )
    if not isinstance(mask, torch.Tensor) or (mask.dim() == 2 and not bool(mask.all())):
        raise NotImplementedError(
            f"context_parallel: {name} has recurrent layers and got an attention_mask with "
            f"padding, but rank {rank} holds one position, from which transformers keeps the mask. "
            "Use longer sequences or fewer ranks, or pad right and leave the attention_mask out"
        )


def _check_cache(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses generation, recognised by a cache argument, which only `generate` passes."""
    generates = getattr(module, "can_generate", None)
    if generates is None or not generates():
        return
    for argument in ("cache", "past_key_values"):  # the second is the name before 5.24
        if _argument(module, argument, args, kwargs) is not None:
            raise NotImplementedError(
                f"context_parallel: {type(module).__name__} was called with {argument}, as "
                "generate does: a cache holds the keys of this rank's part only. Generate outside "
                "of the context"
            )


def _check_kept(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses `logits_to_keep`, which would choose positions in this rank's part."""
    if "logits_to_keep" not in _parameters(module.__class__):
        return
    kept = _argument(module, "logits_to_keep", args, kwargs)
    if isinstance(kept, torch.Tensor) or kept:
        given = f"{kept}" if isinstance(kept, int) else "positions"
        raise NotImplementedError(
            f"context_parallel: {type(module).__name__} was called with logits_to_keep={given}: it "
            "would keep positions of each rank's part. Call it without, and choose from the logits "
            "of the whole sequence (symm_cp.context_parallel_unshard)"
        )


def _check_positions(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses language models that count positions from 0 on each rank."""
    if "position_ids" not in _parameters(module.__class__):
        return
    positions, name = _argument(module, "position_ids", args, kwargs), type(module).__name__
    if positions is None:
        raise NotImplementedError(
            f"context_parallel: {name} was called without position_ids, so it counted from 0 "
            "on each rank. Pass the position_ids of this rank's part; symm_cp.shard_batch "
            "makes them"
        )
    first = first_position(getattr(module, "embeddings", module))
    if not first or not isinstance(positions, torch.Tensor) or capturing(positions.device):
        return
    if bool((positions < first - 1).any()):  # padding has the number before the first
        raise NotImplementedError(
            f"context_parallel: {name} was called with position_ids that count from 0, but it "
            f"counts from {first} (padding_idx + 1): pass the model to symm_cp.shard_batch, which "
            "makes them"
        )


_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


def _check_decoder_input(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses calls in which a model shifts this rank's part of the labels."""
    if not {*_DECODER} & {*_parameters(module.__class__)}:
        return
    if all(_argument(module, name, args, kwargs) is None for name in _DECODER):
        raise NotImplementedError(
            f"context_parallel: {type(module).__name__} was called without decoder_input_ids, so "
            "it shifted this rank's part of the labels. symm_cp.shard_batch(model=...) makes "
            "decoder_input_ids of the whole sequence"
        )
