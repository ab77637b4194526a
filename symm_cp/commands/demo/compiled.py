"""The variants of `symm-cp demo --compile`: torch's collectives, fused by torch.compile or not.

The model does not use symm_cp: the passes of `symm_cp.inductor` find the collectives to fuse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

from symm_cp import inductor
from symm_cp.commands.demo.model import Transformer, attend
from symm_cp.commands.demo.sequence import Attend
from symm_cp.commands.demo.variants import ModelVariant, RankGrid, blocks, keep_part
from symm_cp.commands.harness.paired import FUSED, unfused_over
from symm_cp.context_parallel import HeadTail

# Renamed in torch 2.13, where the old names warn.
_gather: Callable[..., torch.Tensor] = (
    getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
)
_scatter: Callable[..., torch.Tensor] = (
    getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
)


def unfused(model: Transformer, grid: RankGrid) -> ModelVariant:
    """Returns the model compiled by torch alone."""
    return _variant(unfused_over(grid.backend), model, grid, None)


def fused(model: Transformer, grid: RankGrid) -> ModelVariant:
    """Returns the model compiled with the passes; a collective that stays unfused raises."""
    passes = inductor.compile_options(inductor.Options(strict=True))
    return _variant(FUSED, model, grid, passes)


def _variant(
    name: str, model: Transformer, grid: RankGrid, passes: dict[str, Any] | None
) -> ModelVariant:
    model = keep_part(copy.deepcopy(model), grid.tensor)
    group = grid.tensor
    if group.size() > 1:
        for block in blocks(model):
            _exchange_around(block, group)
    for layer in model.layers:
        layer.attention.attend = _attend(grid.context, grid.layout)
    model.compile(options=passes)

    def all_reduce(total: torch.Tensor, over: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(total, group=over)
        return total

    return ModelVariant(name, model, all_reduce)


def _exchange_around(block: nn.Module, group: dist.ProcessGroup) -> None:
    block.register_forward_pre_hook(lambda _, inputs: (_gather(inputs[0], 0, group), *inputs[1:]))
    block.register_forward_hook(lambda _, inputs, output: _scatter(output, "sum", 0, group))


def _attend(group: dist.ProcessGroup, layout: HeadTail) -> Attend:
    """Returns attention that gathers keys and values, with a mask of this rank's positions."""
    if group.size() == 1:
        return attend
    spans = [layout.layout.spans(rank) for rank in range(group.size())]
    rank = group.rank()

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = _gather(k, 2, group), _gather(v, 2, group)
        # The mask is computed in the graph, where the pass can recognise that it is causal.
        positions = [
            torch.cat([torch.arange(span.start, span.start + span.length) for span in rank_spans])
            for rank_spans in spans
        ]
        visible = positions[rank][:, None] >= torch.cat(positions)
        return F.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True)

    return masked
