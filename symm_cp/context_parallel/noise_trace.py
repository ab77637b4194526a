"""Calls for which Dynamo breaks the graph. Imported while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="calls that context_parallel cannot put into a graph")
def outside_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function in eager mode.

    Where samples have layouts of their own, or a function chooses them, they are no input of a
    graph; and functions that may be refused depend on them, too. On GPUs `varlen_attn` is none.
    """
    return function(*args, **kwargs)
