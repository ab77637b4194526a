"""Inspectors: what a library knows of its modules, which this package has to know, too.

This package knows torch's modules only. What other libraries' models require, how they attend and
what they make of a batch is told by an `Inspector` of the library, on the floor above. Nothing here
imports it: `symm_cp/integrations/__init__.py` registers under which module's name a library shows
that it is in use, and a function that imports the inspector, which is called once that module is
loaded. So `import symm_cp` imports no library, and no floor imports a higher one.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Limit:
    """Something that attention within a region does not apply.

    `harmless_up_to` is the longest sequence for which that makes no difference; `shortest` the
    smallest number of positions that a rank may hold; `in_order` says that it makes none where the
    ranks hold the positions in rank order.
    """

    what: str
    why: str
    remedy: str
    harmless_up_to: int | None = None
    shortest: int = 0
    in_order: bool = False

    @property
    def needs_length(self) -> bool:
        """Whether it depends on the length of the sequence."""
        return self.harmless_up_to is not None or self.shortest > 0

    def fits(self, lengths: Sequence[int]) -> bool:
        """Tells whether it makes no difference if ranks hold these numbers of positions."""
        longest = self.harmless_up_to
        reaches = longest is None or sum(lengths) <= longest
        return reaches and min(lengths, default=0) >= self.shortest

    def error(self, module: nn.Module, length: int | None = None) -> NotImplementedError:
        """The error that refuses the module."""
        whole = "" if length is None else f" (the sequence has {length} positions)"
        return NotImplementedError(
            f"context_parallel: {type(module).__name__} has {self.what}: {self.why}{whole}. "
            f"{self.remedy}"
        )


@dataclass(frozen=True)
class Verdict:
    """What an inspector says of one module, not of its children.

    `state` is what it wants to know when it judges the modules that run after this one; None if no
    model of its library has run. `checks_calls`: it wants to see the arguments of the calls.
    """

    limits: tuple[Limit, ...] = ()
    state: Hashable = None
    checks_calls: bool = False


class BatchRules:
    """What a model makes of a batch; these are the rules for a model that no library knows."""

    has_decoder = False

    def __init__(self, op: str, model: nn.Module) -> None:
        self.op, self.model = op, plain(model)

    def takes(self, name: str) -> bool:
        """Tells whether the forward method of the model has an argument."""
        return name in inspect.signature(self.model.forward).parameters

    def add_decoder_input(self, batch: dict[str, Any]) -> None:
        """Adds the input of a decoder that the model would make of its part of the sequence."""

    def add_positions(self, batch: dict[str, Any], sequence: torch.Tensor) -> None:
        """Adds the positions that the model counts in the whole sequence, if it takes any."""
        if "position_ids" not in batch and self.takes("position_ids"):
            batch["position_ids"] = positions(sequence.shape[:2], 1, sequence.device)

    def shifts_labels(self) -> bool:
        """Tells whether the model shifts labels unless it gets `shift_labels`."""
        return False


class Inspector(Protocol):
    """What a library knows of its modules.

    `attributes` are the names of the modules' attributes that verdicts depend on, besides their
    class, children, forward pre-hooks, and all that their `config` holds. `mask_module` is the
    module whose functions, where they capture no tensors, are masks of positions alone.
    """

    attributes: frozenset[str]
    mask_module: str | None

    def judge(self, module: nn.Module, state: Hashable) -> Verdict:
        """Judges a module that runs after others have left `state`."""

    def check_call(self, watch: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raises `NotImplementedError` if a module takes this rank's part for the whole.

        `watch` is the `Watch` (guards.py) of the region.
        """

    def attending(
        self, models: Sequence[nn.Module], *, spread: bool
    ) -> AbstractContextManager[list[nn.Module] | None]:
        """Within it, models of the library attend to the whole sequence, if it is `spread`.

        Yields the modules of `models` that must run within it, or None if none is of the library.
        """

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules | None:
        """Returns the rules for a model, unless it is none of the library."""


