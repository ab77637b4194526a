"""Says who reduces which gradients over the ranks of a group: DDP, FSDP, the step, or nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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
    #: The ids of parameters whose gradients FSDP2 over other ranks divides as the program says.
    divided: set[int] = field(default_factory=set)
    #: Whether DDP or FSDP over other ranks reduces no gradients now: in `no_sync`.
    no_sync: bool = False
    #: Whether FSDP2 keeps gradients for a later backward pass.
    holds: bool = False


def reduction_of(model: nn.Module, group: dist.ProcessGroup) -> Reduction:
    """Returns how gradients are reduced. Reshards what FSDP2 gathered for a forward pass only."""
    found = Reduction()
    if group.size() == 1:
        return found
    ranks = dist.get_process_group_ranks(group)
    by_wrapper = False
    seen: set[int] = set()
    by_fsdp: set[int] = set()
    # One loop without calls of its own: it runs for all parts of a model in each step.
    for module in modules_of(model):
        part: Any = module
        names = _names_of.get(type(module)) or _names(type(module))
        if "FSDPModule" in names:
            part.reshard()
            by_fsdp |= _reduced_by(part, ranks, found)
        elif not names.isdisjoint(_WRAPPERS):
            if set(dist.get_process_group_ranks(part.process_group)).issuperset(ranks):
                by_wrapper = True
            else:
                found.no_sync |= not getattr(part, "require_backward_grad_sync", True)
                found.no_sync |= not getattr(part, "_sync_gradients", True)
        for parameter in module._parameters.values():
            if parameter is None or not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if id(parameter) in by_fsdp:
                found.averages = True
            else:
                found.left.append(parameter)
    if by_wrapper:
        found.averages = True
        found.left.clear()
    return found


def _reduced_by(part: Any, ranks: Sequence[int], found: Reduction) -> set[int]:
    """Returns the ids of parameters that an FSDP2 module reduces over ranks; notes the others'."""
    over_ranks: set[int] = set()
    state = part._get_fsdp_state()
    # Before torch 2.12 there is one group, or None.
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is None:
            continue
        found.holds |= not group.reduce_grads
        # Not `sharded_param`: before the first step FSDP2 does not know of loaded parameters.
        places = [each._module_info for each in group.fsdp_params]
        own = {id(place.module._parameters[place.param_name]) for place in places}
        if set(group.mesh_info.mesh.mesh.flatten().tolist()).issuperset(ranks):
            over_ranks |= own
        elif group.gradient_divide_factor is not None:
            found.divided |= own
    return over_ranks


def is_spread(parameter: Any, ranks: Sequence[int]) -> bool:
    """Whether ranks hold different parts of a DTensor, such as experts that they divide.

    Such parts get tokens of all ranks, so their gradients are complete.
    """
    mesh = parameter.device_mesh
    held = torch.cat([(mesh.mesh == rank).nonzero() for rank in ranks])
    return any(
        placement.is_shard() and bool((place != place[0]).any())
        for placement, place in zip(parameter.placements, held.T, strict=True)
    )


_names_of: dict[type, frozenset[str]] = {}


def _names(kind: type) -> frozenset[str]:
    """The names of a class and its bases."""
    names = _names_of[kind] = frozenset(base.__name__ for base in kind.__mro__)
    return names
