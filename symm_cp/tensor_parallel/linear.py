"""What `nn.Linear` becomes: the same parameters, as DTensors, and a forward that communicates.

Activations are (B, S, K) or of other shapes with the features last, a weight is (N, K) as in
`nn.Linear`, W is the world size. `x_shard` has S / W of the sequence and all features, `x_part` the
whole sequence and this rank's part of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from symm_cp.memory import group_name
from symm_cp.ops.matmul import all_gather_matmul, matmul_reduce_scatter
from symm_cp.tensor_parallel.shared_gather import SharedGather


class _SumGradient(torch.autograd.Function):
    """The identity; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.symm_mem.one_shot_all_reduce(grad.contiguous(), "sum", ctx.group), None


def _sequence_dim(who: str, dim: int, x: torch.Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{who}: sequence_dim={dim} is out of range for a {x.dim()}-D input")
    if dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"{who}: sequence_dim={dim} is the last dimension of an input of shape "
            f"{list(x.shape)}, which holds the features"
        )
    return dim % x.dim()


def _local_input(who: str, x: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> torch.Tensor:
    """Returns this rank's part of the input, which must be sharded along `dim`, `size` features."""
    if isinstance(x, DTensor):
        wanted = (Shard(dim),)
        given = tuple(Shard(p.dim % x.dim()) if isinstance(p, Shard) else p for p in x.placements)
        if given != wanted or x.device_mesh != mesh:
            raise ValueError(
                f"{who}: the input is a DTensor placed {x.placements} on {x.device_mesh}, "
                f"needs {wanted} on {mesh}"
            )
        x = x.to_local()
    if x.shape[-1] != size:
        raise ValueError(
            f"{who}: an input of shape {list(x.shape)} has {x.shape[-1]} features on this rank, "
            f"needs {size}"
        )
    return x


class FusedColwiseLinear(nn.Linear):
    """A linear with its output features spread over the ranks, fed with a sequence shard.

    Same result as::

        x = all_gather_tensor(x_shard, sequence_dim, group)
        x_part = F.linear(x, weight.to_local(), bias.to_local())

    Made by the styles, not by its constructor.
    """

    sequence_dim: int
    shared: SharedGather | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S, N / W) for a shard (B, S / W, K); errors as the fused op's."""
        if self.shared is None:
            return gather_and_apply(input, [self])[0]
        return self.shared.take(self, input)


def gather_and_apply(
    x_shard: torch.Tensor, linears: Sequence[FusedColwiseLinear]
) -> list[torch.Tensor]:
    """Returns the output of each linear for the gathered input, with one gather for all."""
    first = linears[0]
    mesh = first.weight.device_mesh
    dim = _sequence_dim("FusedColwiseParallel", first.sequence_dim, x_shard)
    x_shard = _local_input("FusedColwiseParallel", x_shard, mesh, dim, first.in_features)
    weights = [linear.weight.to_local().t() for linear in linears]
    outputs = all_gather_matmul(x_shard, weights, gather_dim=dim, group=group_name(mesh))
    biases = [None if linear.bias is None else linear.bias.to_local() for linear in linears]
    return [
        output if bias is None else output + bias.to(output.dtype)
        for output, bias in zip(outputs, biases, strict=True)
    ]


class FusedRowwiseLinear(nn.Linear):
    """A linear with its input features spread over the ranks, whose output is a sequence shard.

    Same result as::

        product = F.linear(x_part, weight.to_local())
        x_shard = reduce_scatter_tensor(product, "sum", sequence_dim, group) + bias

    Made by the style, not by its constructor.
    """

    sequence_dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S / W, N) for a part (B, S, K / W); errors as the fused op's."""
        mesh = self.weight.device_mesh
        dim = _sequence_dim("FusedRowwiseParallel", self.sequence_dim, input)
        weight = self.weight.to_local()
        features = input.dim() - 1
        x_part = _local_input("FusedRowwiseParallel", input, mesh, features, weight.shape[1])
        group = group_name(mesh)
        x_shard = matmul_reduce_scatter(x_part, weight.t(), scatter_dim=dim, group=group)
        if self.bias is None:
            return x_shard
        # Each rank adds the bias to its own part of the sequence, so its gradient is a part too.
        bias = _SumGradient.apply(self.bias.to_local(), group)
        return x_shard + bias.to(x_shard.dtype)
