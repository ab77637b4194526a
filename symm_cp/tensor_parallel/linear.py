"""The linears that styles make of `nn.Linear`: parameters are DTensors, `forward` communicates.

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
from symm_cp.ops.common import tells_peers
from symm_cp.ops.matmul import all_gather_matmul, matmul_reduce_scatter
from symm_cp.tensor_parallel.shared_gather import SharedGather


class _SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.ops.symm_mem.one_shot_all_reduce(grad_out.contiguous(), "sum", ctx.group)
        return total, None


def _sequence_dim(style: str, dim: int, x: torch.Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{style}: sequence_dim={dim} is out of range for a {x.dim()}-D input")
    if dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"{style}: sequence_dim={dim} is the last dimension of an input of shape "
            f"{list(x.shape)}, which holds the features"
        )
    return dim % x.dim()


def _local_input(
    style: str, x: torch.Tensor, mesh: DeviceMesh, dim: int, features: int
) -> torch.Tensor:
    """Returns this rank's part of an input that must be sharded along `dim`."""
    if isinstance(x, DTensor):
        required = (Shard(dim),)
        placements = tuple(
            Shard(p.dim % x.dim()) if isinstance(p, Shard) else p for p in x.placements
        )
        if placements != required or x.device_mesh != mesh:
            raise ValueError(
                f"{style}: the input is a DTensor placed {x.placements} on {x.device_mesh}, "
                f"must be placed {required} on {mesh}"
            )
        x = x.to_local()
    if x.shape[-1] != features:
        raise ValueError(
            f"{style}: the input of shape {list(x.shape)} has {x.shape[-1]} features on this rank, "
            f"must have {features}"
        )
    return x


class FusedColwiseLinear(nn.Linear):
    """A linear whose output features are split over the ranks; its input is a sequence shard.

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
    group = group_name(linears[0].weight.device_mesh)
    apply = _colwise_telling_peers if x_shard.device.type == "cpu" else _colwise
    return apply(x_shard, linears, group)


def _colwise(
    x_shard: torch.Tensor, linears: Sequence[FusedColwiseLinear], group: str
) -> list[torch.Tensor]:
    first, style = linears[0], "FusedColwiseParallel"
    dim = _sequence_dim(style, first.sequence_dim, x_shard)
    x_shard = _local_input(style, x_shard, first.weight.device_mesh, dim, first.in_features)
    weights = [linear.weight.to_local().t() for linear in linears]
    outputs = all_gather_matmul(x_shard, weights, gather_dim=dim, group=group)
    biases = [None if linear.bias is None else linear.bias.to_local() for linear in linears]
    return [
        output if bias is None else output + bias.to(output.dtype)
        for output, bias in zip(outputs, biases, strict=True)
    ]


# Peers may already wait in the op for a rank that raises in a check before it. Only for CPU: calls
# on other devices are not counted on the channel that reports such an error.
_colwise_telling_peers = tells_peers(_colwise)


class FusedRowwiseLinear(nn.Linear):
    """A linear whose input features are split over the ranks; its output is a sequence shard.

    Same result as::

        product = F.linear(x_part, weight.to_local())
        x_shard = reduce_scatter_tensor(product, "sum", sequence_dim, group) + bias

    Made by the style, not by its constructor.
    """

    sequence_dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S / W, N) for a part (B, S, K / W); errors as the fused op's."""
        group = group_name(self.weight.device_mesh)
        apply = _rowwise_telling_peers if input.device.type == "cpu" else _rowwise
        return apply(input, self, group)


def _rowwise(x_part: torch.Tensor, linear: FusedRowwiseLinear, group: str) -> torch.Tensor:
    mesh, weight, style = (
        linear.weight.device_mesh,
        linear.weight.to_local(),
        "FusedRowwiseParallel",
    )
    dim = _sequence_dim(style, linear.sequence_dim, x_part)
    x_part = _local_input(style, x_part, mesh, x_part.dim() - 1, weight.shape[1])
    x_shard = matmul_reduce_scatter(x_part, weight.t(), scatter_dim=dim, group=group)
    if linear.bias is None:
        return x_shard
    # Each rank adds the bias to its own part of the sequence, so its gradient is a part too.
    bias = _SumGradient.apply(linear.bias.to_local(), group)
    return x_shard + bias.to(x_shard.dtype)


_rowwise_telling_peers = tells_peers(_rowwise)
