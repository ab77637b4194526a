"""Finds the parameters whose gradients DDP or FSDP reduces over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from symm_cp.context_parallel.inspectors import modules_of

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


@dataclass
class Reduction:
    """How the gradients of a model are reduced over a group."""

    #: The trained parameters whose gradients nothing reduces over the group.
    left: list[nn.Parameter] = field(default_factory=list)
    #: Whether DDP or FSDP averages gradients over the group.
    averages: bool = False


def reduction_of(model: nn.Module, group: dist.ProcessGroup) -> Reduction:
    """Returns how gradients are reduced. Reshards what FSDP2 gathered for a forward pass only."""
    found = Reduction()
    if group.size() == 1:
        return found
    ranks = dist.get_process_group_ranks(group)
    by_wrapper = False
    seen: set[int] = set()
    # One loop without calls of its own: it runs for all parts of a model in each step.
    for module in modules_of(model):
        part: Any = module
        names = _names_of.get(type(module)) or _names(type(module))
        if "FSDPModule" in names:
            part.reshard()
        elif not names.isdisjoint(_WRAPPERS):
            by_wrapper |= set(dist.get_process_group_ranks(part.process_group)).issuperset(ranks)
        managed = getattr(module, "_is_fsdp_managed_module", False)
        for parameter in module._parameters.values():
            if parameter is None or not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if managed and hasattr(parameter, "device_mesh"):
                mesh: Any = parameter.device_mesh
                if set(mesh.mesh.flatten().tolist()).issuperset(ranks):
                    found.averages = True
                    continue
            found.left.append(parameter)
    if by_wrapper:
        found.averages = True
        found.left.clear()
    return found


_names_of: dict[type, frozenset[str]] = {}


def _names(kind: type) -> frozenset[str]:
    """The names of a class and its bases."""
    names = _names_of[kind] = frozenset(base.__name__ for base in kind.__mro__)
    return names
