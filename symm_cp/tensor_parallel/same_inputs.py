"""Compares the ranks' inputs of a model that `apply` has split: they must be the same.

Ranks with different prompts, or that sample different tokens, would mix them in every layer, and
return plausible tokens. So each call of the model compares its first input (ids, or embeddings)
before anything runs: ranks exchange a hash of 8 bytes, whatever the length is. Every call compares,
not each n-th one: on CPU, for ids, it is one native call, and ranks whose generators differ begin
to sample different tokens in the middle of decoding. Calls of more than one token (not decoding)
compare labels, masks and positions as well. Buffers and weights that are not split are not
compared: `apply` sends them from rank 0. Parameters of modules that are added afterwards (adapters)
are compared once, in the first call with them.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from symm_cp.group.memory import reported
from symm_cp.ops.equal_inputs import Item, content_hash, same_on_all_ranks, text_hash
from symm_cp.tensor_parallel.whole import Seat

_OP = "tensor_parallel.apply"
_NAMES = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHERS = ("labels", "attention_mask", "position_ids")
_REMEDY = (
    "the ranks of a tensor-parallel mesh compute one model together and must get the same inputs. "
    "Read the prompt or batch on one rank and broadcast it, or give a DistributedSampler the "
    "num_replicas and rank of the data-parallel groups; seed all ranks identically "
    "(torch.manual_seed) where tokens are sampled, and before modules are added to the model"
)

#: Modules of split models. Additions to a model are registered in one of them; a slice of a
#: `ModuleList`, which transformers' models take in each call, is not.
_members: WeakSet[nn.Module] = WeakSet()
_registrations = 0  # of modules and parameters in `_members`
_counting: list[RemovableHandle] = []


def _count(module: nn.Module, *_: Any) -> None:
    global _registrations
    if torch.compiler.is_dynamo_compiling():  # it would guard all members, which may die meanwhile
        return
    if module in _members:
        _registrations += 1


_CALLS = re.compile(r"rank (\d+) calls (\w+)")


def _called_by(name: str) -> bool:
    """Whether a function of this name is on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class SameInputs:
    """A forward pre-hook of a model, which raises on all ranks if their inputs differ."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.added: dict[str, int] = {}  # hashes of parameters added to the model since
        self.shown = "none"
        self.seen = _registrations

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the call."""
        further = self._added_to(module)
        given = [name for name in (*_NAMES, *kwargs) if isinstance(kwargs.get(name), torch.Tensor)]
        names = given[:1]
        if args and isinstance(args[0], torch.Tensor):
            args, names = (self._compared("input", args[0], *further), *args[1:]), []
            further = ()
        if any(kwargs[name].dim() > 1 and kwargs[name].shape[1] > 1 for name in names) or (
            not names and args[0].dim() > 1 and args[0].shape[1] > 1
        ):
            names += [name for name in _OTHERS if name in given and name not in names]
        for name in names:
            kwargs = {**kwargs, name: self._compared(name, kwargs[name], *further)}
            further = ()
        return args, kwargs

    def _compared(self, name: str, value: torch.Tensor, *further: Item) -> torch.Tensor:
        if hasattr(value, "to_local"):
            return value
        try:
            return same_on_all_ranks(value, _OP, name, _REMEDY, self.seat.group, *further)
        except RuntimeError as error:  # the program may make parameters equal now
            self.added.clear()
            self.seen = -1
            if text := self._alone(str(error)):
                raise reported(RuntimeError(text)) from error
            raise

    def _alone(self, text: str) -> str:
        """Returns the text of an error if a peer made another call than this one; else empty."""
        calls = {int(rank): op for rank, op in _CALLS.findall(text)}
        own = calls.pop(self.seat.rank, "")
        peers = [rank for rank, op in calls.items() if op != own]
        if not own or not peers:
            return ""
        called = "generate" if _called_by("generate") else "the model"
        only = " only" if self.seat.world_size == 2 else f", not on rank {peers[0]}"
        return (
            f"{_OP}: {called} was called on rank {self.seat.rank}{only}, where rank {peers[0]} "
            f"called {calls[peers[0]]}: call it on every rank of the mesh"
        )

    def _added_to(self, model: nn.Module) -> tuple[Item, ...]:
        """Returns an item for parameters added after `apply`; all earlier ones are DTensors."""
        if torch.compiler.is_compiling():
            return ()
        if self.seen != _registrations or model not in _members:  # a copy
            self.seen = _registrations
            _members.update(model.modules())
            for name, parameter in model.named_parameters():
                if type(parameter) is nn.Parameter and name not in self.added:
                    self.added[name] = int(content_hash(parameter)) if not parameter.is_meta else 0
            if self.added:
                first, others = next(iter(self.added)), len(self.added) - 1
                more = f" and {others} more" if others else ""
                self.shown = f"{first}{more}, hash {text_hash(self.added):x}"
        return (("parameters added after apply", self.shown),)


def compare_inputs(model: nn.Module, seat: Seat) -> None:
    """Makes the ranks compare the inputs of each call of a model."""
    if seat.world_size > 1:
        if not _counting:
            _counting.append(register_module_module_registration_hook(_count))
            _counting.append(register_module_parameter_registration_hook(_count))
        _members.update(model.modules())
        model.register_forward_pre_hook(SameInputs(seat), with_kwargs=True)
