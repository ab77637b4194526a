"""`generate` with a cache that is spread over ranks (decode context parallelism).

Every rank runs the model on all new tokens; of the keys and values that it caches, each rank keeps
its part only (context_parallel/spread_keys.py), and attends to these for all ranks. So the ranks
hold a longer context together, and share the work of attending to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from symm_cp.context_parallel.spread_keys import Blocks, SpreadKeys
from symm_cp.group.memory import GroupLike, group_name, resolve
from symm_cp.integrations.transformers.limits import SYMM_CP
from symm_cp.integrations.transformers.models import attending
from symm_cp.integrations.transformers.spread import Part, Turn
from symm_cp.ops import equal_inputs
from symm_cp.ops.error_reports import reports_to_peers

_OP = "SpreadCache"
_SAME_TOKENS = (
    "every rank decodes all tokens and must have the same prompt and choose the same tokens: seed "
    "all ranks alike (torch.manual_seed) before generate(do_sample=True)"
)


class SpreadLayer(DynamicLayer):
    """A layer of `SpreadCache`: this rank's part of the keys and values of all positions."""

    def __init__(self, cache: SpreadCache, number: int, kept: SpreadKeys) -> None:
        super().__init__()
        self._number, self._kept = number, kept
        self._config, self._part = cache.config, Part(cache.group, kept, cache.turn, cache.config)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing but note that there are keys."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values; returns this rank's part of all, for attention over the ranks."""
        self._check_attention()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._kept.append(key_states, value_states)
        self._part.turn.layer = self._number
        self.keys, self.values = self._kept.keys, self._kept.values
        return self._part.mark(self.keys), self.values

    def _check_attention(self) -> None:
        """Raises if the model takes this rank's keys for all: attention knows that they are not."""
        chosen, layer = self._config._attn_implementation, self._part.turn.layer
        if chosen != SYMM_CP:
            raise ValueError(
                f"{_OP}: the model has attn_implementation={chosen!r}, which would attend to this "
                "rank's keys only: use the cache within decoding(model, mesh), or call "
                'model.set_attn_implementation("symm_cp")'
            )
        if layer is not None:
            raise NotImplementedError(
                f"{_OP}: the model did not attend to the keys of layer {layer} through "
                "transformers' AttentionInterface, so it has seen this rank's keys only: it is "
                "not supported"
            )

    def get_seq_length(self) -> int:
        """Returns how many positions all ranks together have."""
        return self._kept.length

    def reset(self) -> None:
        """Forgets everything."""
        self._kept.reset()
        self._part.turn.layer = None
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last positions, as many as a negative number says."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"{_OP}: crop({tokens_to_remove}) must be negative or 0: how many tokens to forget"
            )
        self._kept.crop(max(0, self._kept.length + tokens_to_remove))
        self._show()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Takes the samples of these beams."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sample."""
        if self.is_initialized:
            count = self._kept.keys.shape[0]
            self.batch_select_indices(torch.arange(count).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these samples."""
        self._kept.take_samples(indices)
        self._show()

    def offload(self) -> None:
        """Raises `NotImplementedError`."""
        raise NotImplementedError(f"{_OP}: offloading is not supported")

    def _show(self) -> None:
        if self.is_initialized:
            self.keys, self.values = self._kept.keys, self._kept.values


class SpreadCache(DynamicCache):
    """A cache of a decoder of transformers of which each rank of a mesh keeps a part.

    Same tokens as `DynamicCache(config=config)` gives in one process, but for rounding. All ranks
    make the same calls, with the same inputs. Positions are dealt to the ranks in blocks of
    `block_size`, in turns. Layers with a sliding window, and others that do not grow with the
    sequence, are kept whole on every rank.

    Args:
        config: the model's, which must attend by `attn_implementation="symm_cp"`, as it does
            within `decoding`.
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name.
        block_size: how many positions a block has.
        capacity: positions to have room for from the start; the cache grows beyond.

    Raises `ValueError` for a model without layers of full attention, `NotImplementedError` for
    one with an encoder.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        mesh: GroupLike,
        *,
        block_size: int = 64,
        capacity: int = 0,
    ) -> None:
        if block_size < 1 or capacity < 0:
            raise ValueError(f"{_OP}: {block_size=} must be positive, and {capacity=} not negative")
        if config.is_encoder_decoder:
            raise NotImplementedError(
                f"{_OP}: {config.model_type} has an encoder, whose keys have a cache of their own: "
                "only decoders are supported"
            )
        decoder = config.get_text_config(decoder=True)
        super().__init__(config=decoder)
        self.config, self.group, self.turn = decoder, group_name(mesh), Turn()
        state = resolve(self.group)
        blocks = Blocks(state.rank, state.world_size, block_size)
        whole: list[Any] = self.layers
        grows = [type(layer) is DynamicLayer for layer in whole]
        if not any(grows):
            kinds = sorted({type(layer).__name__ for layer in whole})
            raise ValueError(
                f"{_OP}: no layer of {config.model_type} keeps keys of the whole sequence (they "
                f"are {', '.join(kinds)}), so there is nothing to spread: use DynamicCache"
            )
        self.layers: list[Any] = [
            SpreadLayer(self, number, SpreadKeys(blocks, capacity)) if spread else layer
            for number, (layer, spread) in enumerate(zip(whole, grows, strict=True))
        ]


@contextmanager
def decoding(
    model: nn.Module, mesh: GroupLike, *, block_size: int = 64, capacity: int = 0
) -> Iterator[SpreadCache]:
    """Within it, a decoder of transformers may be called with a `SpreadCache`; yields an empty one.

    Until the end the model attends with `attn_implementation="symm_cp"`. Ranks compare the inputs
    of calls with such a cache, and all raise `RuntimeError` if they differ: tokens sampled with
    other seeds, say. `SYMM_CP_COMPARE_INPUTS=0` turns that off.

    Raises `ValueError` if there is no model of transformers, `NotImplementedError` for one that
    does not attend through transformers' `AttentionInterface`.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    with attending(model):
        hook = parts[0].register_forward_pre_hook(_compare_inputs, with_kwargs=True)
        try:
            yield SpreadCache(parts[0].config, mesh, block_size=block_size, capacity=capacity)
        finally:
            hook.remove()


def _compare_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    caches = [each for each in (*args, *kwargs.values()) if isinstance(each, SpreadCache)]
    if caches:
        tensors = {f"input {place}": each for place, each in enumerate(args)} | kwargs
        _compare(caches[0].group, tensors)


@functools.partial(reports_to_peers, op=_OP)
def _compare(group: str, inputs: dict[str, Any]) -> None:
    items = [(name, each) for name, each in inputs.items() if isinstance(each, torch.Tensor)]
    equal_inputs.compare(group, _OP, items, subject="the inputs of the model", remedy=_SAME_TOKENS)
