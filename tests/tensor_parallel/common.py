"""Helpers of the tests of the styles.

B, S, K, N: batch, sequence, input and output features; W ranks. Every rank draws the same dense
tensors (the pool gives all ranks one seed) and compares its part with this part of dense results.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp.tensor_parallel import FusedColwiseGroup, FusedRowwiseParallel
from tests import reference

WORLD_SIZES = range(1, 5)
B, S, K, N = 3, 24, 36, 60  # S, K, N: multiples of 1 to 4


def part(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return x.tensor_split(group.size(), dim)[group.rank()]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def own(x: torch.Tensor, group: dist.ProcessGroup, dim: int | None) -> torch.Tensor:
    """This rank's part of activations along `dim`; all of them if it is None (replicated)."""
    return x if dim is None else part(x, group, dim)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(x: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


def weight_grad(
    grad: torch.Tensor, x: torch.Tensor, world_size: int, dim: int
) -> reference.Expected:
    """Returns grad^T @ x over all rows; each shard's product, along `dim`, may be rounded."""
    pairs = zip(grad.tensor_split(world_size, dim), x.tensor_split(world_size, dim), strict=True)
    products = [reference.matmul(g.flatten(0, -2).t(), a.flatten(0, -2)) for g, a in pairs]
    return reference.Expected(
        torch.stack([p.value for p in products]).sum(0),
        torch.stack([p.magnitude for p in products]).sum(0),
        sum(p.terms for p in products),
        torch.stack([p.value.abs() for p in products]).sum(0),
    )


class Recorder(TorchDispatchMode):
    """Names the ops that run inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def communicating(self) -> list[str]:
        namespaces = ("symm_mem::", "c10d::", "_c10d_functional", "c10d_functional")
        return [name for name in self.names if name.startswith(namespaces)]


class Block(nn.Module):
    """Gated feed-forward with biases and a norm, as a model author writes it."""

    def __init__(self, dim: int = K, hidden: int = N) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def fused_plan(dim: int | None = 1) -> dict[str, Any]:
    """`dim`: the sequence dimension that is split between the linears; None: it is not split."""
    layout = Replicate() if dim is None else Shard(dim)
    return {
        "": FusedColwiseGroup(("w1", "w3"), input_layouts=layout),
        "w2": FusedRowwiseParallel(output_layouts=layout),
    }


def fused_block(group: dist.ProcessGroup, dim: int | None = 1) -> tuple[Block, Block]:
    """Returns a dense block in float64, and the same in parallel."""
    dense = Block().double()
    block = copy.deepcopy(dense)
    return dense, parallelize_module(block, mesh_of(group), fused_plan(dim))


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Chains of sums of up to B * S terms in float64 err by some 1e-14; a missing or doubled term
    # is off by 1e-3 and more.
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def same_grads(model: nn.Module, dense: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        same(whole(parameter.grad), whole(dense.get_parameter(name).grad))
