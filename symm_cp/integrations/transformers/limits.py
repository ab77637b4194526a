"""Finds features of modules that a region does not apply: windows, sinks, soft caps, ...

transformers' models state them in their `config`, attention modules also in attributes. This module
does not import transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from symm_cp.context_parallel.inspectors import Limit
from symm_cp.integrations.transformers.batches import would_shift_labels
from symm_cp.integrations.transformers.towers import makes_own_sequence

#: The name of our attention implementation in transformers' configurations.
SYMM_CP = "symm_cp"
#: The name of transformers' implementation that calls torch's `flex_attention`.
FLEX_ATTENTION = "flex_attention"
#: An attribute of modules that mix positions, and of their parts: they see all ranks' positions.
SEES_ALL_RANKS = "_symm_cp_sees_all_ranks"
#: An attribute of modules whose configuration lists recurrent layers: these see all ranks, too.
RECURRENCE_KNOWN = "_symm_cp_recurrence_known"

# Layer types of transformers' configurations, and the attributes with their lengths.
_FULL = {"full_attention", "attention", "full", "global_attention", "hybrid"}
_WINDOWED = {"sliding_attention", "hybrid_sliding", "sliding_window", "local_attention"}
_CHUNKED = {"chunked_attention"}
_RECURRENT = {"linear_attention"}
_POINTWISE = {"moe", "mlp"}
_WINDOWS = ("sliding_window", "sliding_window_size", "local_attention", "attention_window_size")
_CHUNKS = ("attention_chunk_size",)
# Sparse attention: the number of keys that each query picks among this rank's keys.
_PICKED = ("index_topk", "keep_window_size")
_SOFT_CAPS = (
    "attn_logit_softcapping",
    "attn_logit_softcap",
    "attention_logit_cap",
    "attention_logits_soft_cap",
)
_SINKS = ("sinks", "s_aux", "attention_sinks")
# Attention implementations that call no function that a region replaces, or mask local keys.
_HIDDEN = ("eager", "flash", "paged", "/")
_MIXERS = (nn.RNNBase, nn.Conv1d)
# Heads that read one position of the sequence, or one of each sample.
_POOLING: tuple[str, ...] = ("ForSequenceClassification", "ForMultipleChoice")
_POOLING += ("ForNextSentencePrediction", "DoubleHeadsModel", "Pooler")
_RELATIVE = "relative_attention_bias"
_ROUTER_LOGITS = "output_router_logits"
#: Arguments of calls that `call_limits` judges.
WATCHED = (_ROUTER_LOGITS, "start_positions", "labels", "shift_labels")
#: The attributes of modules, besides their `config`, that limits depend on.
ATTRIBUTES = frozenset(
    (
        *(*_SINKS, "sliding_window", "is_sliding", "rope_type", "original_max_seq_len"),
        *("attn_temperature_tuning", "use_rope", "floor_scale", "padding_idx", "kernel_size"),
        *("base_model_prefix", "pooler", "lm_head", "forward", "compute_bias"),
        *(_RELATIVE, "has_relative_attention_bias", SEES_ALL_RANKS, RECURRENCE_KNOWN),
        "active_adapter",
    )
)
_FULL_ATTENTION = "Use a model with full attention"
_GATED_DELTA = (
    "Use a model with full attention, gated delta nets (Qwen3-Next) or Mamba 2, passed to "
    "context_parallel(model=...)"
)
_OURS = "Pass the model to context_parallel(model=...)"


def uses_transformers(module: nn.Module) -> bool:
    """Tells whether a module has a configuration of transformers."""
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def implementation_of(module: nn.Module) -> str | None:
    """Returns the attention implementation of a module's own configuration, if it has one."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return chosen if isinstance(chosen, str) else None


def attends_with_symm_cp(module: nn.Module) -> bool:
    """Tells whether a module's attention implementation is symm_cp's."""
    return implementation_of(module) == SYMM_CP


def limits_of(module: nn.Module, chosen: str | None) -> Iterator[Limit]:
    """Yields the features of one module, without its children, that a region does not apply.

    If the module has no configuration, `chosen` is the attention implementation of its model.
    """
    yield from _input_and_output_limits(module)
    if uses_transformers(module):
        continues = getattr(module, RECURRENCE_KNOWN, False)
        yield from _config_limits(module.config, continues=continues)
    settable = getattr(module, "_can_set_attn_implementation", None)
    if attends_with_symm_cp(module) and settable is not None and not settable():
        yield Limit(
            'attn_implementation="symm_cp"',
            "it does not attend through transformers' AttentionInterface, so this has no effect",
            'Use attn_implementation="sdpa", if the model supports it',
        )
    yield from _head_limits(module)
    yield from _position_limits(module)
    yield from _attribute_limits(module, implementation_of(module) or chosen)


