"""Overrides of torchtitan's inner attentions, to be named in `--override.imports`.

    --override.imports symm_cp.integrations.torchtitan.overrides.flex_attention

torchtitan's own trainer and models then attend on symm_cp: over the ranks of the mesh "cp" if there
is one, else each rank alone. On CPU they need these overrides to train, since torch has no backward
pass of flex attention and no `varlen_attn` there.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed import context_parallel as theirs
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from symm_cp.context_parallel.lengths import Balancers
from symm_cp.group.memory import GroupLike
from symm_cp.integrations import torchtitan as ours

__all__ = ["flex_attention", "varlen_attention"]


class _Attends:
    """Makes a class of torchtitan attend with symm_cp, as its first base class."""

    def _symm_cp_over(
        self, group: GroupLike, load_balancer: Balancers | None = None
    ) -> Callable[..., Any]:
        """Makes the module attend over a group from now on; returns the forward pass."""
        forward = ours.attending(self, super().forward, group, load_balancer)  # type: ignore
        object.__setattr__(self, "_symm_cp_forward", forward)
        return forward

    def _symm_cp_attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attends over the applied mesh; without one, over `spmd_types`' "cp", or on this rank."""
        forward = vars(self).get("_symm_cp_forward")
        if forward is None:
            group = _shared_by_ranks()
            forward = (
                self._symm_cp_over(group, ours.last_layout(group))
                if group
                else self._symm_cp_over(_alone())
            )
        return forward(*args, **kwargs)


def _with_the_arguments_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward method with the signature of `original`, which torchtitan inspects."""

    @functools.wraps(original)
    def forward(self: _Attends, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._symm_cp_attend(*args, **kwargs)

    return forward


class SymmFlexAttention(_Attends, FlexAttention):
    """`flex_attention` with any mask and score modification."""

    forward = _with_the_arguments_of(FlexAttention.forward)

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """The same fields as torchtitan's `Config`."""


class SymmVarlenAttention(_Attends, VarlenAttention):
    """Attention within packed documents."""

    forward = _with_the_arguments_of(VarlenAttention.forward)

    def __init__(self, config: VarlenAttention.Config) -> None:
        super(VarlenAttention, self).__init__()  # torchtitan's own loads a kernel for GPUs
        self.window_size = config.window_size

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The same fields as torchtitan's `Config`."""


@override(target=FlexAttention.Config, description="flex attention on symm_cp")
def flex_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    """Replaces torchtitan's `FlexAttention`."""
    _take_over()
    return derive(config, SymmFlexAttention.Config, sharding_config=_in_parts(config))


@override(target=VarlenAttention.Config, description="varlen attention on symm_cp")
def varlen_attention(config: VarlenAttention.Config) -> VarlenAttention.Config:
    """Replaces torchtitan's `VarlenAttention`; torchtitan's models refuse it with a mesh "cp"."""
    _take_over()
    return derive(config, SymmVarlenAttention.Config, sharding_config=_in_parts(config))


def _alone() -> dist.ProcessGroup:
    """Returns a group of this rank alone, made once for each default group."""
    world = dist.group.WORLD
    if _GROUPS.get("world") is not world:
        _GROUPS["world"] = world
        _GROUPS["alone"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _GROUPS["alone"]


_GROUPS: dict[str, Any] = {}


# --- context parallelism ---


def _shared_by_ranks() -> dist.ProcessGroup | None:
    """Returns the ranks of "cp" in the mesh of torchtitan's `spmd_types`, if there are several."""
    mesh = current_spmd_mesh()
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group("cp")
    return group if group.size() > 1 else None


def _in_parts(config: Any) -> Any:
    """Returns the sharding of inputs that leaves keys and values in parts, like queries.

    torchtitan's `spmd_types` gathers them over "cp" before the module; here attention does.
    """
    sharding = config.sharding_config
    if sharding is None or get_spmd_backend() != "spmd_types":
        return sharding
    local_map = sharding.local_map
    if local_map is not None:
        gradients = local_map.in_grad_placements
        same = (gradients[0],) * len(gradients)
        local_map = dataclasses.replace(local_map, in_grad_placements=same)
    return dataclasses.replace(
        sharding, in_dst_shardings=sharding.in_src_shardings, local_map=local_map
    )


def _apply_cp_to_forward(attention_modules: Iterable[nn.Module], cp_mesh: GroupLike) -> None:
    modules = list(attention_modules)
    replaced = [module for module in modules if isinstance(module, _Attends)]
    for module in replaced:
        module._symm_cp_over(cp_mesh, ours.last_layout(cp_mesh))
    if others := [module for module in modules if module not in replaced]:
        _APPLY(others, cp_mesh)


_APPLY: Callable[..., None] = theirs.apply_cp_to_forward


def _take_over() -> None:
    """Makes all loaded modules of torchtitan cut batches and apply a mesh with symm_cp."""
    for name, function in (
        ("apply_cp_to_forward", _apply_cp_to_forward),
        ("cp_shard", ours.cp_shard),
        ("prepare_context_parallel_input", ours.prepare_context_parallel_input),
    ):
        original = getattr(theirs, name)
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "torchtitan"]:
            if vars(module).get(name) is original:
                setattr(module, name, function)
