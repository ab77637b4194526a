"""Overrides of torchtitan's inner attentions, to be named in `--override.imports`.

    --override.imports symm_cp.integrations.torchtitan.overrides.flex_attention

torchtitan's own trainer and models then attend on symm_cp: over the ranks of the mesh "cp" where
there is one, else each rank by itself. On CPU they can train at all only so, since torch has no
backward pass of flex attention there, and no `varlen_attn`.
"""

from __future__ import annotations

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
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from symm_cp.context_parallel.lengths import Balancers
from symm_cp.group.memory import GroupLike
from symm_cp.integrations import torchtitan as ours

__all__ = ["flex_attention", "varlen_attention"]


class _Attends:
    """Attends with symm_cp, in front of a class of torchtitan."""

    def over(self, group: GroupLike, load_balancer: Balancers | None = None) -> Callable[..., Any]:
        """From now on attends over a group; returns the forward pass."""
        forward = ours.attending(self, super().forward, group, load_balancer)  # type: ignore
        object.__setattr__(self, "_symm_cp_forward", forward)
        return forward

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attends over the mesh that was applied, in a group of this rank alone before."""
        forward = vars(self).get("_symm_cp_forward") or self.over(_alone())
        return forward(*args, **kwargs)


class SymmFlexAttention(_Attends, FlexAttention):
    """`flex_attention` with any mask and score modification."""

    # torchtitan reads the names of its arguments.
    forward = functools.wraps(FlexAttention.forward)(_Attends.forward)

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """The fields of torchtitan's."""


class SymmVarlenAttention(_Attends, VarlenAttention):
    """Attention within packed documents."""

    forward = functools.wraps(VarlenAttention.forward)(_Attends.forward)

    def __init__(self, config: VarlenAttention.Config) -> None:
        super(VarlenAttention, self).__init__()  # theirs loads a kernel for GPUs
        self.window_size = config.window_size

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The fields of torchtitan's."""


@override(target=FlexAttention.Config, description="flex attention on symm_cp")
def flex_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    """Replaces torchtitan's `FlexAttention`."""
    _take_over()
    return derive(config, SymmFlexAttention.Config)


@override(target=VarlenAttention.Config, description="varlen attention on symm_cp")
def varlen_attention(config: VarlenAttention.Config) -> VarlenAttention.Config:
    """Replaces torchtitan's `VarlenAttention`; its own models refuse it with a mesh "cp"."""
    _take_over()
    return derive(config, SymmVarlenAttention.Config)


def _alone() -> dist.ProcessGroup:
    """Returns a group of this rank, made once for each default group."""
    world = dist.group.WORLD
    if _GROUPS.get("world") is not world:
        _GROUPS["world"] = world
        _GROUPS["alone"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _GROUPS["alone"]


_GROUPS: dict[str, Any] = {}


# --- context parallelism ---


def _apply_cp_to_forward(attention_modules: Iterable[nn.Module], cp_mesh: GroupLike) -> None:
    modules = list(attention_modules)
    replaced = [module for module in modules if isinstance(module, _Attends)]
    for module in replaced:
        module.over(cp_mesh, ours.last_layout(cp_mesh))
    if others := [module for module in modules if module not in replaced]:
        _APPLY(others, cp_mesh)


_APPLY: Callable[..., None] = theirs.apply_cp_to_forward


def _take_over() -> None:
    """Has all that torchtitan has loaded cut batches, and apply a mesh, by symm_cp's functions."""
    for name, function in (
        ("apply_cp_to_forward", _apply_cp_to_forward),
        ("cp_shard", ours.cp_shard),
        ("prepare_context_parallel_input", ours.prepare_context_parallel_input),
    ):
        original = getattr(theirs, name)
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "torchtitan"]:
            if vars(module).get(name) is original:
                setattr(module, name, function)
