"""Checks the types of ops (types.py) under `spmd_types.checker.typecheck`.

The checker knows autograd functions only: here each op has one that calls the op, whose own
gradient stays.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves

from symm_cp.ops.op import declared_op
from symm_cp.ops.types import Described


def checks_types() -> bool:
    """Whether `spmd_types` checks types now."""
    if torch.compiler.is_compiling():  # it traces the op
        return False
    checker = sys.modules.get("spmd_types")
    return checker is not None and checker.is_type_checking()


def typed(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns a callable like the op, which checks types while `spmd_types` does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not checks_types():
            return op(*args, **kwargs)
        return function_of(op._opname).apply(*_positional(op, args, kwargs))

    return call


def _positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    names = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(each.name, each.default_value) for each in names)]


@cache
def function_of(name: str) -> Any:
    """Returns an autograd function that calls an op, with the op's rule for `spmd_types`."""
    op = declared_op(name)
    arguments = op.overload._schema.arguments
    by_position = sum(not argument.kwarg_only for argument in arguments)

    def apply(cls: Any, *args: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if has_torch_function(tensors):  # until the checker calls this again, without its mode
            return handle_torch_function(cls.apply, tensors, *args)
        names = [argument.name for argument in arguments[by_position:]]
        further = dict(zip(names, args[by_position:], strict=True))
        result = op.overload(*args[:by_position], **further)
        return result if op.complete is None else op.complete(result)  # types are of its tensor

    def forward(*args: Any) -> Any:
        raise AssertionError("apply calls the op")

    def spmd_typecheck(**named: Any) -> Any:
        return checked(name, named)

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    for function, kind in zip((forward, spmd_typecheck), kinds, strict=True):
        parameters = [inspect.Parameter(argument.name, kind) for argument in arguments]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    members = {
        "apply": classmethod(apply),
        "forward": staticmethod(forward),
        "setup_context": staticmethod(lambda *_: None),
        "spmd_typecheck": staticmethod(spmd_typecheck),
    }
    return type(op.name, (torch.autograd.Function,), members)


def checked(name: str, named: dict[str, Any]) -> Any:
    """Returns the types of an op's results for `spmd_types`; raises its error for wrong ones."""
    rule = declared_op(name).types
    checking = Checked(name, named["group_name"])
    return checking.refuse("it is a gradient") if rule is None else rule(checking, **named)


class Checked(Described):
    """Checks types with `spmd_types.rules`, on the axis of a group."""

    def __init__(self, op: str, group: Any) -> None:
        import spmd_types

        super().__init__()
        self._op = op
        self._rules, self._types = spmd_types.rules, spmd_types
        try:
            self._axis = _resolve_process_group(group)
        except (RuntimeError, ValueError, TypeError):  # the name of an axis, before groups exist
            self._axis = group

    def all_gather(self, x: Any, dim: Any) -> Any:
        """See `Described`."""
        return self._rules.all_gather(x, self._axis, src=self._types.S(dim), dst=self._types.R)

    def reduce_scatter(self, x: Any, dim: Any, reduce_op: str = "sum") -> Any:
        """See `Described`."""
        source, shard = self._summed(x, reduce_op), self._types.S(dim)
        return self._rules.reduce_scatter(x, self._axis, src=source, dst=shard)

    def all_reduce(self, x: Any, reduce_op: str = "sum") -> Any:
        """See `Described`."""
        source = self._summed(x, reduce_op)
        return self._rules.all_reduce(x, self._axis, src=source, dst=self._types.R)

    def all_to_all(self, x: Any, source: int, to: int) -> Any:
        """See `Described`."""
        src, dst = self._types.S(source), self._types.S(to)
        return self._rules.all_to_all(x, self._axis, src=src, dst=dst)

    def shard(self, x: Any, dim: int) -> Any:
        """See `Described`."""
        return self.all_to_all(x, dim, dim)

    def part(self, x: Any, dim: int) -> Any:
        """See `Described`."""
        return self._rules.convert(x, self._axis, src=self._types.R, dst=self._types.S(dim))

    def from_shards(self, text: str, equation: str, query: Any, *shards: Any, dim: int) -> Any:
        """See `Described`."""
        gathered = [self.all_gather(x, dim) for x in shards]
        return self._rules.einsum(equation, query, *gathered)

    def local(self, text: str, equation: str, *xs: Any, linear_in: Any = ()) -> Any:
        """See `Described`."""
        return self._rules.einsum(equation, *xs, linear_in=linear_in)

    def varying(self, text: str, equation: str, x: Any, collective: str) -> Any:
        """See `Described`."""
        if self._sharded(x):
            self.refuse("its values are no shards of one tensor, so it needs local types")
        varying = self._types.V
        x = self._rules.reinterpret(x, self._axis, src=varying, dst=varying)
        return self._rules.einsum(equation, x)

    def refuse(self, reason: str) -> None:
        """See `Described`."""
        raise self._types.SpmdTypeError(f"{self._op} has no types: {reason}")

    def ignore(self, *xs: Any) -> None:
        """See `Described`."""
        self._rules.ignore(*(x for x in tree_leaves(xs) if isinstance(x, torch.Tensor)))

    def _sharded(self, x: Any) -> bool:
        """Whether a tensor is a shard on the axis. Local types ignore shards."""
        if not self._types._state._is_global():
            return False
        spec = self._types.get_partition_spec(x)
        axis = self._types.normalize_axis(self._axis)
        return spec is not None and axis in spec.axes_with_partition_spec()

    def _summed(self, x: Any, reduce_op: str) -> Any:
        """Returns the type that terms of a sum must have.

        Without shards on the axis (the checker's local types), products of varying factors are V.
        """
        types, axis = self._types, self._types.normalize_axis(self._axis)
        of_axis = types.get_local_type(x).get(axis)
        if of_axis is types.P and reduce_op != "sum":
            self.refuse(f"{reduce_op=} of terms of a sum (P) is not the sum")
        return types.V if of_axis is types.V and not self._sharded(x) else types.P
