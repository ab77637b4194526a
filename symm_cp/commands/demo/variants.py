"""The variants of a model spread over ranks, all made from the same dense model.

Between blocks each rank holds a part of the sequence, inside a block a part of the features:

| variant | how a block gathers its input and scatters its output |
|---|---|
| `unfused` | torch's collectives before the first and after the last linear |
| `fused` | inside the linears, by the styles of `symm_cp.tensor_parallel` |
| `compute alone` | not at all: it uses existing tensors of the right shapes |

The whole model, in one process, is trained with one thread, like each rank, and with the threads of
all ranks together.

With context parallelism, ranks that share a sequence have two chunks of it each, and attention
gathers keys and values as well: see `sequence.py`.

The results of `compute alone` are meaningless; its time is what the others would take without
communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from symm_cp.commands.demo import sequence
from symm_cp.commands.demo.model import Transformer
from symm_cp.commands.demo.sequence import Exchange, Exchanged
from symm_cp.commands.harness.paired import COMPUTE, FUSED, dense_with, unfused_over
from symm_cp.context_parallel import HeadTail
from symm_cp.group.memory import group_name
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter
from symm_cp.tensor_parallel import FusedColwiseGroup, FusedRowwiseParallel

_BY_ROWS = ("wq", "wk", "wv", "w1", "w3")
_BY_COLUMNS = ("wo", "w2")


@dataclass(frozen=True)
class RankGrid:
    """The groups of a rank: `tensor` shares features, `context` shares a sequence, `all` both."""

    backend: str
    all: dist.ProcessGroup
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    layout: HeadTail


@dataclass(frozen=True)
class ModelVariant:
    """A model, dense or spread over ranks, and how gradients are summed.

    `all_reduce` takes a tensor and the group to sum it over.
    """

    name: str
    model: Transformer
    all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

    def sum_gradients(self, grid: RankGrid) -> None:
        """Sums gradients over the ranks that hold different parts of the sequence.

        Gradients of parameters outside the blocks' linears are summed over all ranks. Linears are
        split over features: their gradients are summed over the ranks that share the sequence.
        Each sum is one all-reduce.
        """
        split = tuple(f".{name}.weight" for name in (*_BY_ROWS, *_BY_COLUMNS))
        named = list(self.model.named_parameters())
        self._sum([p for name, p in named if not name.endswith(split)], grid.all)
        if grid.context.size() > 1:
            self._sum([p for name, p in named if name.endswith(split)], grid.context)

    def _sum(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        grads = [_local(p.grad) for p in parameters if p.grad is not None]
        total = self.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dense(model: Transformer, threads: int = 1) -> ModelVariant:
    """Returns the whole model, for one process with this many threads."""
    return ModelVariant(dense_with(threads), copy.deepcopy(model), lambda total, _: total)


def fused(model: Transformer, grid: RankGrid) -> ModelVariant:
    """Returns the model with communication inside matmuls and attention."""
    model = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(grid.tensor, "cpu", mesh_dim_names=("tp",))
    head_dim = model.layers[0].attention.head_dim
    plan = {
        "layers.*.attention": FusedColwiseGroup(
            ("wq", "wk", "wv"), sequence_dim=0, multiple_of=head_dim
        ),
        "layers.*.attention.wo": FusedRowwiseParallel(sequence_dim=0),
        "layers.*.feed_forward": FusedColwiseGroup(("w1", "w3"), sequence_dim=0),
        "layers.*.feed_forward.w2": FusedRowwiseParallel(sequence_dim=0),
    }
    # All ranks have the same weights: each keeps its own part without communication.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for layer in model.layers:
        layer.attention.attend = sequence.fused(grid.context, grid.layout)
    return ModelVariant(
        FUSED,
        model,
        lambda total, group: torch.ops.symm_mem.one_shot_all_reduce(
            total, "sum", group_name(group)
        ),
    )


def unfused(model: Transformer, grid: RankGrid) -> ModelVariant:
    """Returns the model with torch's functional collectives between the matmuls."""
    name = grid.tensor.group_name

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return unfused_all_gather(shard, 0, name)

    def scatter(full: torch.Tensor) -> torch.Tensor:
        return unfused_reduce_scatter(full, "sum", 0, name)

    def all_reduce(total: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(total, group=group)
        return total

    model = keep_part(copy.deepcopy(model), grid.tensor)
    for block in blocks(model):
        _exchange_around(block, (gather, scatter), (scatter, gather))
    for layer in model.layers:
        layer.attention.attend = sequence.unfused(grid.context, grid.layout)
    return ModelVariant(unfused_over(grid.backend), model, all_reduce)


def compute_alone(model: Transformer, grid: RankGrid) -> ModelVariant:
    """Returns the model without communication."""
    group = grid.tensor
    model = keep_part(copy.deepcopy(model), group)
    for block in blocks(model):
        first, last = _StandIn(group), _StandIn(group)
        _exchange_around(block, (first.gather, first.scatter), (last.scatter, last.gather))
    for layer in model.layers:
        layer.attention.attend = sequence.compute_alone(grid.context, grid.layout)
    return ModelVariant(COMPUTE, model, lambda total, _: total)


class _StandIn:
    """Exchanges without communication, and without copies after the first gather."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        self._gathered: torch.Tensor | None = None

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        if self._gathered is None:
            self._gathered = torch.cat([shard.detach()] * self._world_size)
        return self._gathered.view_as(self._gathered)

    def scatter(self, full: torch.Tensor) -> torch.Tensor:
        size = full.shape[0] // self._world_size
        return full.narrow(0, self._rank * size, size)


def _exchange_around(
    block: nn.Module, inward: tuple[Exchange, Exchange], outward: tuple[Exchange, Exchange]
) -> None:
    """Adds exchanges before and after a block, each with the exchange of its gradient."""
    block.register_forward_pre_hook(
        lambda _, inputs: (Exchanged.apply(inputs[0], *inward), *inputs[1:])
    )
    block.register_forward_hook(lambda _, inputs, output: Exchanged.apply(output, *outward))


def blocks(model: Transformer) -> list[nn.Module]:
    """Returns the attention and feed-forward modules."""
    return [part for layer in model.layers for part in (layer.attention, layer.feed_forward)]


def keep_part(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Replaces the weights of the blocks by this rank's parts."""
    for block in blocks(model):
        for name, linear in block.named_children():
            assert isinstance(linear, nn.Linear)
            dim = 0 if name in _BY_ROWS else 1
            part = linear.weight.detach().chunk(group.size(), dim)[group.rank()]
            linear.weight = nn.Parameter(part.contiguous().clone())
    return model
