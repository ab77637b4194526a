"""Reads the variables that a function captures, also while Dynamo traces the code that makes it.

Functions that traced code makes, such as the masks that models of transformers compose, have no
`__closure__` in Dynamo. `captured` reads their variables from Dynamo itself (closures_trace.py), so
that taking a mask apart does not break the graph. Identify functions by `__code__`: Dynamo guards
it, and traces a function once for all values that it captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables that a Python function captures, by name.

    Same result as::

        {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, function.__closure__)}

    also while Dynamo traces; then a captured tensor is an input of the graph or computed in it.
    `function` must be a plain Python function.
    """
    if torch.compiler.is_dynamo_compiling():
        # Imported here because it loads Dynamo.
        from symm_cp.integrations.transformers.closures_trace import captured_in_trace

        contents = captured_in_trace(function, _cells)
    else:
        contents = _cells(function)
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def _cells(function: Callable[..., Any]) -> tuple[Any, ...]:
    closure: Any = function.__closure__  # type: ignore[attr-defined]
    return () if closure is None else tuple([cell.cell_contents for cell in closure])
