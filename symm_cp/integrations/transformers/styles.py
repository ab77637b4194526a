"""`from_pretrained(..., tp_plan="auto")` on fused ops: "rowwise" and both kinds of "colwise".

This applies to process groups of this backend, as under `symm-cp run`. The matmul of a linear that
is split by input features sums its products while it computes them, and so does the input gradient
of a linear that is split by output features. One native call gathers outputs, and the last token of
a prompt is multiplied without a copy of the weight (tensor_parallel/replicated.py). transformers
still computes the rest: other groups and devices, quantized weights, wrapped linears, uneven
numbers of features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
)

from symm_cp.group.memory import resolve
from symm_cp.tensor_parallel import replicated
from symm_cp.tensor_parallel.linear import as_autocast_casts
from symm_cp.tensor_parallel.whole import Seat, gather

_BACKEND = "symm_cp"
Forward = Callable[..., Any]
#: The fused form: computes the output from an input, the local weight and bias, and a group's name.
Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, str], torch.Tensor]


def _group_name(module: nn.Linear, mesh: DeviceMesh, features: int) -> str:
    """Returns the group to fuse over, or "" to leave a linear to transformers."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return ""  # other code has changed its forward
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    if group.size() == 1 or features % group.size() != 0:
        return ""
    if torch.device("cpu") not in group._device_types:
        return ""
    is_ours = group._get_backend(torch.device("cpu")).name() == _BACKEND
    return group.group_name if is_ours else ""


def _install(module: nn.Linear, group: str, split: Shard, fused: Fused) -> None:
    """Makes a linear with parameters `split` use the fused form for inputs that this supports."""
    usual: Forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight, bias = module.weight, module.bias
        if (
            not isinstance(x, torch.Tensor)
            or isinstance(x, DTensor)
            or x.device.type != "cpu"
            or x.dim() < 2
            or not isinstance(weight, DTensor)
            or weight.placements != (split,)
            or getattr(module, "_hf_quantized_needs_local_tp", False)
        ):
            return usual(*args, **kwargs)
        own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
        return fused(x, weight.to_local(), own_bias, group)

    module.forward = forward  # type: ignore[method-assign]


def _rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str
) -> torch.Tensor:
    x, weight, bias = as_autocast_casts(x, weight, bias)
    return replicated.sum_linear(x, weight, bias, group)


def _columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str
) -> torch.Tensor:
    x, weight, bias = as_autocast_casts(x, weight, bias)
    return replicated.columns(x, [weight], [bias], group)[0]


def _gathered_columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str
) -> torch.Tensor:
    part, state = _columns(x, weight, bias, group), resolve(group)
    seat = Seat(group, state.rank, state.world_size)
    return gather(part, -1, seat, seat.equal_parts(part.shape[-1]))


class _Fusing:
    """A style of transformers whose linears, split along `_features`, compute with `_fused`."""

    _features: str
    _split: Shard
    _fused: Fused

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Replaces the forward of a linear."""
        group = _group_name(module, mesh, getattr(module, self._features, 0))
        super().install_forward(module, mesh)  # type: ignore[misc]
        if group:
            _install(module, group, self._split, self._fused)
        return module


class FusedRowwise(_Fusing, RowwiseParallel):  # type: ignore[misc]
    """transformers' "rowwise": its sum over the ranks is part of the matmul."""

    _features, _split, _fused = "in_features", Shard(1), staticmethod(_rows)


class FusedColwise(_Fusing, ColwiseParallel):  # type: ignore[misc]
    """transformers' "colwise": the sum of its input's gradient is part of the matmul."""

    _features, _split, _fused = "out_features", Shard(0), staticmethod(_columns)


class FusedColwiseGathered(_Fusing, ColwiseParallel):  # type: ignore[misc]
    """transformers' "colwise_gather_output", used for logits: one native call gathers."""

    _features, _split, _fused = "out_features", Shard(0), staticmethod(_gathered_columns)


ALL_PARALLEL_STYLES.register(
    "rowwise", FusedRowwise(input_layouts=Shard(-1), output_layouts=Replicate())
)
ALL_PARALLEL_STYLES.register(
    "colwise", FusedColwise(input_layouts=Replicate(), output_layouts=Shard(-1))
)
ALL_PARALLEL_STYLES.register(
    "colwise_gather_output",
    FusedColwiseGathered(input_layouts=Replicate(), output_layouts=Replicate()),
)