class _Torch:
    """Knows torch's own modules."""

    attributes: frozenset[str] = frozenset()
    mask_module = None

    def judge(self, module: nn.Module, state: Hashable) -> Verdict:
        if not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            return Verdict()
        limit = Limit(
            f"type torch.nn.{type(module).__name__}",
            "it would attend to this rank's part of the sequence only",
            "Use F.scaled_dot_product_attention or flex_attention",
        )
        return Verdict((limit,))

    def check_call(self, watch: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def attending(
        self, models: Sequence[nn.Module], *, spread: bool
    ) -> AbstractContextManager[list[nn.Module] | None]:
        return nullcontext()

    def batch_rules(self, op: str, model: nn.Module) -> BatchRules | None:
        return BatchRules(op, model)


# --- the registry ------------------------------------------------------------------------------

_lock = threading.RLock()
_inspectors: list[Inspector] = [_Torch()]
_loaders: dict[str, Callable[[], object]] = {}


def register(module: str, load: Callable[[], object]) -> None:
    """Has `load`, which calls `add`, called as soon as a module of a library is imported."""
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
    """Returns what a model makes of a batch."""
    found = (inspector.batch_rules(op, model) for inspector in loaded())
    return next(rules for rules in found if rules is not None)


def by_position(mask_module: str | None) -> bool:
    """Tells whether masks that a module defines depend on positions alone, without tensors."""
    return mask_module is not None and any(i.mask_module == mask_module for i in loaded())


def plain(model: nn.Module) -> Any:
    """Returns the model inside of wrappers of torch.compile, DDP and the like."""
    inner = model
    while True:
        wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            return inner
        inner = wrapped


def positions(shape: Sequence[int], seq_dim: int, device: torch.device) -> torch.Tensor:
    """Returns the positions along `seq_dim` as a tensor of a shape."""
    along = [1] * len(shape)
    along[seq_dim] = -1
    return torch.arange(shape[seq_dim], device=device).view(along).expand(*shape)


#: Returns the modules of a model for which a function of a module is true.
Select = Callable[[Callable[[nn.Module], Any]], list[nn.Module]]


# --- verdicts that are kept --------------------------------------------------------------------

_VALUES = {bool, int, float, str, types.NoneType}
_CONTAINERS = {list, tuple, dict, set, frozenset}
_MOST_VERSIONS = 3  # of one model: as it is outside of contexts, and within those with `model=`


def _marks(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns what tells by `_same` whether values are still these, without keeping them alive."""
    marks = {}
    for name in names:
        value = values[name]
        if type(value) in _CONTAINERS:
            value = repr(value)
        elif type(value) not in _VALUES:
            # A method is made anew whenever it is taken from an object.
            value = value.__func__ if type(value) is types.MethodType else value
            with contextlib.suppress(TypeError):  # such as a dtype
                value = weakref.ref(value)
        marks[name] = value
    return marks


def _same(values: dict[str, Any], marks: dict[str, Any]) -> bool:
    # One loop without calls: it runs for each part of a model in each context.
    for name, mark in marks.items():
        if name not in values:
            return False
        value = values[name]
        if value is mark:
            continue
        if type(value) in _VALUES:
            if type(value) is not type(mark) or value != mark:
                return False
        elif type(value) in _CONTAINERS:
            if repr(value) != mark:
                return False
        elif type(mark) is not weakref.ref:
            return False
        else:
            target = mark()
            if target is not value and (
                type(value) is not types.MethodType or value.__func__ is not target
            ):
                return False
    return True


def _held(values: dict[str, Any], watched: frozenset[str]) -> list[str]:
    """Returns which of the watched attributes are parameters or buffers of a module."""
    stored = {**values["_parameters"], **values["_buffers"]}
    return [name for name, tensor in stored.items() if tensor is not None and name in watched]


def _settings(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of a configuration, without what its class makes of them."""
    if isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
        return None
    try:
        values = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return values if isinstance(values, dict) else None


class Known:
    """What inspectors say of the parts of a model, as long as `still_true`.

    Keeps nothing of the model alive. Verdicts are found by the number of a part in `modules()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inspectors = tuple(loaded())
        watched = frozenset({"config", "_compiled_call_impl"}).union(
            *(each.attributes for each in self._inspectors)
        )
        self._watched = watched
        parts = list(model.modules())
        self._refs = [weakref.ref(part) for part in parts]
        self._rows: list[tuple[Any, ...]] = []
        self._configs: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        self._numbers = {id(part): number for number, part in enumerate(parts)}
        self._verdicts: dict[Any, Verdict] = {}
        self._chosen: dict[Any, list[int]] = {}
        self._passing: dict[Any, tuple[list[Any], list[Any]]] = {}
        #: The groups over which the parameters of all parts were compared.
        self.compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.compiles = False
        for part in parts:
            values = vars(part)
            names = watched.intersection(values)
            compiled = values.get("_compiled_call_impl") is not None
            self.compiles |= compiled or "_orig_mod" in values["_modules"]
            self._rows.append(
                (
                    type(part),
                    tuple(values["_modules"]),
                    tuple(map(id, values["_modules"].values())),
                    _held(values, watched),
                    [weakref.ref(hook) for hook in values["_forward_pre_hooks"].values()],
                    names,
                    _marks(values, names),
                )
            )
            self._note_settings(values.get("config"))

    def _note_settings(self, config: Any) -> None:
        values = None if config is None else _settings(config)
        if not values or id(config) in self._configs:
            return
        self._configs[id(config)] = weakref.ref(config), _marks(values, values)
        for value in values.values():
            if type(value) not in _VALUES and type(value) not in _CONTAINERS:
                self._note_settings(value)

    def parts(self) -> list[nn.Module]:
        """Returns the parts of the model."""
        return list(map(operator.call, self._refs))

    def still_true(self) -> bool:
        """Tells whether nothing has changed that verdicts depend on."""
        parts = self.parts()
        if None in parts or len(self._inspectors) != len(loaded()):
            return False
        watched = self._watched
        for reference, marks in self._configs.values():
            config = reference()
            values = None if config is None else object.__getattribute__(config, "__dict__")
            if values is None or len(values) != len(marks) or not _same(values, marks):
                return False
        for part, row in zip(parts, self._rows, strict=True):
            kind, names, children, held, hooks, attributes, marks = row
            values = part.__dict__
            modules, before = values["_modules"], values["_forward_pre_hooks"]
            stored = values["_parameters"], values["_buffers"]
            if (
                type(part) is not kind
                or tuple(modules) != names
                or tuple(map(id, modules.values())) != children
                or watched.intersection(values) != attributes
                or ((hooks or before) and list(map(weakref.ref, before.values())) != hooks)
            ):
                return False
            may_hold = held or not (watched.isdisjoint(stored[0]) and watched.isdisjoint(stored[1]))
            if may_hold and _held(values, watched) != held:
                return False
            for name, mark in marks.items():
                value = values[name]
                if value is not mark and (type(mark) is not weakref.ref or mark() is not value):
                    if not _same(values, marks):
                        return False
                    break
        return True

    def judge(self, module: nn.Module, inspector: Inspector, state: Hashable) -> Verdict:
        """Returns the verdict of an inspector of a part."""
        key = self._numbers[id(module)], inspector, state
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = inspector.judge(module, state)
        return verdict

    def select(self, is_chosen: Callable[[nn.Module], Any]) -> list[nn.Module]:
        """Returns the parts for which a function of a module is true, which is asked once."""
        numbers = self._chosen.get(is_chosen)
        parts = self.parts()
        if numbers is None:
            numbers = [number for number, part in enumerate(parts) if is_chosen(part)]
            self._chosen[is_chosen] = numbers
        return [parts[number] for number in numbers]

    def passing(
        self,
        model: nn.Module,
        states: dict[Inspector, Hashable],
        fits: Callable[[Limit], bool],
        key: Hashable,
    ) -> tuple[list[nn.Module], dict[nn.Module, Inspector]]:
        """Returns the parts that need not be judged when they run, and whose calls are checked.

        They have no limits but those of the model itself and those that fit, and leave the states
        as the model itself has left them: the order in which they run makes no difference.
        """
        key = (key, *states.items())
        if key not in self._passing:
            self._passing[key] = self._find_passing(model, states, fits)
        passing, called = self._passing[key]
        return list(map(operator.call, passing)), {ref(): inspector for ref, inspector in called}

    def _find_passing(
        self, model: nn.Module, states: dict[Inspector, Hashable], fits: Callable[[Limit], bool]
    ) -> tuple[list[Any], list[Any]]:
        passing, called = [], []
        own = {limit for i, state in states.items() for limit in self.judge(model, i, state).limits}
        for reference, part in zip(self._refs, self.parts(), strict=True):
            each = [(i, self.judge(part, i, state)) for i, state in states.items()]
            if any(verdict.state != states[i] for i, verdict in each):
                return [], []
            if all(limit in own or fits(limit) for _, v in each for limit in v.limits):
                passing.append(reference)
                called += [(reference, i) for i, verdict in each if verdict.checks_calls]
        return passing, called


_known: weakref.WeakKeyDictionary[nn.Module, list[Known]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> Known:
    """Returns what inspectors say of a model as it is now."""
    versions = _known.setdefault(model, [])
    for known in versions:
        if known.still_true():
            break
    else:
        known = Known(model)
    _known[model] = [known, *(other for other in versions if other is not known)][:_MOST_VERSIONS]
    return known


def of_library(model: nn.Module) -> bool:
    """Tells whether a model has a part that is of a library other than torch."""
    return bool(known_of(model).select(_is_of_library))


def _is_of_library(module: nn.Module) -> bool:
    return any(each.judge(module, None).state is not None for each in loaded())
