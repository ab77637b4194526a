"""The linears that styles make of `nn.Linear`: parameters are DTensors, `forward` communicates.

Activations are (B, S, K) or of other shapes with the features last, a weight is (N, K) as in
`nn.Linear`, W is the world size. `x_shard` has S / W of the sequence and all features, `x_part` the
whole sequence and this rank's part of the features, `x` all of both. Between linears activations
are sharded by sequence, or replicated: then `sequence_dim` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves

from symm_cp.ops import autocast
from symm_cp.ops.direct import decoding_linear
from symm_cp.ops.error_reports import reports_to_peers
from symm_cp.ops.matmul import all_gather_matmul, matmul_reduce_scatter
from symm_cp.tensor_parallel import replicated
from symm_cp.tensor_parallel.features import Features
from symm_cp.tensor_parallel.quantised import is_quantised, local_of
from symm_cp.tensor_parallel.shared_gather import SharedGather
from symm_cp.tensor_parallel.whole import Seat, gather
from symm_cp.tensors.alignment import contiguous_strides


def _sequence_dim(style: str, dim: int, x: torch.Tensor) -> int:
    """Returns the sequence dimension of activations, as a number >= 0."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{style}: sequence_dim={dim} is out of range for a {x.dim()}-D input")
    if dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"{style}: sequence_dim={dim} is the last dimension of an input of shape "
            f"{list(x.shape)}, which holds the features"
        )
    return dim % x.dim()


def output_placement(
    style: str, sequence_dim: int | None, x: torch.Tensor, ranks: int
) -> Placement:
    """Returns the placement of an output, given a tensor of its whole sequence."""
    placement = _placement(style, sequence_dim, x)
    if isinstance(placement, Shard) and x.shape[placement.dim] % ranks != 0:
        raise ValueError(
            f"{style}: the sequence of length {x.shape[placement.dim]} is not divisible by world "
            f"size {ranks}; pad it, or keep it whole with output_layouts=Replicate()"
        )
    return placement


def local_part(
    style: str, subject: str, x: torch.Tensor, mesh: DeviceMesh, placement: Placement
) -> torch.Tensor:
    """Returns a plain tensor, or this rank's part of a DTensor, which must be placed so."""
    if not isinstance(x, DTensor):
        return x
    required = (placement,)
    placements = tuple(Shard(p.dim % x.dim()) if isinstance(p, Shard) else p for p in x.placements)
    if placements != required or x.device_mesh != mesh:
        raise ValueError(
            f"{style}: {subject} a DTensor placed {x.placements} on {x.device_mesh}, must be "
            f"placed {required} on {mesh}"
        )
    return x.to_local()


def _local_input(
    style: str, x: torch.Tensor, mesh: DeviceMesh, placement: Placement, features: int
) -> torch.Tensor:
    """Returns this rank's part of an input, whose shape it checks."""
    x = local_part(style, "the input is", x, mesh, placement)
    if x.dim() < 2:
        raise ValueError(
            f"{style}: the input must have at least 2 dimensions, has shape {list(x.shape)}"
        )
    if x.shape[-1] != features:
        raise ValueError(
            f"{style}: the input of shape {list(x.shape)} has {x.shape[-1]} features on this rank, "
            f"must have {features}"
        )
    return x


def as_autocast_casts(*tensors: Any) -> tuple[Any, ...]:
    """Casts tensors as autocast casts operands of matmuls, for ops that autocast does not cast.

    Casts nothing where weights are quantised: their own code converts them and multiplies.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or any(map(is_quantised, tree_leaves(tensors))):
        return tensors
    return autocast.cast(tensors, device)


def _plain_parameters(
    linear: FusedColwiseLinear | FusedRowwiseLinear, x: torch.Tensor, features: int
) -> tuple[Any, Any] | None:
    """Returns this rank's weight and bias if the linear has nothing to do but call its op.

    Generation, token by token, uses this where `decoding_linear` does not apply: compiled, or with
    quantised weights. `features` is the number of features that the input must have.
    """
    if (
        torch.is_grad_enabled()
        or not linear.calls_op
        or isinstance(x, DTensor)
        or x.dim() < 2
        or x.shape[-1] != features
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    return local_of(linear.weight), local_of(linear.bias)


class FusedColwiseLinear(nn.Linear):
    """A linear whose output features are split over the ranks.

    Same result as::

        x = all_gather_tensor(x_shard, sequence_dim, group)  # unless it is replicated
        x_part = F.linear(x, weight.to_local(), bias.to_local())

    Made by the styles, not by its constructor.
    """

    features: Features
    group: str  # the mesh of a DTensor may be an equal one, with another group
    sequence_dim: int | None
    gathers_output: bool
    local_output: bool
    calls_op: bool  # its op can take the weight and the input as they are
    shared: SharedGather | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S, N / W) for (B, S / W, K) or (B, S, K); errors as the fused op's."""
        part = None
        if self.calls_op and not torch.compiler.is_dynamo_compiling():
            part = decoding_linear()(self._parameters, input, self.in_features, None)
        if part is None and (plain := _plain_parameters(self, input, self.in_features)):
            part = replicated.linear(input, *plain)
        if part is not None:
            return _output(part, self.weight.device_mesh, self) if self.gathers_output else part
        # Without gradients, a replicated input has nothing to share.
        if self.shared is None or (self.sequence_dim is None and not torch.is_grad_enabled()):
            return gather_and_apply(input, [self])[0]
        return self.shared.take(self, input)