def _input_and_output_limits(module: nn.Module) -> Iterator[Limit]:
    """Yields limits of inputs that are not cut, and of results for whole samples."""
    if makes_own_sequence(module):
        yield Limit(
            f"input {next(iter(inspect.signature(module.forward).parameters))!r}",
            "every rank would make the whole sequence from it, and attend to it as to a part",
            "Run it outside of context_parallel, and pass its result on as encoder_outputs or "
            "inputs_embeds, which symm_cp.shard_batch cuts differentiably",
        )
    adapter = getattr(module, "active_peft_config", None)  # of PEFT
    if getattr(adapter, "is_prompt_learning", False):
        yield Limit(
            f"prompt learning ({type(adapter).__name__})",
            "every rank would put the virtual tokens before its part of the sequence",
            "Use an adapter without virtual tokens, such as LoRA",
        )
    if not hasattr(module, "base_model_prefix"):
        return
    returned = str(inspect.signature(module.forward).return_annotation)
    if "WithPooling" in returned and getattr(module, "pooler", True) is not None:
        yield Limit(
            f"a pooled result ({returned.rpartition('.')[2].rstrip(chr(39) + '>')})",
            "it is computed from a position of this rank's part only",
            "Make the model with add_pooling_layer=False, if it takes that argument",
        )


def positions_known(module: nn.Module) -> bool:
    """Tells whether a model uses positions in the whole sequence, or none.

    The first holds if the integration passes them to a part of it, the second if all of its layers
    are recurrent.
    """
    types = getattr(getattr(module, "config", None), "layer_types", None)
    listed = {*types} if isinstance(types, (list, tuple)) else set()
    if listed and listed <= _RECURRENT and getattr(module, RECURRENCE_KNOWN, False):
        return True
    return any(
        getattr(function, "sees_all_ranks", False)
        for part in module.modules()
        for function in (*part._forward_pre_hooks.values(), vars(part).get("compute_bias"))
    )


def length_dependent_rotary(module: nn.Module) -> bool:
    """Tells whether a module's rotary embedding depends on the longest position."""
    kinds = getattr(module, "rope_type", None)
    types = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(kind, str) and _is_length_dependent(kind) for kind in types)


