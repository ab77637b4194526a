"""Calls of models of transformers: their positions, caches and losses."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.load_balancers import positions_on
from symm_cp.cuda.cached import HostReads, capturing
from symm_cp.group.memory import resolve
from symm_cp.integrations.transformers.limits import (
    SEES_ALL_RANKS,
    WATCHED,
    call_limits,
    positions_known,
)


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _argument(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    names = _parameters(module.__class__)
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else kwargs.get(name)


def check_call(
    watch: Watch, module: nn.Module, args: Any, kwargs: Any, *, masks_are_whole: bool, first: int
) -> None:
    """Refuses calls in which a model would treat this rank's part as the whole sequence.

    `masks_are_whole`: the model's masks cover the whole sequence, gathered from all ranks. `first`:
    the number of its first position.
    """
    asked = [n for n in WATCHED if kwargs.get(n) is not None and kwargs[n] is not False]
    for limit in call_limits(module, asked) if asked else ():
        raise limit.error(module)
    _check_documents(watch, module, kwargs)
    _check_padding(watch, module, args, kwargs)
    _check_cache(module, args, kwargs)
    _check_kept(module, args, kwargs)
    _check_positions(watch, module, args, kwargs, masks_are_whole, first)


def _check_documents(watch: Watch, module: nn.Module, kwargs: Any) -> None:
    """Refuses documents that did not reach recurrent layers, as in Mamba 2 with its head."""
    if kwargs.get("cu_seq_lens_q") is None or not watch.recurred_without_documents:
        return
    if any(getattr(part, SEES_ALL_RANKS, False) for part in module.modules()):
        raise NotImplementedError(
            f"context_parallel: {type(module).__name__} was called with cu_seq_lens_q, which it "
            "does not pass on to its recurrent layers: they did not keep documents apart. Call its "
            "base model, and its head on the result"
        )


def _check_padding(watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses padding of which recurrent layers do not hear, if this rank holds one position.

    transformers then takes the call for a step of decoding, and passes them no mask.
    """
    rank = resolve(watch.group).rank
    if all(balancer.lengths[rank] != 1 for balancer in watch.balancers):
        return
    mask = _argument(module, "attention_mask", args, kwargs)
    if mask is None or not any(getattr(part, SEES_ALL_RANKS, False) for part in module.modules()):
        return
    if isinstance(mask, torch.Tensor) and (mask.dim() != 2 or bool(mask.all())):
        return
    raise NotImplementedError(
        f"context_parallel: {type(module).__name__} has recurrent layers and got an attention_mask "
        f"with padding, but rank {rank} holds one position, from which transformers keeps the "
        "mask. Use longer sequences or fewer ranks, or pad right and leave the attention_mask out"
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


def _check_positions(
    watch: Watch, module: nn.Module, args: Any, kwargs: Any, masks_are_whole: bool, first: int
) -> None:
    """Refuses language models that count positions from 0 on each rank."""
    name, names = type(module).__name__, _parameters(module.__class__)
    if "position_ids" in names:
        positions = _argument(module, "position_ids", args, kwargs)
        if positions is None and positions_known(module):
            return
        if positions is None:
            raise NotImplementedError(
                f"context_parallel: {name} was called without position_ids, so it counted from 0 "
                "on each rank. Pass the position_ids of this rank's part; symm_cp.shard_batch "
                "makes them"
            )
        watch.has_positions = True
        # With whole masks, packed documents are found in the whole sequence.
        unmasked = not masks_are_whole and (
            _argument(module, "attention_mask", args, kwargs) is None
        )
        if isinstance(positions, torch.Tensor):
            _check_values(watch, first, name, positions, unmasked)
    elif "input_ids" in names and not watch.has_positions and not positions_known(module):
        raise NotImplementedError(
            f"context_parallel: {name} takes no position_ids, so it counts from 0 on each rank. "
            "Pass the model to context_parallel(model=...), which supports some such models"
        )


_read_positions: HostReads[list[bool]] = HostReads()


def _check_values(
    watch: Watch, first: int, name: str, positions: torch.Tensor, unmasked: bool
) -> None:
    """Refuses positions (B, S) that a model which counts from `first` would misinterpret."""
    if positions.dim() != 2:  # several positions for each token
        return
    if not first and not unmasked:
        return
    if capturing(positions.device):  # the host cannot read them now; it did in the warm-up call
        return
    rank = resolve(watch.group).rank
    held = (b for b in watch.balancers if b.lengths[rank] == positions.shape[1])
    balancer = next(held, None)
    if balancer is None:
        return
    expected = positions_on(positions.device, balancer, rank)

    def read() -> list[bool]:
        each = [(positions == expected + offset).all() for offset in (0, first)]
        return list(torch.stack(each).tolist())

    from_zero, as_counted = _read_positions.get(positions, read, context=(balancer, first))
    if first and from_zero:
        raise NotImplementedError(
            f"context_parallel: {name} was called with position_ids that count from 0, but it "
            f"counts from {first} (padding_idx + 1): add {first} to them"
        )
    # Without an attention_mask transformers treats a jump in positions as the start of a document,
    # but sees no jump between ranks.
    if unmasked and not as_counted:
        raise NotImplementedError(
            f"context_parallel: {name} was called without attention_mask and with position_ids "
            f"that are not those of {balancer}: packed documents require "
            "context_parallel(model=...). For one document pass an attention_mask of ones"
        )
