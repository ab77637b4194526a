"""Makes tensors that transformers' models derive from a batch: decoder inputs, positions, labels.

This recognises models by their attributes, and does not import transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.inspectors import BatchRules, modules_of, plain, positions
from symm_cp.integrations.transformers.towers import embed_media, has_media

#: Families that count only the positions that `attention_mask` shows.
_BY_MASK = ("opt",)


class ModelBatchRules(BatchRules):
    """The rules for a model of transformers."""

    @property
    def has_decoder(self) -> bool:  # type: ignore[override]
        """Whether the model has an encoder and a decoder, so that labels are the decoder's."""
        return _has_decoder(self.model)

    def add_decoder_input(self, batch: dict[str, Any]) -> None:
        """Adds `decoder_input_ids` from the whole labels: models would use their part.

        For models of language and pictures, these are the embeddings that the tower completes.
        """
        if not self.has_decoder and has_media(batch):
            embed_media(self.op, self.model, batch)
        given = (batch.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if not self.has_decoder or any(value is not None for value in given):
            return
        make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if make is None or batch.get("labels") is None:
            raise ValueError(
                f"{self.op}: {type(self.model).__name__} makes decoder_input_ids from its part of "
                "the sequence: pass decoder_input_ids of the whole sequence, or labels"
            )
        batch["decoder_input_ids"] = make(labels=batch["labels"])

    def add_positions(self, batch: dict[str, Any], sequence: torch.Tensor) -> None:
        """Adds the positions that the model counts in the whole sequence, if it takes any."""
        decoder, name = batch.get("decoder_input_ids"), "decoder_position_ids"
        if decoder is not None and batch.get(name) is None and self.takes(name):
            batch[name] = positions(decoder.shape, 1, decoder.device)
        if "position_ids" not in batch and self.takes("position_ids"):
            made = self._counted_positions(batch.get("input_ids"), batch.get("attention_mask"))
            if made is not None:
                batch["position_ids"] = made
        super().add_positions(batch, sequence)

    def _counted_positions(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the positions of a model that skips padding; None for other models."""
        for part in modules_of(self.model):
            if ids is not None and hasattr(type(part), "create_position_ids_from_input_ids"):
                return part.create_position_ids_from_input_ids(ids, part.padding_idx)
        by_mask = getattr(getattr(self.model, "config", None), "model_type", None) in _BY_MASK
        if by_mask and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return (mask.cumsum(1) * mask - 1).long()
        return None

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

    def check_labels(self, batch: Mapping[str, Any], ignore_index: int) -> None:
        """Refuses labels predicted by eager attention from positions that see no key."""
        mask = batch.get("decoder_attention_mask" if self.has_decoder else "attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
            return
        labels, modules = batch["labels"], modules_of(self.model)
        eager = [part for part in modules if hasattr(part, "config") and _averages(part)]
        if not eager:
            return
        sees = _sees_a_key(mask, min((_windows(part) for part in eager), default=0))
        if sees.shape == labels.shape and bool(((labels != ignore_index) & ~sees).any()):
            raise NotImplementedError(
                f"{self.op}: attention_mask hides all keys from a position whose label is "
                f"predicted (the last one of padding on the left): eager attention of "
                f"{type(eager[0]).__name__} gives it the mean of all values, ours gives zeros. "
                f"Give the first token of each sample no label ({ignore_index}), or pad right"
            )


def _averages(module: nn.Module) -> bool:
    """Tells whether a model attends eagerly in one process: without a key it takes the mean.

    With sinks it takes zeros, as other implementations do.
    """
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    eager = chosen == "eager" or (
        chosen == "symm_cp" and not getattr(module, "_supports_sdpa", True)
    )
    return eager and not any(
        getattr(part, name, None) is not None
        for part in module.modules()
        for name in ("sinks", "s_aux", "attention_sinks")
    )


def _windows(module: nn.Module) -> int:
    """Returns the sliding window of a model's layers; a huge number if it has none."""
    window = getattr(module.config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else sys.maxsize


def _sees_a_key(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Returns which positions see a key: of a causal mask by padding, or of a whole mask."""
    if mask.dim() == 4:
        shown = mask if not mask.is_floating_point() else mask > torch.finfo(mask.dtype).min / 2
        return shown.bool().any(-1).all(1)
    count = mask.bool().long().cumsum(1)
    before = nn.functional.pad(count, (min(window, mask.shape[1]), 0))[:, : mask.shape[1]]
    return count > before


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def would_shift_labels(model: nn.Module) -> bool:
    """Tells whether a model of transformers shifts labels unless it gets `shift_labels`."""
    inner = plain(model)
    if _has_decoder(inner) or not _uses_loss_function(inner):
        return False
    loss: Any = getattr(inner, "loss_function", None)
    return "shift_labels" in inspect.signature(loss).parameters


def _uses_loss_function(inner: Any) -> bool:
    """Tells whether `loss_function`, set by the model's class or user, computes the loss."""
    forward = inspect.unwrap(type(inner).forward)
    loss = getattr(inner, "loss_function", None)
    return loss is not None and "loss_function" in forward.__code__.co_names
