"""What a model of transformers makes of a batch: decoder inputs, positions, shifted labels.

Models are recognised by their attributes; transformers is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def plain(model: nn.Module) -> Any:
    """Returns the model inside of wrappers of torch.compile, DDP and the like."""
    inner = model
    while True:
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            return inner
        inner = wrapped


def positions(shape: Sequence[int], seq_dim: int, device: torch.device) -> torch.Tensor:
    """Returns the positions along `seq_dim` as a tensor of a shape."""
    along = [1] * len(shape)
    along[seq_dim] = -1
    return torch.arange(shape[seq_dim], device=device).view(along).expand(*shape)


def has_decoder(model: nn.Module | None) -> bool:
    """Tells whether a model has an encoder and a decoder, so that labels are the decoder's."""
    config = None if model is None else getattr(plain(model), "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(plain(model).forward).parameters


def add_decoder_input(op: str, model: nn.Module, batch: dict[str, Any]) -> None:
    """Adds `decoder_input_ids` made from the labels, which models would make from their part."""
    given = (batch.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if not has_decoder(model) or any(value is not None for value in given):
        return
    make = getattr(plain(model), "prepare_decoder_input_ids_from_labels", None)
    if make is None or batch.get("labels") is None:
        raise ValueError(
            f"{op}: {type(plain(model)).__name__} makes decoder_input_ids of its part of the "
            "sequence: pass those of the whole sequence, or labels"
        )
    batch["decoder_input_ids"] = make(labels=batch["labels"])


def add_positions(model: nn.Module, batch: dict[str, Any], sequence: torch.Tensor) -> None:
    """Adds the positions that a model counts in the whole sequence, if it takes any."""
    decoder, name = batch.get("decoder_input_ids"), "decoder_position_ids"
    if decoder is not None and batch.get(name) is None and _takes(model, name):
        batch[name] = positions(decoder.shape, 1, decoder.device)
    if "position_ids" in batch or not _takes(model, "position_ids"):
        return
    ids = batch.get("input_ids")
    for part in plain(model).modules():
        if ids is not None and hasattr(part, "create_position_ids_from_input_ids"):
            made = part.create_position_ids_from_input_ids(ids, part.padding_idx)
            batch["position_ids"] = made
            return
    batch["position_ids"] = positions(sequence.shape[:2], 1, sequence.device)


def shifts_labels(op: str, model: nn.Module) -> bool:
    """Tells whether a model shifts labels unless it gets `shift_labels`.

    Raises `NotImplementedError` for a language model with a loss of its own.
    """
    inner = plain(model)
    if has_decoder(model) or _uses_loss_function(inner):
        return would_shift_labels(model)
    name = type(inner).__name__
    if "CausalLM" in name or "LMHead" in name:
        raise NotImplementedError(
            f"{op}: {name} computes its loss without shift_labels: call {op} without model, "
            "and compute the loss from the logits and the labels that it returns"
        )
    return False


def would_shift_labels(model: nn.Module) -> bool:
    """Tells whether a model of transformers is known to shift labels unless it gets others."""
    inner = plain(model)
    if has_decoder(inner) or not _uses_loss_function(inner):
        return False
    loss: Any = getattr(inner, "loss_function", None)
    return "shift_labels" in inspect.signature(loss).parameters


def _uses_loss_function(inner: Any) -> bool:
    """Tells whether the loss is that of `loss_function`, which the model's class or user chose."""
    forward = inspect.unwrap(type(inner).forward)
    loss = getattr(inner, "loss_function", None)
    return loss is not None and "loss_function" in forward.__code__.co_names
