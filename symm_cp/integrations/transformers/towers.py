"""Models that make a sequence from pictures, videos or sounds, alone or before a language model.

A model of language and pictures embeds the text, has a *tower* make embeddings from pictures,
inserts them, and passes the result to its language model. From a part of the sequence it could not
tell which pictures belong there. So each rank does that for the whole batch, outside of the
context; the inputs of the language model are then cut like a text. Gradients of each rank's part
reach the tower, and are summed like all others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_MEDIA = ("pixel_", "input_features", "input_values")
#: Entries of a batch that belong to positions of the language model.
_OF_POSITIONS = ("labels", "shift_labels")
_CUT = ("inputs_embeds", "attention_mask", "position_ids")


def _arguments(kind: Any) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a class's forward, without `self`."""
    return dict(list(inspect.signature(kind.forward).parameters.items())[1:])


@functools.cache
def makes_own_sequence(kind: type[nn.Module]) -> bool:
    """Tells whether models of a class of transformers make a sequence from pictures or sounds."""
    if not hasattr(kind, "base_model_prefix"):
        return False
    names = _arguments(kind)
    first = next(iter(names.values()), None)
    if first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD):  # it wraps another
        return False
    return names.keys().isdisjoint(("input_ids", "inputs_embeds", "decoder_input_ids"))


def has_media(batch: Mapping[str, Any]) -> bool:
    """Tells whether a batch has pictures, videos or sounds."""
    return any(name.startswith(_MEDIA) for name, value in batch.items() if value is not None)


class _Embedded(Exception):
    """Ends the forward of a model before its language model runs."""


def embed_media(op: str, model: nn.Module, batch: dict[str, Any]) -> None:
    """Replaces the text and media of a whole batch by the inputs of the language model.

    Does nothing if the model has no language model beside a tower. Raises `NotImplementedError` if
    the language model gets further tensors, which could not be cut.
    """
    towers = [part for part in model.modules() if makes_own_sequence(part.__class__)]
    inside = {part for tower in towers for part in tower.modules()}
    texts = [
        part
        for part in model.modules()
        if hasattr(part, "base_model_prefix")
        and part not in inside
        and inside.isdisjoint(part.modules())
        and "inputs_embeds" in _arguments(part.__class__)
    ]
    if not towers or not texts:
        return
    given: dict[str, Any] = {}

    def capture(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.update(kwargs, args=args)
        raise _Embedded

    handles = [text.register_forward_pre_hook(capture, with_kwargs=True) for text in texts]
    inputs = {name: value for name, value in batch.items() if name not in _OF_POSITIONS}
    try:
        model(**{**inputs, "use_cache": False})
    except _Embedded:
        pass
    finally:
        for handle in handles:
            handle.remove()
    _check(op, model, given)
    for name in inputs:
        if isinstance(inputs[name], torch.Tensor):
            del batch[name]
    batch.update({name: given[name] for name in _CUT if given.get(name) is not None})


def _holds_values(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and len(value) > 0


def _check(op: str, model: nn.Module, given: dict[str, Any]) -> None:
    """Refuses inputs of a language model that `_CUT` does not cover."""
    mask = given.get("attention_mask")
    other = [
        name
        for name, value in given.items()
        if name not in _CUT and (isinstance(value, torch.Tensor) or _holds_values(value))
    ]
    if not (mask is None or isinstance(mask, torch.Tensor)):
        other.append("attention_mask")
    if other or not isinstance(given.get("inputs_embeds"), torch.Tensor):
        raise NotImplementedError(
            f"{op}: {type(model).__name__} with pictures or sounds: its language model gets "
            f"{', '.join(other) or 'no inputs_embeds'}, which symm_cp cannot cut with the text: "
            "leave media out of the batch, or use a model such as Qwen2.5-VL or Llava, whose "
            "language model gets inputs_embeds, position_ids and attention_mask only"
        )
