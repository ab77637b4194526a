"""The ways to spread a model over ranks, all from the same dense model.

Between blocks each rank holds a part of the sequence, inside a block a part of the features:

| variant | how a block gathers its input and scatters its output |
|---|---|
| `unfused` | collectives of torch before the first and after the last linear |
| `fused` | in the linears, by the styles of `symm_cp.tensor_parallel` |
| `compute alone` | not at all: ready-made tensors of the right shapes stand in |

With context parallelism the ranks that share a sequence each have two chunks of it, and attention
gathers keys and values as well: see `sequence.py`.

The last one's results mean nothing; its time is what the others' would be with free communication.
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

from symm_cp.context_parallel import HeadTail
from symm_cp.demo import sequence
from symm_cp.demo.model import Transformer
from symm_cp.demo.sequence import Exchange, Exchanged
from symm_cp.memory import group_name
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter
from symm_cp.tensor_parallel import FusedColwiseGroup, FusedRowwiseParallel

_BY_ROWS = ("wq", "wk", "wv", "w1", "w3")
_BY_COLUMNS = ("wo", "w2")


@dataclass(frozen=True)
class Ranks:
    """How the ranks are arranged: `tensor` shares features, `context` a sequence, `all` both."""

    all: dist.ProcessGroup
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    layout: HeadTail


@dataclass(frozen=True)
class Variant:
    """A model spread over ranks, and how gradients are summed.

    `all_reduce` takes a tensor and the group to sum it over.
    """

    name: str
    model: Transformer
    all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

    def sum_gradients(self, ranks: Ranks) -> None:
        """Sums gradients over the ranks that saw other parts of the sequence.

        The parameters outside of blocks' linears see a part of it on every rank, and what is split
        over features only on those that share the sequence. Each sum is one exchange.
        """
        split = tuple(f".{name}.weight" for name in (*_BY_ROWS, *_BY_COLUMNS))
        named = list(self.model.named_parameters())
        self._sum([p for name, p in named if not name.endswith(split)], ranks.all)
        if ranks.context.size() > 1:
            self._sum([p for name, p in named if name.endswith(split)], ranks.context)

    def _sum(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        grads = [_local(p.grad) for p in parameters if p.grad is not None]
        total = self.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dense(model: Transformer) -> Variant:
    """The whole model in one process."""
    return Variant("one process", copy.deepcopy(model), lambda total, _: total)


def fused(model: Transformer, ranks: Ranks) -> Variant:
    """Communication inside the matmuls and the attention."""
    model = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(ranks.tensor, "cpu", mesh_dim_names=("tp",))
    head_dim = model.layers[0].attention.head_dim
    plan = {
        "layers.*.attention": FusedColwiseGroup(
            ("wq", "wk", "wv"), sequence_dim=0, multiple_of=head_dim
        ),
        "layers.*.attention.wo": FusedRowwiseParallel(sequence_dim=0),
        "layers.*.feed_forward": FusedColwiseGroup(("w1", "w3"), sequence_dim=0),
        "layers.*.feed_forward.w2": FusedRowwiseParallel(sequence_dim=0),
    }
    # Every rank has the same weights already: it keeps its part of its own.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for layer in model.layers:
        layer.attention.attend = sequence.fused(ranks.context, ranks.layout)
    return Variant(
        "fused",
        model,
        lambda total, group: torch.ops.symm_mem.one_shot_all_reduce(
            total, "sum", group_name(group)
        ),
    )


def unfused(model: Transformer, ranks: Ranks) -> Variant:
    """Communication by torch's functional collectives, between the matmuls."""
    name = ranks.tensor.group_name

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return unfused_all_gather(shard, 0, name)

    def scatter(full: torch.Tensor) -> torch.Tensor:
        return unfused_reduce_scatter(full, "sum", 0, name)

    def all_reduce(total: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(total, group=group)
        return total

    model = keep_part(copy.deepcopy(model), ranks.tensor)
    for block in blocks(model):
        _exchange_around(block, (gather, scatter), (scatter, gather))
    for layer in model.layers:
        layer.attention.attend = sequence.unfused(ranks.context, ranks.layout)
    return Variant("unfused", model, all_reduce)


def compute_alone(model: Transformer, ranks: Ranks) -> Variant:
    """The same computation with free communication."""
    group = ranks.tensor
    model = keep_part(copy.deepcopy(model), group)
    for block in blocks(model):
        first, last = _StandIn(group), _StandIn(group)
        _exchange_around(block, (first.gather, first.scatter), (last.scatter, last.gather))
    for layer in model.layers:
        layer.attention.attend = sequence.compute_alone(ranks.context, ranks.layout)
    return Variant("compute alone", model, lambda total, _: total)


class _StandIn:
    """Takes no time: gathers what it gathered the first time, scatters its own part as it is."""

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
    """Adds an exchange, and the one of its gradient, before and after a block."""
    block.register_forward_pre_hook(
        lambda _, inputs: (Exchanged.apply(inputs[0], *inward), *inputs[1:])
    )
    block.register_forward_hook(lambda _, inputs, output: Exchanged.apply(output, *outward))


def blocks(model: Transformer) -> list[nn.Module]:
    """The attention and feed-forward modules."""
    return [part for layer in model.layers for part in (layer.attention, layer.feed_forward)]


def keep_part(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Cuts the weights of the blocks down to this rank's parts."""
    for block in blocks(model):
        for name, linear in block.named_children():
            assert isinstance(linear, nn.Linear)
            dim = 0 if name in _BY_ROWS else 1
            part = linear.weight.detach().chunk(group.size(), dim)[group.rank()]
            linear.weight = nn.Parameter(part.contiguous().clone())
    return model
