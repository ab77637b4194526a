"""Tensors that a `score_mod` captures and that require gradients: found and replaced.

A `score_mod` takes indices only; learnable tables come from its closure, the arguments of a
`functools.partial`, or the module whose method it is. Autograd needs them as inputs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from symm_cp.ops.attention.flex.mask import Modifier, over_indices


class Rebinding(Protocol):
    """Lets a backward pass replace captured tensors of a `score_mod` with its own."""

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[Modifier, list[torch.Tensor]]:
        """Returns the function to differentiate, and the tensors to differentiate by."""


class Captures:
    """The tensors that a `score_mod` captures and that require gradients, each once.

    `tensors` are in closures and partials (also nested), parameters of modules, and other
    leaves that its result depends on.
    """

    def __init__(self, score_mod: Modifier) -> None:
        self._score_mod = score_mod
        self.tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._collect(score_mod)
        self._collect_leaves()

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and all(tensor is not known for known in self.tensors):
            self.tensors.append(tensor)

    def _collect(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._add(value)
        elif isinstance(value, torch.nn.Module):
            for parameter in value.parameters():
                self._add(parameter)
        else:
            for part in _parts(value):
                self._collect(part)

    def _collect_leaves(self) -> None:
        """Adds leaves that are found only by running the function, such as globals."""
        zero = torch.zeros(1, dtype=torch.int64, device="cpu")
        with torch.enable_grad():
            score = torch.zeros(1, 1, 1, 1, device="cpu", requires_grad=True)
            modified = over_indices(self._score_mod, score=True)(score, zero, zero, zero, zero)
        known = {_node(tensor) for tensor in (score, *self.tensors)}
        pending = [_node(modified)] if modified.requires_grad else []
        visited = set(pending)
        while pending:
            node = pending.pop()
            if node in known:
                continue
            if hasattr(node, "variable"):  # a leaf
                self._add(node.variable)
            fresh = {following for following, _ in node.next_functions} - visited - {None}
            visited |= fresh
            pending += fresh

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[Modifier, list[torch.Tensor]]:
        """Returns the function to differentiate, and the tensors to differentiate by.

        `tensors` are the captured tensors as autograd saved them. Leaves replace the tensors that
        were computed from others, so that autograd stops there.
        """
        leaves = [
            old if old.is_leaf else new.detach().requires_grad_()
            for old, new in zip(self.tensors, tensors, strict=True)
        ]
        places = {id(old): new for old, new in zip(self.tensors, leaves, strict=True)}
        return _replaced(self._score_mod, places, {}), leaves


def _node(tensor: torch.Tensor) -> Any:
    """Returns the tensor's node in the autograd graph."""
    if tensor.requires_grad:
        return torch.autograd.graph.get_gradient_edge(tensor).node
    return None


def _parts(value: Any) -> list[Any]:
    """Returns the objects that a function or a container holds."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if type(value) in (list, tuple):
        return list(value)
    return list(value.values()) if type(value) is dict else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that has not been assigned yet
        return False
    return True


def _replaced(value: Any, places: dict[int, torch.Tensor], done: dict[int, Any]) -> Any:
    """Returns a copy of a function or container with tensors replaced."""
    if isinstance(value, torch.Tensor):
        return places.get(id(value), value)
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value  # references to itself stay

    def replace(part: Any) -> Any:
        return _replaced(part, places, done)

    result = value
    if isinstance(value, types.FunctionType):
        result = _replaced_function(value, replace)
    elif isinstance(value, functools.partial):
        keywords = {name: replace(part) for name, part in value.keywords.items()}
        result = functools.partial(replace(value.func), *map(replace, value.args), **keywords)
    elif type(value) in (list, tuple):
        result = type(value)(map(replace, value))
    elif type(value) is dict:
        result = {name: replace(part) for name, part in value.items()}
    done[id(value)] = result
    return result


def _replaced_function(
    function: types.FunctionType, replace: Callable[[Any], Any]
) -> types.FunctionType:
    cells = tuple(
        types.CellType(replace(cell.cell_contents)) if _is_filled(cell) else cell
        for cell in function.__closure__ or ()
    )
    defaults = None if function.__defaults__ is None else tuple(map(replace, function.__defaults__))
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, cells
    )
    if function.__kwdefaults__ is not None:
        made.__kwdefaults__ = {
            name: replace(part) for name, part in function.__kwdefaults__.items()
        }
    return made
