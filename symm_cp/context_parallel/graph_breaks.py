"""Calls for which Dynamo breaks the graph. Imported while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="calls that context_parallel cannot put into a graph")
def outside_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function in eager mode.

    On GPUs `varlen_attn` breaks the graph. Random functions do where ranks draw equal numbers, and
    where a graph cannot change default generators.
    """
    return function(*args, **kwargs)
