"""A style of torch's `parallelize_module` for attention modules."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from symm_cp.context_parallel import guards
from symm_cp.context_parallel.flex import FLEX
from symm_cp.context_parallel.flex_hook import flex_hook
from symm_cp.context_parallel.hooks import RegionMode, entered
from symm_cp.context_parallel.lengths import Balancers
from symm_cp.context_parallel.region import region_over
from symm_cp.context_parallel.sdpa import SDPA
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.methods import MethodLike


class ContextParallel(ParallelStyle):
    """Runs the attention inside a module context parallel.

    The module must get this rank's part of the sequence and call
    `F.scaled_dot_product_attention` or `flex_attention`::

        parallelize_module(block.attention, cp_mesh, ContextParallel(seq_dim=2))

    Args:
        seq_dim: the sequence dimension of queries, keys and values: must be 2 for both functions.
        attention_type: which of the two functions the module calls, an `AttentionType` or its
            value. A call of the other function raises `RuntimeError`.
        load_balancer: how the sequence is spread, head-tail by default; as in `context_parallel`.
        method: how attention is split over the mesh; as in `context_parallel`.

    The forward pass needs no surrounding context, even when a checkpoint recomputes it.
    Raises `ValueError` for another `seq_dim`, `attention_type` or `method`. The forward pass raises
    as within `context_parallel`, and `RuntimeError` if the module calls neither function.
    Source: torch's `_ContextParallel`.
    """

    class AttentionType(Enum):
        """The function that a module calls."""

        FLEX = FLEX
        SDPA = SDPA

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: AttentionType | str = AttentionType.SDPA,
        load_balancer: Balancers | None = None,
        method: MethodLike | None = None,
    ) -> None:
        super().__init__()
        if seq_dim not in (2, -2):
            raise ValueError(
                f"ContextParallel: {seq_dim=} must be 2: attention takes (batch, heads, sequence, "
                "features)"
            )
        self.attention_type = self.AttentionType(attention_type)
        self.load_balancer = load_balancer
        self.method = method

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = self.around(module, module.forward, device_mesh)  # type: ignore[method-assign]
        return module

    def around(
        self, module: nn.Module, forward: Callable[..., Any], group: GroupLike
    ) -> Callable[..., Any]:
        """Returns a forward pass of a module in which attention runs over a group."""
        region = region_over(
            group,
            self.load_balancer,
            self.attention_type.value,
            method=self.method,
            op="ContextParallel",
        )
        plain = self.attention_type is self.AttentionType.SDPA
        if not plain:
            # Held for the module's lifetime: code that Dynamo traces cannot acquire it.
            flex_hook.acquire()
            weakref.finalize(module, flex_hook.release)

        @torch.compiler.assume_constant_result
        def complaint() -> str | None:
            try:
                region.watch().saw(module)
            except NotImplementedError as error:
                return str(error)
            return None

        @functools.wraps(forward)
        def parallel(*args: Any, **kwargs: Any) -> Any:
            watch = region.watch()
            # Dynamo cannot trace the stack of regions, and needs only the mode.
            traced = (
                torch.compiler.is_compiling() if plain else torch.compiler.is_dynamo_compiling()
            )
            if traced:
                if refused := complaint():
                    raise NotImplementedError(refused)
                with RegionMode(region, watch):
                    result = forward(*args, **kwargs)
                watch.first_module = "A compiled module"
            else:
                with entered(region, watch):
                    guards.untraced(watch, functools.partial(_saw, watch, module))
                    result = forward(*args, **kwargs)
            watch.check_fused("raise", "ContextParallel")
            return result

        return parallel


def _saw(watch: guards.Watch, module: nn.Module, compiling: bool) -> None:
    watch.saw(module)
