"""`enable_parallelism` of diffusers' models: on machines without an accelerator, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.device_mesh import init_device_mesh

from symm_cp import accelerators
from symm_cp.integrations.diffusers.spread import spread_of

_OP = "enable_parallelism"
_CPU = torch.device("cpu")

# Models whose plan does not cut once at the beginning and gather once at the end, and the reason.
_WITHOUT_GRADIENTS = {
    "HeliosTransformer3DModel": "cuts and gathers the sequence in every block",
}


def _context_parallel(config: Any) -> ContextParallelConfig | None:
    if isinstance(config, ContextParallelConfig):
        return config
    return getattr(config, "context_parallel_config", None)


def checking(enable_parallelism: Callable[..., None]) -> Callable[..., None]:
    """Wraps `enable_parallelism` to refuse models whose attention ignores other ranks."""

    @functools.wraps(enable_parallelism)
    def enabled(self: ModelMixin, *, config: Any, cp_plan: Any = None) -> None:
        if _context_parallel(config) is not None:
            _check_processors(self)
        enable_parallelism(self, config=config, cp_plan=cp_plan)
        _find_parameters(self)
        if _context_parallel(config) is not None and type(self).__name__ in _WITHOUT_GRADIENTS:
            self.register_forward_pre_hook(_refuse_gradients)

    return enabled


def _refuse_gradients(model: ModelMixin, args: tuple[Any, ...]) -> None:
    """Raises if the sum of gradients over ranks would differ from the gradients of one process."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        name = type(model).__name__
        raise NotImplementedError(
            f"{_OP}: {name} {_WITHOUT_GRADIENTS[name]}: gradients would be wrong; call it under "
            "torch.no_grad()"
        )


def _find_parameters(model: ModelMixin) -> None:
    """Makes the hooks that cut sequences look up parameters now: Dynamo cannot trace the lookup."""
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if isinstance(hook, ContextParallelSplitHook):
                names = list(inspect.signature(type(module).forward).parameters)[1:]  # not self
                indices = {name: index for index, name in enumerate(names)}
                hook.module_forward_metadata.cached_parameter_indices = indices


def _check_processors(model: ModelMixin) -> None:
    """Raises if a layer would attend to this rank's part of the sequence only."""
    for name, module in model.named_modules():
        if isinstance(module, AttentionModuleMixin | Attention | MochiAttention):
            processor = module.processor
            if processor is not None and not hasattr(processor, "_parallel_config"):
                raise NotImplementedError(
                    f"{_OP}: {type(model).__name__}.{name} attends by "
                    f"{type(processor).__name__}, which ignores other ranks: it would see only "
                    "this rank's part of the sequence"
                )


def resolving(resolve: Callable[..., ParallelConfig]) -> Callable[..., ParallelConfig]:
    """Wraps `_resolve_parallel_config` to support ranks without an accelerator, too."""

    @functools.wraps(resolve)
    def resolved(self: ModelMixin, config: Any) -> ParallelConfig:
        given = _context_parallel(config)
        if given is None:
            return resolve(self, config)
        config = _resolve_on_cpu(self, given) if _on_cpu() else resolve(self, config)
        spread_of(given)
        return config

    return resolved


def _on_cpu() -> bool:
    """Tells whether the default group or the machine has no accelerator."""
    if not dist.is_available() or not dist.is_initialized():
        return False  # diffusers reports the missing part
    accelerator = accelerators.available()
    return accelerator is None or all(
        device.type != accelerator.type for device in dist.group.WORLD._device_types
    )


def _resolve_on_cpu(model: ModelMixin, given: ContextParallelConfig) -> ParallelConfig:
    """Makes the mesh and records the config, as diffusers does with an accelerator."""
    config = ParallelConfig(context_parallel_config=given)
    mesh = given.mesh or init_device_mesh(
        "cpu", given.mesh_shape, mesh_dim_names=given.mesh_dim_names
    )
    config.setup(dist.get_rank(), dist.get_world_size(), _CPU, mesh=mesh)
    model._parallel_config = config
    return config
