"""Corrects models that derive positions from a tensor's length: they use the whole sequence's.

T5 and similar models look up a bias by distance, for each pair of positions of a tensor; within a
region they look it up for each distance in the whole sequence instead, and attention takes these
biases directly. BART and others count the positions of a tensor and look up their embeddings.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from symm_cp.context_parallel.flex_hook import current_mode, spread_region
from symm_cp.context_parallel.load_balancers import positions_on
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.integrations.transformers.in_use import hold

_OP = "context_parallel"
_COMPUTE, _HAS_TABLE = "compute_bias", "has_relative_attention_bias"
_TABLE, _BUCKETS = "relative_attention_bias", "_relative_position_bucket"


def use_positions(stack: ExitStack, parts: Sequence[nn.Module]) -> None:
    """Has tables use the whole sequence's positions within a region, until the end of `stack`."""
    for module in parts:
        kind = module.__class__
        if hasattr(kind, _COMPUTE) and hasattr(kind, _BUCKETS):
            hold(stack, module, _COMPUTE, types.MethodType(_compute_bias, module))
            # False makes transformers allocate zeros for each pair of positions.
            hold(stack, module, _HAS_TABLE, True)
        for child in module._modules.values():
            if _takes_positions(child.__class__) and not _is_given_positions(kind):
                hook = child.register_forward_pre_hook(_with_positions, with_kwargs=True)  # type: ignore[union-attr]
                stack.callback(hook.remove)


# --- relative biases ---------------------------------------------------------------------------


def _compute_bias(
    self: Any,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int = 0,
) -> torch.Tensor:
    """Replaces `compute_bias`; within a region returns the biases by distance."""
    mode = current_mode()
    # Past tokens are in a cache; cross-attention, without a table, counts the tokens just added.
    if mode is not None and not (past_seen_tokens and hasattr(self, _TABLE)):
        return _by_distance(self, mode.region, query_length, key_length)
    if hasattr(self, _TABLE):
        lengths = (query_length, key_length)
        return type(self).compute_bias(self, *lengths, device, past_seen_tokens)  # type: ignore[no-any-return]
    shape = (1, self.n_heads, query_length, key_length)
    return torch.zeros(shape, device=device, dtype=self.q.weight.dtype)


def _by_distance(module: Any, region: ParallelRegion, queries: int, keys: int) -> torch.Tensor:
    """Returns the bias of each distance in the whole sequences: (H, S_q + S_k - 1).

    Empty if the module has no table. Entry [h, k - q + S_q - 1] is for query q and key k.
    """
    table = getattr(module, _TABLE, None)
    if table is None:
        return module.q.weight.new_empty(0)  # type: ignore[no-any-return]
    spread = region.layout(queries)
    of_keys = region.layout_of_keys(queries, keys)
    assert of_keys is not None
    distances = torch.arange(1 - spread.seq_length, of_keys.seq_length, device=table.weight.device)
    parameters = inspect.signature(module._relative_position_bucket).parameters
    options = {
        "bidirectional": not module.is_decoder,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    known = {name: value for name, value in options.items() if name in parameters}
    return table(module._relative_position_bucket(distances, **known)).t()  # type: ignore[no-any-return]


def bias_by_distance(name: str, position_bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a layer's bias in the form for attention; refuses a bias per pair of positions."""
    if position_bias is None or position_bias.numel() == 0:
        return None
    if position_bias.dim() != 2:
        raise NotImplementedError(
            f"{_OP}: {name} has a position_bias of this rank's part of the sequence: pass the "
            "model to context_parallel(model=...), and run the backward pass within it"
        )
    return position_bias


# --- embeddings of positions -------------------------------------------------------------------


def _is_given_positions(kind: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(kind.forward).parameters


@functools.cache
def _takes_positions(kind: Any) -> bool:
    """Tells whether modules of a class embed the positions of a tensor, or those passed to them."""
    if not issubclass(kind, nn.Embedding) or kind is nn.Embedding:
        return False
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    return names[0] in ("input_ids", "input_ids_shape") and "position_ids" in names


def _with_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
    region = spread_region()
    if region is None:
        return None
    like = args[0] if args else kwargs.get("input_ids", kwargs.get("input_ids_shape"))
    shape = like.shape if isinstance(like, torch.Tensor) else like
    balancer = region.layout(shape[1])
    if balancer.samples:
        raise NotImplementedError(
            f"{_OP}: {type(module).__name__} embeds the same positions for all samples, and "
            f"{balancer} has a layout for each"
        )
    device: Any = module.weight.device
    positions = (
        balancer.positions(region.rank, device=device)
        if torch.compiler.is_compiling()
        else positions_on(device, balancer, region.rank)
    )
    if region.is_padding(shape[1]):
        positions = positions.new_zeros(shape[1])
    return args[:2], {**kwargs, "position_ids": positions}
