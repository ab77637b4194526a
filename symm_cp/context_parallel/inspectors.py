"""Inspectors: the facts about a library's modules that this package needs.

This package covers torch's modules only. For another library, an `Inspector` on the floor above
describes what its models require, how they attend and how they use a batch. Nothing here imports
it: `symm_cp/integrations/__init__.py` registers the name of a module that shows that the library is
in use, and a function that imports the inspector, which is called once that module is loaded. So
`import symm_cp` imports no library, and no floor imports a higher one.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Limit:
    """A feature of a module that attention within a region does not apply.

    `harmless_up_to` is the longest sequence for which it makes no difference; `shortest` the
    smallest number of positions that a rank may hold.
    """

    what: str
    why: str
    remedy: str
    harmless_up_to: int | None = None
    shortest: int = 0

    @property
    def needs_length(self) -> bool:
        """Whether the limit depends on the length of the sequence."""
        return self.harmless_up_to is not None or self.shortest > 0

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether the limit is harmless if ranks hold these numbers of positions."""
        longest = self.harmless_up_to
        reaches = longest is None or sum(lengths) <= longest
        return reaches and min(lengths, default=0) >= self.shortest

    def error(self, module: nn.Module, length: int | None = None) -> NotImplementedError:
        """Returns the error that refuses the module."""
        whole = "" if length is None else f" (the sequence has {length} positions)"
        return NotImplementedError(
            f"context_parallel: {type(module).__name__} has {self.what}: {self.why}{whole}. "
            f"{self.remedy}"
        )


@dataclass(frozen=True)
class Verdict:
    """An inspector's verdict on one module, not on its children.

    `state` is passed to the inspector when it judges the modules that run after this one; None if
    no model of its library has run. `checks_calls`: it checks the arguments of the calls.
    """

    limits: tuple[Limit, ...] = ()
    state: Hashable = None
    checks_calls: bool = False


class BatchRules:
    """How a model uses a batch; this class has the rules for models of no known library."""

    has_decoder = False

    def __init__(self, op: str, model: nn.Module) -> None:
        self.op, self.model = op, plain(model)

    def takes(self, name: str) -> bool:
        """Whether the forward method of the model has an argument of this name."""
        return name in inspect.signature(self.model.forward).parameters

    def add_decoder_input(self, batch: dict[str, Any]) -> None:
        """Adds the decoder's input, which the model would make from its part of the sequence."""

    def add_positions(self, batch: dict[str, Any], sequence: torch.Tensor) -> None:
        """Adds the positions in the whole sequence, counted as the model does, if it takes any."""
        if "position_ids" not in batch and self.takes("position_ids"):
            batch["position_ids"] = positions(sequence.shape[:2], 1, sequence.device)

    def shifts_labels(self) -> bool:
        """Whether the model shifts labels unless it gets `shift_labels`."""
        return False

    def check_labels(self, batch: Mapping[str, Any], ignore_index: int) -> None:
        """Raises `NotImplementedError` for (shifted) labels whose loss would differ in a region."""


class Inspector:
    """Describes the modules of a library; this base class describes none."""

    #: The attributes of modules that verdicts depend on, besides their class, children, forward
    #: pre-hooks, and the values of their `config`.
    attributes: frozenset[str] = frozenset()
    #: A module whose functions, if they capture no tensors, are masks of positions alone.
    mask_module: str | None = None

    def judge(self, module: nn.Module, state: Hashable) -> Verdict:
        """Judges a module; `state` comes from the verdict on the module that ran before."""
        return Verdict()

    def check_call(self, watch: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raises `NotImplementedError` if a call treats this rank's part as the whole sequence.

        `watch` is the `Watch` (guards.py) of the region.
        """

    def attending(
        self, models: Sequence[nn.Module], *, spread: bool
    ) -> AbstractContextManager[list[nn.Module] | None]:
        """Has models of the library attend to the whole sequence, if it is `spread`.

        Yields the modules of `models` that must run inside, or None if none is of the library.
        """
        return nullcontext()

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules | None:
        """Returns the rules for a model, or None if the library has no models."""
        return None


class _Torch(Inspector):
    def judge(self, module: nn.Module, state: Hashable) -> Verdict:
        if not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            return Verdict()
        limit = Limit(
            f"type torch.nn.{type(module).__name__}",
            "it would attend to this rank's part of the sequence only",
            "Use F.scaled_dot_product_attention or flex_attention",
        )
        return Verdict((limit,))

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules:
        return BatchRules(op, model)


# --- the registry ------------------------------------------------------------------------------

_lock = threading.RLock()
_inspectors: list[Inspector] = [_Torch()]
_loaders: dict[str, Callable[[], object]] = {}


def register(module: str, load: Callable[[], object]) -> None:
    """Has `load`, which must call `add`, called as soon as a module of a library is imported."""
    _loaders[module] = load


def add(inspector: Inspector) -> None:
    """Adds an inspector; later ones are asked first."""
    _inspectors.insert(0, inspector)


def loaded() -> Sequence[Inspector]:
    """Returns the inspectors of the libraries that are in use, torch's last."""
    for module in tuple(_loaders):
        if module in sys.modules:
            with _lock:
                if load := _loaders.get(module):
                    load()
                    _loaders.pop(module, None)
    return _inspectors


def batch_rules(op: str, model: nn.Module) -> BatchRules:
    """Returns the rules by which a model uses a batch."""
    found = (inspector.batch_rules(op, model) for inspector in loaded())
    return next(rules for rules in found if rules is not None)


def by_position(mask_module: str | None) -> bool:
    """Whether masks that a module defines depend on positions alone, without tensors."""
    return mask_module is not None and any(i.mask_module == mask_module for i in loaded())


def plain(model: nn.Module) -> Any:
    """Returns the model inside the wrappers of torch.compile, DDP, PEFT and the like."""
    inner = model
    while True:
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            if not (hasattr(inner, "peft_config") and hasattr(inner, "get_base_model")):
                return inner
            wrapped = inner.get_base_model()  # type: ignore[operator]
        inner = wrapped


def modules_of(model: nn.Module) -> Iterable[nn.Module]:
    """The same as `model.modules()`, whose nested generators take ten times as long."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module in found:
            continue
        found[module] = None
        for child in reversed(module._modules.values()):
            if child is not None:
                left.append(child)
    return found


def positions(shape: Sequence[int], seq_dim: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor of a shape, which holds the positions along `seq_dim`."""
    along = [1] * len(shape)
    along[seq_dim] = -1
    return torch.arange(shape[seq_dim], device=device).view(along).expand(*shape)
