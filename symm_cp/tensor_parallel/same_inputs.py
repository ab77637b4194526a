"""Ranks of a model that `apply` has split must get the same inputs: they compare them.

Ranks with other prompts, or that sample other tokens, would mix them in every layer, and return
plausible tokens. So each call of the model compares its first input (ids, or embeddings) before
anything runs: a hash of 8 bytes travels, whatever the length is. Every call, not each n-th one: it
costs some 30 microseconds on CPU, and ranks that draw tokens by generators of their own begin to
differ in the middle of decoding. Calls of more than one token, which are not those of decoding,
compare labels, masks and positions as well. Buffers and weights that are not split are never
compared: `apply` sends them from rank 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from symm_cp.ops.equal_inputs import same_on_all_ranks
from symm_cp.tensor_parallel.whole import Seat

_OP = "tensor_parallel.apply"
_NAMES = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHERS = ("labels", "attention_mask", "position_ids")
_REMEDY = (
    "the ranks of a tensor-parallel mesh compute one model together and must get the same inputs. "
    "Read the prompt or batch on one rank and broadcast it, or give a DistributedSampler the "
    "num_replicas and rank of the data-parallel groups; seed all ranks identically "
    "(torch.manual_seed) where tokens are sampled"
)


class SameInputs:
    """A forward pre-hook of a model, which raises on all ranks if their inputs differ."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the call."""
        given = [name for name in (*_NAMES, *kwargs) if isinstance(kwargs.get(name), torch.Tensor)]
        names = given[:1]
        if args and isinstance(args[0], torch.Tensor):
            args, names = (self._compared("input", args[0]), *args[1:]), []
        if any(kwargs[name].dim() > 1 and kwargs[name].shape[1] > 1 for name in names) or (
            not names and args[0].dim() > 1 and args[0].shape[1] > 1
        ):
            names += [name for name in _OTHERS if name in given and name not in names]
        return args, {**kwargs, **{name: self._compared(name, kwargs[name]) for name in names}}

    def _compared(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "to_local"):
            return value
        return same_on_all_ranks(value, _OP, name, _REMEDY, self.seat.group)


def compare_inputs(model: nn.Module, seat: Seat) -> None:
    """Has the ranks compare the inputs of each call of a model."""
    if seat.world_size > 1:
        model.register_forward_pre_hook(SameInputs(seat), with_kwargs=True)