def gather_and_apply(x: torch.Tensor, linears: Sequence[FusedColwiseLinear]) -> list[torch.Tensor]:
    """Returns the output of each linear, with one gather of the input for all of them.

    A replicated input is not gathered: its gradients are summed once.
    """
    first = linears[0]
    mesh, group = first.weight.device_mesh, first.group
    check = _check_colwise_reporting_to_peers if x.device.type == "cpu" else _check_colwise
    x = check(x, first, group)
    weights = [linear.features.own(local_of(linear.weight), 0, group) for linear in linears]
    biases = [_own_bias(linear) for linear in linears]
    if first.sequence_dim is None:
        x, weights, biases = as_autocast_casts(x, weights, biases)
        outputs = replicated.columns(x, weights, biases, group)
    else:
        transposed = [weight.t() for weight in weights]
        products = all_gather_matmul(x, transposed, gather_dim=first.sequence_dim, group=group)
        outputs = [
            product if bias is None else product + bias.to(product.dtype)
            for product, bias in zip(products, biases, strict=True)
        ]
    return [_output(output, mesh, linear) for output, linear in zip(outputs, linears, strict=True)]


def _output(part: torch.Tensor, mesh: DeviceMesh, linear: FusedColwiseLinear) -> torch.Tensor:
    """Gathers this rank's features of an output and makes it a DTensor, as the linear requires."""
    features = linear.features
    if linear.gathers_output:
        sizes = features.computed.sizes
        whole_output = gather(part, -1, Seat(linear.group, features.rank, len(sizes)), sizes)
        if linear.local_output:
            return whole_output
        return DTensor.from_local(whole_output, mesh, [Replicate()], run_check=False)
    if linear.local_output:
        return part
    whole = torch.Size([*part.shape[:-1], features.length])
    strides = contiguous_strides(whole)
    # A gather along the sequence may give its result other strides; DTensor relies on `strides`.
    return DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(part.dim() - 1)],
        run_check=False,
        shape=whole,
        stride=strides,
    )


def _own_bias(linear: FusedColwiseLinear) -> torch.Tensor | None:
    bias = local_of(linear.bias)
    return None if bias is None else linear.features.own(bias, 0, linear.group)


def _placement(style: str, sequence_dim: int | None, x: torch.Tensor) -> Placement:
    return Replicate() if sequence_dim is None else Shard(_sequence_dim(style, sequence_dim, x))


def _check_colwise(x: torch.Tensor, linear: FusedColwiseLinear, group: str) -> torch.Tensor:
    """Returns this rank's part of the input."""
    style = "FusedColwiseParallel"
    placement = _placement(style, linear.sequence_dim, x)
    return _local_input(style, x, linear.weight.device_mesh, placement, linear.in_features)


# Peers may already wait in an op for a rank that raises in a check before it. Only for CPU: calls
# on other devices are not counted on the channel that reports such an error.
_check_colwise_reporting_to_peers = reports_to_peers(_check_colwise)


class FusedRowwiseLinear(nn.Linear):
    """A linear whose input features are split over the ranks; their products are summed.

    Same result as::

        product = F.linear(x_part, weight.to_local())
        x_shard = reduce_scatter_tensor(product, "sum", sequence_dim, group) + bias
        x = all_reduce(product, "sum", group) + bias  # where the output is replicated

    Made by the style, not by its constructor.
    """

    features: Features
    group: str  # the mesh of a DTensor may be an equal one, with another group
    sequence_dim: int | None
    local_output: bool
    calls_op: bool  # its op can take the weight and the input as they are

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns (B, S / W, N) or (B, S, N) for (B, S, K / W); errors as the fused op's."""
        group = self.group
        if self.calls_op and not torch.compiler.is_dynamo_compiling():
            output = decoding_linear()(self._parameters, input, self.features.count, group)
            if output is not None:
                return output
        if plain := _plain_parameters(self, input, self.features.count):
            weight, bias = plain
            return replicated.sum_linear(input, weight, bias, group)
        mesh, bias = self.weight.device_mesh, local_of(self.bias)
        check = _check_rowwise_reporting_to_peers if input.device.type == "cpu" else _check_rowwise
        x_part, placement = check(input, self, group)
        weight = self.features.own(local_of(self.weight), 1, group)
        if self.sequence_dim is None:
            x_part, weight, bias = as_autocast_casts(x_part, weight, bias)
            output = replicated.sum_linear(x_part, weight, bias, group)
        else:
            dim = self.sequence_dim
            output = matmul_reduce_scatter(x_part, weight.t(), scatter_dim=dim, group=group)
            if bias is not None:
                # Each rank adds the bias to its part of the sequence: its gradient is a part, too.
                output = output + replicated.copy(bias, group).to(output.dtype)
        if self.local_output:
            return output
        return DTensor.from_local(output, mesh, [placement], run_check=False)


def _check_rowwise(
    x_part: torch.Tensor, linear: FusedRowwiseLinear, group: str
) -> tuple[torch.Tensor, Placement]:
    """Returns this rank's part of the input, and the output's placement."""
    style, mesh = "FusedRowwiseParallel", linear.weight.device_mesh
    ranks = len(linear.features.computed.sizes)
    placement = output_placement(style, linear.sequence_dim, x_part, ranks)
    own = _local_input(style, x_part, mesh, Shard(x_part.dim() - 1), linear.features.count)
    return own, placement


_check_rowwise_reporting_to_peers = reports_to_peers(_check_rowwise)
