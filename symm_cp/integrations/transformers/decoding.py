"""`generate` with a cache that is spread over ranks (decode context parallelism).

Every rank runs the model on all new tokens, caches only its part of the keys and values
(context_parallel/spread_keys.py), and attends to this part for all ranks. Together the ranks hold a
longer context, and share the work of attending to it.
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
from symm_cp.integrations.transformers import spread
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
    """A layer of `SpreadCache`: this rank's part of all keys and values."""

    def __init__(self, cache: SpreadCache, number: int, kept: SpreadKeys) -> None:
        super().__init__()
        self._number, self._kept = number, kept
        self._config, self._part = cache.config, Part(cache.group, kept, cache.turn, cache.config)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Records only the device and dtype, and that there are keys."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values; returns this rank's part of all, for attention over all ranks."""
        self._check_attention()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._kept.append(key_states, value_states)
        self._part.turn.layer = self._number
        self.keys, self.values = self._kept.keys, self._kept.values
        spread.last.part = self._part
        return self.keys, self.values

    def _check_attention(self) -> None:
        """Raises if the model would treat this rank's keys as all keys."""
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
                "transformers' AttentionInterface, so it has seen this rank's keys only: such "
                "models are not supported"
            )

    def get_seq_length(self) -> int:
        """Returns the number of positions on all ranks together."""
        return self._kept.length

    def reset(self) -> None:
        """Removes all positions."""
        self._kept.reset()
        self._part.turn.layer = None
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last positions; `tokens_to_remove` is minus their number, or 0."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"{_OP}: crop({tokens_to_remove}) must be 0 or negative: minus the tokens to remove"
            )
        self._kept.crop(max(0, self._kept.length + tokens_to_remove))
        self._show()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keeps the samples of these beams."""
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
    """A cache for a decoder of transformers, spread over the ranks of a mesh.

    Up to rounding, tokens are the same as with `DynamicCache(config=config)` in one process. All
    ranks make the same calls, with the same inputs. Blocks of `block_size` positions go to the
    ranks in turn. Every rank keeps the whole cache of layers that do not grow with the sequence,
    such as layers with a sliding window.

    Args:
        config: the model's configuration. The model must have `attn_implementation="symm_cp"`, as
            it does within `decoding`.
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name.
        block_size: the number of positions in a block.
        capacity: the number of positions to allocate at the start; the cache grows beyond it.

    Raises `ValueError` for a model without layers of full attention, `NotImplementedError` for
    a model with an encoder.
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
            SpreadLayer(self, number, SpreadKeys(blocks, capacity)) if growing else layer
            for number, (layer, growing) in enumerate(zip(whole, grows, strict=True))
        ]


@contextmanager
def decoding(
    model: nn.Module, mesh: GroupLike, *, block_size: int = 64, capacity: int = 0
) -> Iterator[SpreadCache]:
    """Lets a decoder of transformers use a `SpreadCache` in the `with` block; yields an empty one.

    In the block the model attends with `attn_implementation="symm_cp"`. Ranks compare the inputs of
    calls with such a cache, and all raise `RuntimeError` if they differ, for example for tokens
    sampled with different seeds. `SYMM_CP_COMPARE_INPUTS=0` turns that off.

    Raises `ValueError` if `model` has no model of transformers, `NotImplementedError` for a model
    that does not attend through transformers' `AttentionInterface`.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not parts:
        raise ValueError(f"{_OP}: {type(model).__name__} has no model of transformers in it")
    with attending([model]):
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
