"""The variants of a model that is split over ranks, and how their ranks exchange activations.

| variant | how ranks sum products and gather logits |
|---|---|
| `unfused` | by torch's collectives |
| `fused` | inside the linears, by `symm_cp.tensor_parallel.apply`; with --compile, by the passes |
| `compute alone` | not at all |

The tokens of `compute alone` are meaningless; its time is what the others would take without
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.commands.harness.llama import Exchanges, Parts, sharing_weights
from symm_cp.tensor_parallel import apply

# Renamed in torch 2.13, where the old names warn.
_gather_into: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_gather_functional: Callable[..., torch.Tensor] = (
    getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
)


@dataclass(frozen=True)
class DecodeVariant:
    """A model, and the function that runs it: the model itself, or its compiled form."""

    name: str
    model: nn.Module
    run: Callable[..., Any]


def over(group: dist.ProcessGroup) -> Exchanges:
    """Returns torch's collectives as uncompiled programs call them."""

    def all_reduce(partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=group)
        return partial

    def all_gather(part: torch.Tensor) -> torch.Tensor:
        gathered = part.new_empty(group.size() * len(part), *part.shape[1:])
        _gather_into(gathered, part, group=group)
        return torch.cat(gathered.chunk(group.size()), -1)

    return Exchanges(all_reduce, all_gather)


def functional(group: dist.ProcessGroup) -> Exchanges:
    """Returns torch's functional collectives, which torch.compile can trace."""
    return Exchanges(
        lambda partial: funcol.all_reduce(partial, "sum", group),
        lambda part: _gather_functional(part, part.dim() - 1, group),
    )


def none(group: dist.ProcessGroup) -> Exchanges:
    """Returns exchanges without communication, with results of the right shapes."""
    size = group.size()
    return Exchanges(lambda partial: partial, lambda part: torch.cat([part] * size, -1))


def eager(name: str, model: nn.Module) -> DecodeVariant:
    """Returns a variant that runs uncompiled."""
    return DecodeVariant(name, model, model)


def compiled(name: str, model: nn.Module, passes: dict[str, Any] | None = None) -> DecodeVariant:
    """Returns a variant whose steps torch.compile compiles, with these passes."""
    return DecodeVariant(name, model, torch.compile(model, options=passes, dynamic=False))


def fused(parts: Parts, group: dist.ProcessGroup) -> nn.Module:
    """Returns the model as this package splits it, with communication inside the matmuls."""
    model = sharing_weights(parts.model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    # All ranks have the same weights: each keeps its own part without communication.
    apply(model, mesh, src_data_rank=None)
    parts.lend_to(model)
    return model
