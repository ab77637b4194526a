"""Keeps inspectors' verdicts with a model, until something changes that they depend on.

A model has a hundred modules, and judging one takes fifty calls of Python functions. So verdicts
outlive the context, and each context checks that they are `still_true`, in a loop without calls.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.inspectors import Inspector, Limit, Verdict, loaded

#: Returns the modules of a model for which a function of a module is true.
Select = Callable[[Callable[[nn.Module], Any]], list[nn.Module]]

_VALUES = {bool, int, float, str, types.NoneType}
_CONTAINERS = {list, tuple, dict, set, frozenset}
_MOST_LAYOUTS = 64  # layouts for which passing parts are kept; beyond it, all are dropped
_MOST_VERSIONS = 3  # versions of one model: outside of contexts, and within contexts with `model=`


def _marks(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns marks by which `_same` detects changed values, without keeping values alive."""
    marks = {}
    for name in names:
        value = values[name]
        if type(value) in _CONTAINERS:
            value = repr(value)
        elif type(value) not in _VALUES:
            # Each access to a method makes a new object.
            value = value.__func__ if type(value) is types.MethodType else value
            value = _reference(value)
        marks[name] = value
    return marks


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # such as a dtype
        return value


def _alive(references: list[Any]) -> list[Any]:
    parts = []
    for reference in references:  # not a map: if Dynamo traces that, it calls the modules
        parts.append(reference())
    return parts


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


def _held(module: nn.Module, watched: frozenset[str]) -> list[str]:
    """Returns which of the watched attributes are parameters or buffers of a module."""
    stored = {**module._parameters, **module._buffers}
    return [name for name, tensor in stored.items() if tensor is not None and name in watched]


def _settings(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of a configuration, without computed attributes of its class."""
    if isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
        return None
    try:
        values = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return values if isinstance(values, dict) else None


class Known:
    """Inspectors' verdicts on the parts of a model, valid as long as `still_true`.

    Keeps no part of the model alive. Verdicts are keyed by the number of a part in `modules()`.
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
        self._configs: dict[int, tuple[Any, dict[str, Any]]] = {}
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
            self.compiles |= compiled or "_orig_mod" in part._modules
            self._rows.append(
                (
                    type(part),
                    tuple(part._modules.keys()),
                    tuple(map(id, part._modules.values())),
                    _held(part, watched),
                    [weakref.ref(hook) for hook in part._forward_pre_hooks.values()],
                    names,
                    _marks(values, names),
                )
            )
            self._note_settings(values.get("config"))

    def _note_settings(self, config: Any) -> None:
        values = None if config is None else _settings(config)
        if not values or id(config) in self._configs:
            return
        self._configs[id(config)] = _reference(config), _marks(values, values)
        for value in values.values():
            if type(value) not in _VALUES and type(value) not in _CONTAINERS:
                self._note_settings(value)

    def parts(self) -> list[nn.Module]:
        """Returns the parts of the model."""
        return _alive(self._refs)

    def still_true(self) -> bool:
        """Whether nothing has changed that verdicts depend on."""
        parts = _alive(self._refs)
        if None in parts or len(self._inspectors) != len(loaded()):
            return False
        watched = self._watched
        for reference, marks in self._configs.values():
            config = reference() if type(reference) is weakref.ref else reference
            values = None if config is None else object.__getattribute__(config, "__dict__")
            if values is None or len(values) != len(marks) or not _same(values, marks):
                return False
        for part, row in zip(parts, self._rows, strict=True):
            kind, names, children, held, hooks, attributes, marks = row
            values = part.__dict__
            modules, before = part._modules, part._forward_pre_hooks
            stored = part._parameters.keys(), part._buffers.keys()
            if (
                type(part) is not kind
                or tuple(modules.keys()) != names
                or tuple(map(id, modules.values())) != children
                or watched.intersection(values) != attributes
                or ((hooks or before) and list(map(weakref.ref, before.values())) != hooks)
            ):
                return False
            may_hold = held or not (watched.isdisjoint(stored[0]) and watched.isdisjoint(stored[1]))
            if may_hold and _held(part, watched) != held:
                return False
            for name, mark in marks.items():
                value = values[name]
                if value is not mark and (type(mark) is not weakref.ref or mark() is not value):
                    if not _same(values, marks):
                        return False
                    break
        return True

    def judge(self, module: nn.Module, inspector: Inspector, state: Hashable) -> Verdict:
        """Returns an inspector's verdict on a part."""
        key = self._numbers[id(module)], inspector, state
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = inspector.judge(module, state)
        return verdict

    def select(self, is_chosen: Callable[[nn.Module], Any]) -> list[nn.Module]:
        """Returns the parts for which a function of a module is true; calls it once per part."""
        numbers = self._chosen.get(is_chosen)
        if numbers is None:
            numbers = [number for number, part in enumerate(self.parts()) if is_chosen(part)]
            self._chosen[is_chosen] = numbers
        if not numbers:
            return []
        parts = _alive(self._refs)
        return [parts[number] for number in numbers]

    def passing(
        self,
        model: nn.Module,
        states: dict[Inspector, Hashable],
        fits: Callable[[Limit], bool],
        key: Hashable,
    ) -> tuple[list[nn.Module], dict[nn.Module, Inspector]]:
        """Returns the parts that need no judgement when they run, and those with checked calls.

        Their only limits fit, or are limits of the model itself, and they leave the states as the
        model itself has left them: the order in which they run makes no difference.
        """
        key = (key, *states.items())
        if key not in self._passing:
            if len(self._passing) >= _MOST_LAYOUTS:
                self._passing.clear()
            self._passing[key] = self._find_passing(model, states, fits)
        passing, called = self._passing[key]
        return _alive(passing), {ref(): inspector for ref, inspector in called}

    def _find_passing(
        self, model: nn.Module, states: dict[Inspector, Hashable], fits: Callable[[Limit], bool]
    ) -> tuple[list[Any], list[Any]]:
        passing, called = [], []
        limits = [
            limit for i, state in states.items() for limit in self.judge(model, i, state).limits
        ]
        # The other limits depend on whether the part is compiled.
        own = {limit for limit in limits if limit.harmless_up_to is None}
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
    """Returns inspectors' verdicts on a model in its current state."""
    versions = _known.setdefault(model, [])
    for known in versions:
        if known.still_true():
            break
    else:
        known = Known(model)
    if versions[:1] != [known]:
        versions[:] = [known, *[other for other in versions if other is not known]]
        del versions[_MOST_VERSIONS:]
    return known


def of_library(model: nn.Module) -> bool:
    """Whether a model has a part of a library other than torch."""
    return bool(known_of(model).select(_is_of_library))


def _is_of_library(module: nn.Module) -> bool:
    return any(each.judge(module, None).state is not None for each in loaded())