def _is_length_dependent(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


#: The attribute of Llama 4's attention modules that turns on scales of queries by position.
SCALED = "attn_temperature_tuning"


def position_scaled(module: nn.Module) -> bool:
    """Tells whether an attention module scales queries by their index in the tensor (Llama 4)."""
    tuned = getattr(module, SCALED, None)
    return bool(tuned) and not getattr(module, "use_rope", True)


def first_position(module: nn.Module) -> int:
    """Returns the number of a module's first position: RoBERTa skips the padding id."""
    table = getattr(module, "position_embeddings", None)
    padding = table.padding_idx if isinstance(table, nn.Embedding) else None
    return 0 if padding is None else int(padding) + 1


def _positive(owner: Any, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield name, value


def _window(name: str, value: int, reach: int) -> Limit:
    return Limit(
        f"{name}={value}",
        "sliding windows are not applied to a sequence spread over ranks",
        f"{_OURS}, or use sequences of at most {reach} positions",
        harmless_up_to=reach,
    )


def _chunk(name: str, value: int) -> Limit:
    return Limit(
        f"{name}={value}",
        "attention within chunks is not applied to a sequence spread over ranks",
        f"{_OURS}, or use sequences of at most {value} positions",
        harmless_up_to=value,
    )


def _config_limits(config: Any, *, continues: bool) -> Iterator[Limit]:
    chosen = config._attn_implementation
    if isinstance(chosen, str) and any(part in chosen for part in _HIDDEN):
        yield Limit(
            f"config._attn_implementation={chosen!r}",
            "it would attend to this rank's part of the sequence only",
            f'{_OURS}, or call model.set_attn_implementation("sdpa"), if the model supports it',
        )
    yield from _layer_limits(config, continues=continues)
    for name in () if chosen == SYMM_CP else _SOFT_CAPS:
        if value := getattr(config, name, None):
            yield Limit(f"config.{name}={value}", "soft caps are not applied", _OURS)
    for name, value in _positive(config, _PICKED):
        yield Limit(
            f"config.{name}={value}",
            "keys are picked among those of this rank only",
            f"Use sequences of at most {value} positions, or a model with full attention",
            harmless_up_to=value,
        )
    if chosen not in (SYMM_CP, FLEX_ATTENTION):
        yield Limit(
            f"config.model_type={getattr(config, 'model_type', None)!r}",
            "a rank holds one position or none, and transformers treats a sequence of one position "
            "as a step of decoding, without a causal mask",
            f"{_OURS}, or use longer sequences or fewer ranks",
            shortest=2,
        )


def _layer_limits(config: Any, *, continues: bool) -> Iterator[Limit]:
    """Yields limits of layer types; `continues`: recurrent layers get the previous ranks' state."""
    listed = [getattr(config, name, None) for name in ("layer_types", "layers_block_type")]
    types = {kind for kinds in listed if isinstance(kinds, (list, tuple)) for kind in kinds}
    types = {kind for kind in types if isinstance(kind, str)}
    known = _FULL | _WINDOWED | _CHUNKED | _POINTWISE
    if continues:
        known = known | _RECURRENT
    for kind in sorted(types - known):
        what = f"a layer of type {kind!r} in config.layer_types"
        yield Limit(
            what,
            "it mixes positions of this rank's part of the sequence only",
            _GATED_DELTA if kind in _RECURRENT else _FULL_ATTENTION,
        )
    sliding = types & _WINDOWED or (not types and getattr(config, "use_sliding_window", True))
    chosen = config._attn_implementation
    if sliding and chosen not in (SYMM_CP, FLEX_ATTENTION):
        for name, value in _positive(config, _WINDOWS):
            # ModernBERT's local_attention counts both sides.
            reach = value // 2 + 1 if name == "local_attention" else value
            yield _window(f"config.{name}", value, reach)
    if (types & _CHUNKED or not types) and chosen != SYMM_CP:
        for name, value in _positive(config, _CHUNKS):
            yield _chunk(f"config.{name}", value)


def _router_loss(asked_by: str) -> Limit:
    return Limit(
        asked_by,
        "the loss that balances experts is not a sum over positions: it would cover only this "
        "rank's part of the sequence",
        "Leave it out; or call the model without its head, gather its router_logits with "
        "symm_cp.low_contention_all_gather, and add transformers' load_balancing_loss_func of "
        "them, divided by the number of ranks, to the loss",
    )


def _head_limits(module: nn.Module) -> Iterator[Limit]:
    if any(kind.__name__.endswith(_POOLING) for kind in type(module).__mro__):
        yield Limit(
            f"type {type(module).__name__}",
            "it reads the first or last position, which another rank may hold",
            "Use a model with results for each position",
        )
    config = getattr(module, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if getattr(each, _ROUTER_LOGITS, False) is True and hasattr(module, "lm_head"):
            yield _router_loss(f"config.{_ROUTER_LOGITS}=True")


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


def _position_limits(module: nn.Module) -> Iterator[Limit]:
    """Yields limits of modules that use the longest position, or the index in a tensor."""
    hooks = module._forward_pre_hooks.values()
    completed = any(getattr(hook, "sees_all_ranks", False) for hook in hooks)
    if length_dependent_rotary(module) and not completed:
        reach = _rotary_reach(module)
        yield Limit(
            f"rope_type={module.rope_type!r}",
            "frequencies depend on the longest position, and each rank sees only its own part",
            f"{_OURS}, or use sequences of at most {reach} positions",
            harmless_up_to=reach,
        )
    if position_scaled(module) and not attends_with_symm_cp(module):
        reach = int(module.floor_scale) - 1
        yield Limit(
            f"attn_temperature_tuning={module.attn_temperature_tuning}",
            "queries are scaled by their index in this rank's part of the sequence",
            f"{_OURS}, or use sequences of at most {reach} positions",
            harmless_up_to=reach,
        )
    computed = vars(module).get("compute_bias")  # by the integration
    if hasattr(module, _RELATIVE) and not getattr(computed, "sees_all_ranks", False):
        yield Limit(
            _RELATIVE,
            "it is looked up for distances within this rank's part of the sequence",
            _OURS,
        )


def _rotary_reach(module: nn.Module) -> int:
    """Returns the length up to which rotary embeddings ignore the longest position."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    # One entry, or one for each layer type.
    entries = [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
    found = [entry.get("original_max_position_embeddings") for entry in entries]
    found += [getattr(module, "original_max_seq_len", None)]
    return min((int(length) for length in found if length), default=1)


def _attribute_limits(module: nn.Module, chosen: str | None) -> Iterator[Limit]:
    # These implementations receive windows as mask functions over the whole sequence.
    masked = chosen in (SYMM_CP, FLEX_ATTENTION)
    if getattr(module, "is_sliding", True) and not masked:
        for name, value in _positive(module, ("sliding_window",)):
            yield _window(name, value, value)
    for name in () if chosen == SYMM_CP else _SINKS:
        if getattr(module, name, None) is not None:
            yield Limit(name, "attention sinks are not applied", _OURS)
    if getattr(module, SEES_ALL_RANKS, False):
        return
    for child in (module, *module.children()):
        wide = not isinstance(child, nn.Conv1d) or child.kernel_size != (1,)
        if isinstance(child, _MIXERS) and wide:
            yield Limit(
                f"type {type(child).__name__}" if child is module else f"a {type(child).__name__}",
                "it mixes positions of this rank's part of the sequence only",
                _FULL_ATTENTION,
            )
