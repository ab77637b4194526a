"""Ops under torch's modes for debugging.

`LocalTensorMode` runs them on all ranks in one process; `CommDebugMode` and `DebugMode` count the
collectives of their unfused definitions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from symm_cp.group.one_process import on_ranks
from symm_cp.loading import when_imported
from symm_cp.ops.common import libraries, rank_in, world_size_of
from symm_cp.ops.op import Composite, Kernel, Op
from symm_cp.ops.types import collectives

_ops: dict[str, Op] = {}  # by their names
_awaited: set[str] = set()


def register(ops: Iterable[Op]) -> None:
    """Registers ops with the modes, now or as soon as these are imported."""
    added = {op.full_name: op for op in ops}
    _ops.update(added)
    for module, mode, rule in (
        ("torch.distributed._local_tensor", "LocalTensorMode", _on_all_ranks),
        ("torch.distributed.tensor.debug._comm_mode", "CommDebugMode", _with_collectives),
        ("torch.utils._debug_mode", "DebugMode", _with_collectives),
    ):
        if module in sys.modules:
            _register(added.values(), module, mode, rule)
        elif module not in _awaited:  # then with all ops that there are
            _awaited.add(module)
            when_imported(module, partial(_register, _ops.values(), module, mode, rule))


def _register(ops: Iterable[Op], module: str, mode: str, rule: Callable[..., Any]) -> None:
    cls = getattr(sys.modules[module], mode)
    for op in ops:
        if "group_name" in _names(op):
            library = libraries(op.namespace).ops
            torch.library.register_torch_dispatch(op.full_name, cls, rule, lib=library)


class _Inside:
    """Stands for a collective in an op, which a mode calls to record it."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops._c10d_functional, name)

    def __call__(self) -> None:
        """Does nothing: the op exchanges the tensors."""

    def __repr__(self) -> str:
        return f"{self._overloadpacket} of the op before"


def _with_collectives(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Lets a mode record an op, and the collectives of its unfused definition."""
    op = _op_of(func)
    assert op is not None
    assert op.kernel is not None
    if isinstance(op.gradient, Composite) and not types:
        with mode:
            return op.kernel(*args, **(kwargs or {}))
    record = type(mode).__torch_dispatch__
    result = record(mode, func, types, args, kwargs)
    if result is not NotImplemented and op.types is not None:
        names = {argument.name: argument.default_value for argument in func._schema.arguments}
        given = {**names, **dict(zip(names, args, strict=False)), **(kwargs or {})}
        plain = tree_map_only(torch.Tensor, lambda _: "", given)
        for name in collectives(op.types, plain):
            record(mode, _Inside(name), ())
    return result


def _names(op: Op) -> list[str]:
    return [argument.name for argument in op.overload._schema.arguments]


def _op_of(func: Any) -> Op | None:
    """Returns the declaration of an op, None for others."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "aten":
        return None
    return _ops.get(func._schema.name) if func._overloadname == "default" else None


def _kernel_of(func: Any, args: Any) -> Kernel | None:
    """Returns the kernel in Python of an op with peers."""
    op = _op_of(func)
    at = -1 if op is None or "group_name" not in _names(op) else _names(op).index("group_name")
    return op.kernel if op is not None and at >= 0 and world_size_of(args[at]) > 1 else None


def _on_all_ranks(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Runs an op on all ranks of `LocalTensorMode`, unfused."""
    from torch.distributed._local_tensor import LocalTensor, _map_to_rank_local_val

    leaves, spec = tree_flatten((args, kwargs or {}))
    if not any(isinstance(leaf, LocalTensor) for leaf in leaves):
        return func(*args, **(kwargs or {}))
    op, ranks = _op_of(func), sorted(mode.ranks)
    assert op is not None
    names = _names(op)

    def call(rank: int) -> Any:
        own = [_map_to_rank_local_val(leaf, rank) for leaf in leaves]
        own_args, own_kwargs = tree_unflatten(own, spec)
        if "rank" in names[: len(own_args)]:
            at = names.index("rank")
            number = rank_in(own_args[names.index("group_name")])
            own_args = (*own_args[:at], number, *own_args[at + 1 :])
        result = func(*own_args, **own_kwargs)
        return result if op.complete is None else op.complete(result)

    def together(*results: Any) -> Any:
        if not isinstance(results[0], torch.Tensor):
            return results[0]
        for leaf in leaves:
            if isinstance(leaf, LocalTensor) and leaf._local_tensors[ranks[0]] is results[0]:
                return leaf
        return LocalTensor(dict(zip(ranks, results, strict=True)))

    return tree_map(together, *on_ranks(ranks, call, _kernel_of))
