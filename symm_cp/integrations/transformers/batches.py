"""What a model of transformers makes of a batch: decoder inputs, positions, shifted labels.

Models are recognised by their attributes; transformers is not imported.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.inspectors import BatchRules, plain, positions


class ModelBatchRules(BatchRules):
    """The rules for a model of transformers."""

    @property
    def has_decoder(self) -> bool:  # type: ignore[override]
        """Whether the model has an encoder and a decoder, so that labels are the decoder's."""
        return _has_decoder(self.model)

    def add_decoder_input(self, batch: dict[str, Any]) -> None:
        """Adds `decoder_input_ids` made from the labels: models would make it from their part."""
        given = (batch.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if not self.has_decoder or any(value is not None for value in given):
            return
        make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if make is None or batch.get("labels") is None:
            raise ValueError(
                f"{self.op}: {type(self.model).__name__} makes decoder_input_ids of its part of "
                "the sequence: pass those of the whole sequence, or labels"
            )
        batch["decoder_input_ids"] = make(labels=batch["labels"])

    def add_positions(self, batch: dict[str, Any], sequence: torch.Tensor) -> None:
        """Adds the positions that the model counts in the whole sequence, if it takes any."""
        decoder, name = batch.get("decoder_input_ids"), "decoder_position_ids"
        if decoder is not None and batch.get(name) is None and self.takes(name):
            batch[name] = positions(decoder.shape, 1, decoder.device)
        ids = batch.get("input_ids")
        if ids is not None and "position_ids" not in batch and self.takes("position_ids"):
            for part in self.model.modules():
                if hasattr(part, "create_position_ids_from_input_ids"):
                    made = part.create_position_ids_from_input_ids(ids, part.padding_idx)
                    batch["position_ids"] = made
                    return
        super().add_positions(batch, sequence)

    def shifts_labels(self) -> bool:
        """Tells whether the model shifts labels unless it gets `shift_labels`.

        Raises `NotImplementedError` for a language model with a loss of its own.
        """
        if self.has_decoder or _uses_loss_function(self.model):
            return would_shift_labels(self.model)
        name = type(self.model).__name__
        if "CausalLM" in name or "LMHead" in name:
            raise NotImplementedError(
                f"{self.op}: {name} computes its loss without shift_labels: call {self.op} without "
                "model, and compute the loss from the logits and the labels that it returns"
            )
        return False


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def would_shift_labels(model: nn.Module) -> bool:
    """Tells whether a model of transformers is known to shift labels unless it gets others."""
    inner = plain(model)
    if _has_decoder(inner) or not _uses_loss_function(inner):
        return False
    loss: Any = getattr(inner, "loss_function", None)
    return "shift_labels" in inspect.signature(loss).parameters


def _uses_loss_function(inner: Any) -> bool:
    """Tells whether `loss_function`, which the model's class or user chose, makes the loss."""
    forward = inspect.unwrap(type(inner).forward)
    loss = getattr(inner, "loss_function", None)
    return loss is not None and "loss_function" in forward.__code__.co_names
