"""Calls ops 1 to 2 us sooner than torch's callables do (csrc/ops/glue.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from symm_cp import native
from symm_cp.ops.spmd import typed

_calls: dict[str, Callable[..., Any]] = {}


@cache
def _glue() -> Any:
    return native.glue_if_built()  # without Python's headers, torch's callables do the same


def direct(name: str) -> Callable[..., Any]:
    """Returns a callable equivalent to `torch.ops.symm_mem.<name>.default`.

    While torch compiles, it is that op itself.
    """
    # As torch.compiler.is_compiling() does, in one call.
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return op_of(name)
    call = _calls.get(name)
    if call is None:
        op, glue = op_of(name), _glue()
        under_modes = typed(op)
        made = glue.symm_cp_op_call(op._schema.name.encode(), under_modes) if glue else under_modes
        call = _calls[name] = made
    return call


@cache
def decoding_linear() -> Callable[..., Any]:
    """Returns the function of csrc/ops/decoding_glue.cpp, which returns None for unusual arguments.

    `torch.compile` does not trace it.
    """
    glue = _glue()
    return glue.symm_cp_decoding_linear() if glue else lambda *_: None


def op_of(name: str) -> torch._ops.OpOverload:
    """Returns `torch.ops.symm_mem.<name>.default`.

    This is the overload itself: torch would look up an unnamed one in each call.
    """
    op: torch._ops.OpOverload = getattr(torch.ops.symm_mem, name).default
    return op
