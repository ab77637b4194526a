"""Calls for which Dynamo breaks the graph. Imported while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="calls that context_parallel cannot put into a graph")
def outside_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function in eager mode.

    Layouts cannot be a graph's input if each sample has its own, or a function chooses them.
    Functions that may be refused need layouts, too. On GPUs `varlen_attn` breaks the graph.
    """
    return function(*args, **kwargs)
