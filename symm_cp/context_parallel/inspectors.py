"""The inspector: the facts about modules that this package needs.

This package covers torch's modules only. For a library of models, an `Inspector` on the floor above
describes what its models require, how they attend and how they use a batch. Nothing here imports
it: `symm_cp/integrations/__init__.py` registers the name of a module that shows that the library is
in use, and a function that imports the inspector, which is called once that module is loaded. So
`import symm_cp` imports no library, and no floor imports a higher one.

Models are judged anew in each context. A model has a hundred modules, so only those are judged
that have a configuration, or whose class may have limits.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Limit:
    """A feature of a module with which its results within a region would be wrong."""

    what: str
    why: str
    remedy: str

    def error(self, module: nn.Module) -> NotImplementedError:
        """Returns the error that refuses the module."""
        return NotImplementedError(
            f"context_parallel: {type(module).__name__} has {self.what}: {self.why}. {self.remedy}"
        )


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


@dataclass(frozen=True)
class Inspector:
    """Describes the modules of a library; by default of none, beside torch's."""

    #: Returns the limits of one module that has a configuration, without its children.
    limits: Callable[[nn.Module], Sequence[Limit]] = lambda module: ()
    #: Whether a module is the library's.
    is_of_library: Callable[[nn.Module], bool] = lambda module: False
    #: Whether `check_call` checks the calls of a module.
    checks_calls: Callable[[nn.Module], bool] = lambda module: False
    #: Called with the `Watch` of a region, a module, and the arguments of its call: raises
    #: `NotImplementedError` if that treats this rank's part as the whole sequence.
    check_call: Callable[[Any, nn.Module, Any, Any], None] = lambda *_: None
    #: Has models of the library attend to the whole sequence. Yields the modules of `models` that
    #: must run inside, or None if none is of the library.
    attending: Callable[[Sequence[nn.Module]], AbstractContextManager[list[nn.Module] | None]] = (
        lambda models: nullcontext()
    )
    #: Returns the rules by which a model uses a batch, for an op.
    batch_rules: Callable[[str, nn.Module], BatchRules] = BatchRules


_lock = threading.RLock()
_inspector = Inspector()
_loaders: dict[str, Callable[[], object]] = {}


def register(module: str, load: Callable[[], object]) -> None:
    """Has `load`, which must call `use`, called as soon as a module of a library is imported."""
    _loaders[module] = load


def use(inspector: Inspector) -> None:
    """Uses a library's inspector from now on."""
    global _inspector
    _inspector = inspector


def current() -> Inspector:
    """Returns the inspector of the library that is in use; without one, torch's."""
    for module in tuple(_loaders):
        if module in sys.modules:
            with _lock:
                if load := _loaders.get(module):
                    load()
                    _loaders.pop(module, None)
    return _inspector


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


def modules_of(*models: nn.Module) -> list[nn.Module]:
    """All modules of models; `modules()` has nested generators, which take ten times as long."""
    found: dict[nn.Module, None] = {}
    left = [*reversed(models)]
    while left:
        module = left.pop()
        if module in found:
            continue
        found[module] = None
        for child in reversed(module._modules.values()):
            if child is not None:
                left.append(child)
    return [*found]


def positions(shape: Sequence[int], seq_dim: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor of a shape, which holds the positions along `seq_dim`."""
    along = [1] * len(shape)
    along[seq_dim] = -1
    return torch.arange(shape[seq_dim], device=device).view(along).expand(*shape)


# --- verdicts on a model -------------------------------------------------------------------------

_UNSERVED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_CONTAINERS, _MOST_SEARCHED = frozenset((list, tuple, dict)), 4096  # a search takes 0.1 ms


def _limit_of_torch(module: nn.Module) -> Limit:
    return Limit(
        f"type torch.nn.{type(module).__name__}",
        "it would attend to this rank's part of the sequence only",
        "Use F.scaled_dot_product_attention or flex_attention",
    )


@functools.cache
def _may_have_limits(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are judged even if they hold no configuration.

    Wrappers such as PEFT's forward attributes to the model inside.
    """
    forwards = getattr(kind, "__getattr__", None) is not nn.Module.__getattr__
    return forwards or hasattr(kind, "config") or issubclass(kind, _UNSERVED)


class Verdicts:
    """The inspector's verdicts on a model, in its state at that moment."""

    def __init__(self, model: nn.Module) -> None:
        inspector = current()
        #: The modules of the model; the first is the model itself.
        self.parts = modules_of(model)
        self.limits: dict[nn.Module, tuple[Limit, ...]] = {}
        self.checks_calls: list[nn.Module] = []
        for part in self.parts:  # hundreds of modules, few with a configuration
            if "config" in part.__dict__ or _may_have_limits(part.__class__):
                if limits := inspector.limits(part):
                    self.limits[part] = tuple(limits)
                elif isinstance(part, _UNSERVED):
                    self.limits[part] = (_limit_of_torch(part),)
                if inspector.checks_calls(part):
                    self.checks_calls.append(part)

    # The next two run in each context: loops without calls.

    @property
    def compiles(self) -> bool:
        """Whether a part is compiled by itself."""
        for part in self.parts:
            if part.__dict__.get("_compiled_call_impl") or "_orig_mod" in part._modules:
                return True
        return False

    @property
    def may_have_others(self) -> bool:
        """Whether a part keeps modules in a plain list, tuple or dict, where they are no parts.

        True for containers that are too large to search.
        """
        parts = set(self.parts)
        for part in self.parts:
            for value in part.__dict__.values():
                if type(value) in _CONTAINERS and value:
                    if len(value) > _MOST_SEARCHED:
                        return True
                    for item in value.values() if isinstance(value, dict) else value:
                        if isinstance(item, nn.Module) and item not in parts:
                            return True
        return False


def of_library(model: nn.Module) -> bool:
    """Whether a model has a part of a library other than torch."""
    inspector = current()
    return any(
        inspector.is_of_library(part) for part in modules_of(model) if "config" in part.__dict__
    )
