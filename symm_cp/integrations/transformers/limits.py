"""Finds the modules and options of transformers' models that a region does not serve.

This module does not import transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from symm_cp.context_parallel.inspectors import Limit
from symm_cp.integrations.transformers.batches import would_shift_labels
from symm_cp.integrations.transformers.families import FAMILIES
from symm_cp.integrations.transformers.towers import makes_own_sequence

#: The name of our attention implementation in transformers' configurations.
SYMM_CP = "symm_cp"
#: An attribute of configurations of models that were passed to `context_parallel`.
PASSED = "_symm_cp_passed"

# Heads that read one position of the sequence, or one of each sample.
_POOLING: tuple[str, ...] = ("ForSequenceClassification", "ForMultipleChoice")
_POOLING += ("ForNextSentencePrediction", "DoubleHeadsModel", "Pooler")
_ROUTER_LOGITS = "output_router_logits"
#: Arguments of calls that `call_limits` judges.
WATCHED = (_ROUTER_LOGITS, "start_positions", "labels", "shift_labels")


def uses_transformers(module: nn.Module) -> bool:
    """Tells whether a module has a configuration of transformers."""
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def is_model(module: nn.Module) -> bool:
    """Tells whether a module is a whole model of transformers, or one of its parts."""
    return hasattr(module, "base_model_prefix") and uses_transformers(module)


def limits_of(module: nn.Module) -> list[Limit]:
    """Returns the features of one module, without its children, that a region does not serve."""
    limits: list[Limit] = []
    if not uses_transformers(module):
        return limits
    config: Any = module.config
    adapter = getattr(module, "active_peft_config", None)  # of PEFT
    if getattr(adapter, "is_prompt_learning", False):
        limits.append(
            Limit(
                f"prompt learning ({type(adapter).__name__})",
                "every rank would put the virtual tokens before its part of the sequence",
                "Use an adapter without virtual tokens, such as LoRA",
            )
        )
    if hasattr(module, "base_model_prefix"):
        limits += _limits_of_class(module.__class__)
        limits += _limits_of_results(module)
        limits += _family_limits(config)
    if not getattr(config, PASSED, False):
        limits.append(
            Limit(
                f"config._attn_implementation={config._attn_implementation!r}",
                "it would attend to this rank's part of the sequence only",
                "Pass the model to context_parallel(model=...)",
            )
        )
    return limits


def _family_limits(config: Any) -> Iterator[Limit]:
    if config.model_type not in FAMILIES:
        yield Limit(
            f"config.model_type={config.model_type!r}",
            "it is not among the families that equal one process",
            "Use one of symm_cp.integrations.transformers.FAMILIES. If a model of yours attends "
            "through transformers' AttentionInterface, compare its loss and gradients with one "
            "process, and add its name to this set",
        )


@functools.cache
def _limits_of_class(kind: Any) -> tuple[Limit, ...]:
    """Returns limits of inputs that are not cut, and of heads that pool."""
    limits = []
    if makes_own_sequence(kind):
        limits.append(
            Limit(
                f"input {list(inspect.signature(kind.forward).parameters)[1]!r}",
                "every rank would make the whole sequence from it, and attend to it as to a part",
                "Run it outside of context_parallel, and pass its result on as encoder_outputs or "
                "inputs_embeds, which symm_cp.shard_batch cuts differentiably",
            )
        )
    if any(base.__name__.endswith(_POOLING) for base in kind.__mro__):
        limits.append(
            Limit(
                f"type {kind.__name__}",
                "it reads the first or last position, which another rank may hold",
                "Use a model with results for each position",
            )
        )
    return tuple(limits)


@functools.cache
def _pooled_result(kind: Any) -> str | None:
    """Returns the name of a class's result if a pooler computes a part of it."""
    returned = str(inspect.signature(kind.forward).return_annotation)
    name = returned.rpartition(".")[2].rstrip(chr(39) + ">")
    return name if "WithPooling" in returned else None


def _limits_of_results(module: nn.Module) -> Iterator[Limit]:
    """Yields limits of results for whole samples."""
    pooled = _pooled_result(module.__class__)
    if pooled is not None and getattr(module, "pooler", True) is not None:
        yield Limit(
            f"a pooled result ({pooled})",
            "it is computed from a position of this rank's part only",
            "Make the model with add_pooling_layer=False, if it takes that argument",
        )
    for each in (module.config, getattr(module.config, "text_config", None)):
        if getattr(each, _ROUTER_LOGITS, False) is True and hasattr(module, "lm_head"):
            yield _router_loss(f"config.{_ROUTER_LOGITS}=True")


def first_position(module: nn.Module) -> int:
    """Returns the number of a module's first position: RoBERTa skips the padding id."""
    table = getattr(module, "position_embeddings", None)
    padding = table.padding_idx if isinstance(table, nn.Embedding) else None
    return 0 if padding is None else int(padding) + 1


def _router_loss(asked_by: str) -> Limit:
    return Limit(
        asked_by,
        "the loss that balances experts is not a sum over positions: it would cover only this "
        "rank's part of the sequence",
        "Leave it out; or call the model without its head, gather its router_logits with "
        "symm_cp.low_contention_all_gather, and add transformers' load_balancing_loss_func of "
        "them, divided by the number of ranks, to the loss",
    )


def call_limits(module: nn.Module, asked: Collection[str]) -> Iterator[Limit]:
    """Yields the limits of a call that sets the arguments `asked`, a subset of `WATCHED`."""
    # Without a head there is no loss.
    if _ROUTER_LOGITS in asked and hasattr(module, "lm_head"):
        yield _router_loss(f"{_ROUTER_LOGITS}=True")
    if "start_positions" in asked:
        yield Limit(
            "start_positions",
            "the loss has a softmax over the positions of this rank's part of the sequence",
            "Gather the logits and compute the loss of the whole sequence",
        )
    if "labels" in asked and "shift_labels" not in asked and would_shift_labels(module):
        yield Limit(
            "labels without shift_labels",
            "it shifts labels by one position within this rank's part of the sequence, even if "
            "symm_cp.shard_batch has shifted them already",
            "Use symm_cp.training_step, or pass model= to symm_cp.shard_batch, which adds "
            "shift_labels; or leave the labels out and compute the loss from the logits",
        )
