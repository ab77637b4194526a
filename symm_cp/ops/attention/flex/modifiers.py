"""`mask_mod` and `score_mod` as graphs, kept under keys for the op in graphs.

A graph has tensors, numbers and strings but no functions. So Dynamo traces each function to a graph
of its own, with its captures as further inputs. This module keeps that graph under a key computed
from its code; the op takes the key and the functions' captures. Since equal code has equal keys,
caches of compiled graphs on disk stay valid in other processes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from symm_cp.ops.attention.flex.mask import Modifier


@dataclass(frozen=True)
class TracedModifier:
    """A modifier as a graph; `are_tensors` says which of its captures are tensors."""

    graph: GraphModule
    are_tensors: tuple[bool, ...]

    def bound(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Modifier:
        """Returns the function of scores and indices alone."""
        remaining: tuple[Any, Any] = (iter(numbers), iter(tensors))
        captured = [next(remaining[is_tensor]) for is_tensor in self.are_tensors]
        return lambda *indices: self.graph(*indices, *captured)


_modifiers: dict[str, tuple[TracedModifier | None, TracedModifier | None]] = {}


def keep_modifiers(
    score_mod: GraphModule | None,
    score_captured: Sequence[Any],
    mask_mod: GraphModule | None,
    mask_captured: Sequence[Any],
) -> str:
    """Keeps traced modifiers (None: there is none) and returns their key."""
    both = _traced(score_mod, score_captured), _traced(mask_mod, mask_captured)
    key = hashlib.sha256("\n".join(map(_text, both)).encode()).hexdigest()[:32]
    _modifiers.setdefault(key, both)
    return key


def kept_modifiers(op: str, key: str) -> tuple[TracedModifier | None, TracedModifier | None]:
    """Returns the `score_mod` and `mask_mod` of a key; `RuntimeError` if none are kept."""
    if key not in _modifiers:
        raise RuntimeError(
            f"{op}: no mask_mod or score_mod {key!r} in this process: a graph that another process "
            "compiled cannot be loaded, compile the function again"
        )
    return _modifiers[key]


def _traced(graph: GraphModule | None, captured: Sequence[Any]) -> TracedModifier | None:
    if graph is None:
        return None
    are_tensors = tuple(isinstance(value, torch.Tensor) for value in captured)
    for value, is_tensor in zip(captured, are_tensors, strict=True):
        if not is_tensor and not isinstance(value, int | torch.SymInt):
            raise NotImplementedError(
                f"flex_attention: mask_mod or score_mod captures a {type(value).__name__} whose "
                "value is unknown to the compiler, which is not supported"
            )
    return TracedModifier(_without_metadata(graph), are_tensors)


def _without_metadata(graph_module: GraphModule) -> GraphModule:
    """Returns a copy without the compiler's metadata on its nodes."""
    copy = Graph()
    copy.output(copy.graph_copy(graph_module.graph, {}))
    for node in copy.nodes:
        node.meta.clear()
    return GraphModule(graph_module, copy)


def _text(traced: TracedModifier | None) -> str:
    if traced is None:
        return "-"
    if any(node.op in ("get_attr", "call_module") for node in traced.graph.graph.nodes):
        return uuid.uuid4().hex  # constants that the code does not show
    return f"{traced.graph.code}{traced.are_tensors}"
