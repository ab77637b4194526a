"""Calls ops in half the time that torch's callables take (csrc/ops/glue.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from symm_cp import native

_calls: dict[str, Callable[..., Any]] = {}


@cache
def _glue() -> Any:
    try:
        return native.load_glue()
    except native.BuildError:  # no headers of Python: torch's callables do the same
        return None


def direct(name: str) -> Callable[..., Any]:
    """Returns a callable that does what `torch.ops.symm_mem.<name>.default` does.

    While torch compiles it is that op itself.
    """
    if torch.compiler.is_compiling():
        return _op(name)
    call = _calls.get(name)
    if call is None:
        op, glue = _op(name), _glue()
        schema = op._schema
        made = glue and glue.symm_cp_op_call(
            schema.name.encode(), schema.overload_name.encode(), op
        )
        call = _calls[name] = made or op
    return call


def _op(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.symm_mem, name).default
    return overload
