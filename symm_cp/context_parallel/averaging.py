"""Finds the parameters whose gradients DDP or FSDP averages over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from symm_cp.context_parallel.inspectors import modules_of

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def averages(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether DDP or FSDP averages the gradients of a model over the ranks of a group."""
    if group.size() == 1:
        return False
    if any(is_averaged(module, parameter, group) for module, parameter in parameters(model)):
        return True
    return any(covers(wrapped, group) for wrapped in groups_of_wrappers(model))


def parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yields the trained parameters of a model, once each, and the modules that own them.

    Reshards parameters that FSDP2 has gathered for a forward pass only.
    """
    seen: set[int] = set()
    for module in modules_of(model):
        if "FSDPModule" in _names(module):
            sharded: Any = module
            sharded.reshard()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, parameter


def is_averaged(module: nn.Module, parameter: Any, group: dist.ProcessGroup) -> bool:
    """Whether FSDP2 reduces the gradient of a parameter over the ranks of a group."""
    managed = getattr(module, "_is_fsdp_managed_module", False)
    if not managed or not hasattr(parameter, "device_mesh"):
        return False
    ranks = set(parameter.device_mesh.mesh.flatten().tolist())
    return ranks.issuperset(dist.get_process_group_ranks(group))


def groups_of_wrappers(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """Yields the groups over which wrappers reduce gradients of plain parameters."""
    for module in modules_of(model):
        if not _names(module).isdisjoint(_WRAPPERS):
            wrapped: Any = module
            yield wrapped.process_group


_names_of: dict[type, frozenset[str]] = {}


def _names(module: nn.Module) -> frozenset[str]:
    """The names of a module's class and its bases."""
    kind = type(module)
    if kind not in _names_of:
        _names_of[kind] = frozenset(base.__name__ for base in kind.__mro__)
    return _names_of[kind]


def covers(wrapped: dist.ProcessGroup, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group are in the group of a wrapper."""
    ranks = set(dist.get_process_group_ranks(wrapped))
    return ranks.issuperset(dist.get_process_group_ranks(group))
