"""SGLang on CPU over symm_cp: a plug-in that SGLang loads by its entry point.

`register` hooks three functions of `sglang.srt.distributed.parallel_state` through SGLang's own
`HookRegistry`; each hook changes the behaviour on CPU only:

- `get_default_distributed_backend` returns "symm_cp" instead of "gloo". All collectives of
  `GroupCoordinator` that went over gloo then go over shared memory, on any processor.
- `GroupCoordinator.all_gatherv` and `reduce_scatterv`, which need NCCL, run on CPU tensors, too.

SGLang still uses its own kernels in shared memory, which need AMX or Arm, where it chooses them.
`torch.ops.symm_mem.fused_*`, which `layernorm_sp.py` calls, have CPU kernels as soon as symm_cp is
imported. `SGLANG_PLUGINS` chooses which plug-ins are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from symm_cp import backend
from symm_cp.integrations import parts

_STATE = "sglang.srt.distributed.parallel_state"


def register() -> None:
    """Registers the hooks, which SGLang then applies.

    SGLang calls it. If the native part cannot be built, it registers none and warns.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    logger = logging.getLogger(__name__)
    if not backend.register_or_warn(logger):
        return
    HookRegistry.register(f"{_STATE}.get_default_distributed_backend", _backend, HookType.AROUND)
    for name, hook in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        HookRegistry.register(f"{_STATE}.GroupCoordinator.{name}", hook, HookType.AROUND)
    logger.info("CPU ranks communicate over symm_cp: default backend, all_gatherv, reduce_scatterv")


def _backend(original: Callable[[str], str], device: str) -> str:
    chosen = original(device)
    return backend.NAME if device == "cpu" and chosen == "gloo" else chosen


def _all_gatherv(
    original: Callable[..., Any],
    coordinator: Any,
    input_: torch.Tensor | list[torch.Tensor],
    sizes: list[int] | None = None,
    output: torch.Tensor | None = None,
) -> Any:
    """Gathers parts of `sizes` rows, by default equal ones; returns a list, as SGLang's does."""
    inputs = [input_] if isinstance(input_, torch.Tensor) else list(input_)
    if not all(x.is_cpu for x in inputs):
        return original(coordinator, input_, sizes, output)
    return parts.gather("all_gatherv", inputs, 0, sizes, coordinator.device_group, output)


def _reduce_scatterv(
    original: Callable[..., Any],
    coordinator: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> Any:
    """Returns this rank's rows, `sizes[rank]` or an equal part, of the sum over the ranks."""
    if not input_.is_cpu:
        return original(coordinator, input_, output, sizes)
    group = coordinator.device_group
    return parts.reduce_scatter("reduce_scatterv", input_, 0, sizes, group, output)
