"""The ways to spread a model over ranks, all from the same dense model.

Between blocks each rank holds a part of the sequence, inside a block a part of the features:

| variant | how a block gathers its input and scatters its output |
|---|---|
| `unfused` | collectives of torch before the first and after the last linear |
| `fused` | in the linears, by the styles of `symm_cp.tensor_parallel` |
| `compute alone` | not at all: ready-made tensors of the right shapes stand in |

The last one's results mean nothing; its time is what the others' would be with free communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from symm_cp.demo.model import Transformer
from symm_cp.memory import group_name
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter
from symm_cp.tensor_parallel import FusedColwiseGroup, FusedRowwiseParallel

_BY_ROWS = ("wq", "wk", "wv", "w1", "w3")
_BY_COLUMNS = ("wo", "w2")

Exchange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A model spread over ranks, and how gradients of what is replicated are summed."""

    name: str
    model: Transformer
    all_reduce: Exchange

    def replicated(self) -> list[nn.Parameter]:
        """The parameters outside of blocks' linears: each rank's see a part of the sequence."""
        split = tuple(f".{name}.weight" for name in (*_BY_ROWS, *_BY_COLUMNS))
        return [p for name, p in self.model.named_parameters() if not name.endswith(split)]

    def sum_gradients(self) -> None:
        """Sums the gradients of the replicated parameters over the ranks, all in one exchange."""
        grads = [p.grad for p in self.replicated() if p.grad is not None]
        total = self.all_reduce(torch.cat([grad.flatten() for grad in grads]))
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def dense(model: Transformer) -> Variant:
    """The whole model in one process."""
    return Variant("one process", copy.deepcopy(model), lambda total: total)


def fused(model: Transformer, group: dist.ProcessGroup) -> Variant:
    """Communication inside the matmuls."""
    model = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
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
    name = group_name(group)
    return Variant(
        "fused", model, lambda total: torch.ops.symm_mem.one_shot_all_reduce(total, "sum", name)
    )


def unfused(model: Transformer, group: dist.ProcessGroup) -> Variant:
    """Communication by torch's functional collectives, between the matmuls."""

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return unfused_all_gather(shard, 0, group.group_name)

    def scatter(full: torch.Tensor) -> torch.Tensor:
        return unfused_reduce_scatter(full, "sum", 0, group.group_name)

    def all_reduce(total: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(total, group=group)
        return total

    model = _keep_part(copy.deepcopy(model), group)
    for block in _blocks(model):
        _exchange_around(block, (gather, scatter), (scatter, gather))
    return Variant("unfused", model, all_reduce)


def compute_alone(model: Transformer, group: dist.ProcessGroup) -> Variant:
    """The same computation with free communication."""
    model = _keep_part(copy.deepcopy(model), group)
    for block in _blocks(model):
        first, last = _StandIn(group), _StandIn(group)
        _exchange_around(block, (first.gather, first.scatter), (last.scatter, last.gather))
    return Variant("compute alone", model, lambda total: total)


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


class _Exchanged(torch.autograd.Function):
    """One exchange forward, the other for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Exchange, backward: Exchange) -> torch.Tensor:
        ctx.backward_exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_exchange(grad), None, None


def _exchange_around(
    block: nn.Module, inward: tuple[Exchange, Exchange], outward: tuple[Exchange, Exchange]
) -> None:
    """Adds an exchange, and the one of its gradient, before and after a block."""
    block.register_forward_pre_hook(
        lambda _, inputs: (_Exchanged.apply(inputs[0], *inward), *inputs[1:])
    )
    block.register_forward_hook(lambda _, inputs, output: _Exchanged.apply(output, *outward))


def _blocks(model: Transformer) -> list[nn.Module]:
    return [part for layer in model.layers for part in (layer.attention, layer.feed_forward)]


def _keep_part(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Cuts the weights of the blocks down to this rank's parts."""
    for block in _blocks(model):
        for name, linear in block.named_children():
            assert isinstance(linear, nn.Linear)
            dim = 0 if name in _BY_ROWS else 1
            part = linear.weight.detach().chunk(group.size(), dim)[group.rank()]
            linear.weight = nn.Parameter(part.contiguous().clone())
    return model
