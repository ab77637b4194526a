"""The inspector: the facts about modules that this package needs.

This package covers torch's modules only. For a library of models, an `Inspector` on the floor above
describes what its models require, how they attend and how they use a batch. Nothing here imports
it: `symm_cp/integrations/__init__.py` registers the name of a module that shows that the library is
in use, and a function that imports the inspector, which is called once that module is loaded. So
`import symm_cp` imports no library, and no floor imports a higher one.

A model has a hundred modules, and judging one takes fifty calls of Python functions. So verdicts
are kept with the model: `known_of` returns them until a fact changes that they depend on.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
import weakref
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


class Inspector:
    """Describes torch's modules; derived classes describe those of a library, too."""

    #: The attributes of modules that limits depend on, besides their class, their children, and
    #: the plain values of their `config`.
    attributes: frozenset[str] = frozenset()

    def limits(self, module: nn.Module) -> tuple[Limit, ...]:
        """Returns the limits of one module, without its children."""
        if not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            return ()
        limit = Limit(
            f"type torch.nn.{type(module).__name__}",
            "it would attend to this rank's part of the sequence only",
            "Use F.scaled_dot_product_attention or flex_attention",
        )
        return (limit,)

    def is_of_library(self, module: nn.Module) -> bool:
        """Whether a module is the library's."""
        return False

    def checks_calls(self, module: nn.Module) -> bool:
        """Whether `check_call` checks the calls of a module."""
        return False

    def check_call(self, watch: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raises `NotImplementedError` if a call treats this rank's part as the whole sequence.

        `watch` is the `Watch` (guards.py) of the region.
        """

    def attending(
        self, models: Sequence[nn.Module]
    ) -> AbstractContextManager[list[nn.Module] | None]:
        """Has models of the library attend to the whole sequence.

        Yields the modules of `models` that must run inside, or None if none is of the library.
        """
        return nullcontext()

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules:
        """Returns the rules by which a model uses a batch."""
        return BatchRules(op, model)


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


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The same as `list(model.modules())`, whose nested generators take ten times as long."""
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
    return [*found]


def positions(shape: Sequence[int], seq_dim: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor of a shape, which holds the positions along `seq_dim`."""
    along = [1] * len(shape)
    along[seq_dim] = -1
    return torch.arange(shape[seq_dim], device=device).view(along).expand(*shape)


# --- verdicts kept with a model ------------------------------------------------------------------

#: Returns the modules of a model for which a function of a module is true.
Select = Callable[[Callable[[nn.Module], Any]], list[nn.Module]]

#: The limits of a part of a model, and whether its calls are checked.
Row = tuple[tuple[Limit, ...], bool]

_VALUES = {bool, int, float, str, types.NoneType}
_MOST_VERSIONS = 3  # versions of one model: outside of contexts, and within contexts with `model=`


def _facts(parts: list[nn.Module], watched: set[str]) -> tuple[list[Any], list[Any]]:
    """Returns what verdicts on parts depend on: values and ids, and the objects with these ids."""
    # Loops without calls of their own: they run for all parts of a model in each context.
    objects: list[Any] = []
    configs: dict[int, Any] = {}
    for part in parts:
        stored = part.__dict__
        objects += (type(part), *part._modules.values())
        if not watched.isdisjoint(stored.keys()):
            for name in watched.intersection(stored.keys()):
                objects.append(stored[name])
            if (config := stored.get("config")) is not None:
                configs[id(config)] = config
    facts = [*map(id, objects)]
    for config in configs.values():
        for name, value in getattr(config, "__dict__", {}).items():
            if type(value) in _VALUES:
                facts += (name, value)
    return facts, objects


def _alive(references: list[Any]) -> list[Any]:
    parts = []
    for reference in references:  # not a map: if Dynamo traces that, it calls the modules
        parts.append(reference())
    return parts


class Known:
    """The inspector's verdicts on the parts of a model, in one state of it.

    Keeps no part of the model alive.
    """

    def __init__(self, parts: list[nn.Module], facts: list[Any], objects: list[Any]) -> None:
        self.facts = facts
        self._parts = [weakref.ref(part) for part in parts]
        self._objects: list[weakref.ref[Any]] = []
        self._lasting: list[Any] = []  # objects without weak references, such as a dtype
        for each in objects:
            try:
                self._objects.append(weakref.ref(each))
            except TypeError:
                self._lasting.append(each)
        self._chosen: dict[Any, list[int]] = {}
        self._judged: list[Row] | None = None
        #: The groups over which the parameters of all parts were compared.
        self.compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.compiles = any(
            vars(part).get("_compiled_call_impl") is not None or "_orig_mod" in part._modules
            for part in parts
        )

        all_parts = set(parts)
        #: Whether a part keeps modules in a plain list, tuple or dict, where they are no parts.
        self.has_others = any(
            isinstance(item, nn.Module) and item not in all_parts
            for part in parts
            for value in vars(part).values()
            if type(value) in (list, tuple, dict)
            for item in (value.values() if isinstance(value, dict) else value)
        )

    def parts(self) -> list[nn.Module]:
        """Returns the parts of the model."""
        return _alive(self._parts)

    def holds(self, facts: list[Any]) -> bool:
        """Whether the facts are those of these verdicts: ids of dead objects are used again."""
        return self.facts == facts and None not in _alive(self._objects)

    def select(self, is_chosen: Callable[[nn.Module], Any]) -> list[nn.Module]:
        """Returns the parts for which a function of a module is true; calls it once per part."""
        numbers = self._chosen.get(is_chosen)
        if numbers is None:
            numbers = [number for number, part in enumerate(self.parts()) if is_chosen(part)]
            self._chosen[is_chosen] = numbers
        parts: list[Any] = []
        for number in numbers:
            parts.append(self._parts[number]())
        return parts

    def judged(self) -> list[Row]:
        """Returns the verdicts on all parts, in order."""
        if self._judged is None:
            inspector = current()
            self._judged = [
                (inspector.limits(part), inspector.checks_calls(part)) for part in self.parts()
            ]
        return self._judged


_known: weakref.WeakKeyDictionary[nn.Module, list[Known]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> Known:
    """Returns the inspector's verdicts on a model in its current state."""
    inspector = current()
    parts = modules_of(model)
    facts, objects = _facts(parts, {"config", "_compiled_call_impl", *inspector.attributes})
    facts.append(id(inspector))
    versions = _known.setdefault(model, [])
    for known in versions:
        if known.holds(facts):
            break
    else:
        known = Known(parts, facts, objects)
    if versions[:1] != [known]:
        if known in versions:
            versions.remove(known)
        versions.insert(0, known)
        del versions[_MOST_VERSIONS:]
    return known


def of_library(model: nn.Module) -> bool:
    """Whether a model has a part of a library other than torch."""
    return bool(known_of(model).select(current().is_of_library))
