"""torchtitan's context parallelism on symm_cp: functions with torchtitan's names and arguments.

This does not import torchtitan. It recognises inner attentions by the names of their classes
(`FlexAttention`, `ScaledDotProductAttention`, `VarlenAttention`), which take queries, keys and
values as (batch, sequence, heads, features), or as (tokens, heads, features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.context_parallel import (
    ContextParallel,
    HeadTail,
    LoadBalancer,
    ProcessingTimeRoundRobin,
    Sequential,
    context_parallel_shard,
    varlen,
)
from symm_cp.context_parallel.layouts import last_cut
from symm_cp.context_parallel.lengths import Balancers
from symm_cp.context_parallel.region import ParallelRegion, region_over
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.layouts import encoded
from symm_cp.ops.attention.methods import MethodLike, group_by

__all__ = [
    "apply_cp_to_forward",
    "cp_shard",
    "last_layout",
    "prepare_context_parallel_input",
]

_OP = "symm_cp.integrations.torchtitan"
Masks = Any  # a BlockMask, offsets of documents (VarlenMetadata), or several by name


# --- batches ---


def prepare_context_parallel_input(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: GroupLike,
    device: torch.device | None = None,
    load_balancer_type: str | LoadBalancer | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Cuts inputs, labels, positions and block masks of a batch to this rank's part.

    Replaces torchtitan's function of this name, with the same result; for the arguments see
    `cp_shard`. `labels` must be shifted already, as torchtitan's data loaders make them.
    `extra_kwargs` must have "positions".
    """
    tensors = (inputs, labels, extra_kwargs["positions"])
    masks = extra_kwargs.get("attention_masks")
    (inputs, labels, positions), masks = cp_shard(
        cp_mesh, tensors, masks, load_balancer_type, ptrr_mask_key=ptrr_mask_key
    )
    extra_kwargs["positions"] = positions
    if masks is not None:
        extra_kwargs["attention_masks"] = masks
    return inputs, labels, extra_kwargs


def cp_shard(
    cp_mesh: GroupLike,
    inputs: tuple[torch.Tensor, ...],
    attention_masks: Masks,
    load_balancer_type: str | LoadBalancer | None = "headtail",
    input_seq_dim: int = 1,
    ptrr_mask_key: str | None = None,
) -> tuple[tuple[torch.Tensor, ...], Masks]:
    """Cuts tensors and block masks to this rank's part of the sequence.

    Args:
        cp_mesh: the ranks that share a sequence.
        inputs: tensors of the whole sequence, or of several lengths (images and texts).
        attention_masks: None, or one `BlockMask` or several by name, which are cut. Offsets of
            documents (`VarlenMetadata`) are kept for the whole sequence.
        load_balancer_type: "headtail", "ptrr" (balances the work of a `BlockMask`), None
            (sequential), or a load balancer of symm_cp.
        input_seq_dim: the sequence dimension of all inputs.
        ptrr_mask_key: the mask, if there are several, whose work "ptrr" balances.

    Any length works. Raises `ValueError` for another `load_balancer_type`, or "ptrr" without a
    mask. Source: torchtitan's `cp_shard`.
    """
    lengths = {tensor.shape[input_seq_dim] for tensor in inputs}
    size = group_by(_OP, cp_mesh, None).size()
    balancers = {
        n: _balancer(load_balancer_type, n, size, attention_masks, ptrr_mask_key) for n in lengths
    }
    named = attention_masks if isinstance(attention_masks, Mapping) else {"": attention_masks}
    masks = {name: mask for name, mask in named.items() if isinstance(mask, BlockMask)}
    parts: Any = context_parallel_shard(
        cp_mesh,
        [*inputs, *masks.values()],
        [input_seq_dim] * len(inputs) + [2] * len(masks),
        balancers,
    )
    cut = {**named, **dict(zip(masks, parts[len(inputs) :], strict=True))}
    return tuple(parts[: len(inputs)]), (cut if isinstance(attention_masks, Mapping) else cut[""])


def _balancer(
    kind: str | LoadBalancer | None, length: int, size: int, masks: Masks, key: str | None
) -> LoadBalancer:
    if isinstance(kind, LoadBalancer):
        return kind
    if kind is None:
        return Sequential(length, size)
    if kind == "headtail":
        return HeadTail(length, size)
    if kind != "ptrr":
        raise ValueError(
            f"{_OP}.cp_shard: unknown load_balancer_type={kind!r}; choose 'headtail', 'ptrr', None "
            "or a LoadBalancer"
        )
    if isinstance(masks, Mapping):
        if key not in masks:
            raise ValueError(
                f"{_OP}.cp_shard: ptrr_mask_key={key!r} must be one of {sorted(masks)}, the names "
                "of attention_masks"
            )
        masks = masks[key]
    if not isinstance(masks, BlockMask):
        raise ValueError(
            f"{_OP}.cp_shard: attention_masks is a {type(masks).__name__}, 'ptrr' requires a "
            "BlockMask"
        )
    return ProcessingTimeRoundRobin(masks, size)


def last_layout(cp_mesh: GroupLike) -> Callable[[int], LoadBalancer]:
    """Returns the `load_balancer` for batches whose layouts differ ("ptrr").

    Attention then uses the layout of the last batch that was cut on this group and gave this rank
    the same number of positions, or head-tail if there was none.
    """
    group = group_by(_OP, cp_mesh, None)

    def layout(held: int) -> LoadBalancer:
        return last_cut(group, held) or HeadTail(held * group.size(), group.size())

    return layout


# --- inner attention ---


def apply_cp_to_forward(
    attention_modules: Sequence[nn.Module],
    cp_mesh: GroupLike,
    *,
    load_balancer: Balancers | None = None,
    method: MethodLike | None = None,
) -> None:
    """Makes inner attentions attend to the whole sequence, from this rank's part.

    Replaces torchtitan's function of this name, with the same result. This one also supports
    `score_mod`, packed documents (`VarlenAttention`), and CPU.

    Args:
        attention_modules: the inner attentions of all layers, of one kind or several.
        cp_mesh: the ranks that share a sequence; a 2-D DeviceMesh for two methods.
        load_balancer: as in `context_parallel`; by default head-tail, as in torchtitan. For
            `load_balancer_type=None` pass `Sequential`, for "ptrr" `last_layout(cp_mesh)`.
        method: as in `context_parallel`.

    Raises `NotImplementedError` for another kind of module, before it changes any.
    """
    for module in attention_modules:
        _kind(module)
    for module in attention_modules:
        module.forward = attending(  # type: ignore[method-assign]
            module, module.forward, cp_mesh, load_balancer, method
        )


_VARLEN = "varlen"
# Inner attentions by the beginning of their classes' names.
_KINDS = {
    "Flex": ContextParallel.AttentionType.FLEX.value,
    "ScaledDotProduct": ContextParallel.AttentionType.SDPA.value,
    "Varlen": _VARLEN,
}


def _kind(module: nn.Module) -> str:
    """Returns the kind of function that an inner attention calls."""
    for base in type(module).__mro__:
        for begin, kind in _KINDS.items():
            if base.__name__.startswith(begin):
                return kind
    raise NotImplementedError(
        f"{_OP}: {type(module).__name__} is not a known inner attention: the name of one of its "
        f"classes must begin with one of {sorted(_KINDS)}"
    )


def attending(
    module: nn.Module,
    forward: Callable[..., Any],
    group: GroupLike,
    load_balancer: Balancers | None = None,
    method: MethodLike | None = None,
) -> Callable[..., Any]:
    """Returns a forward pass that attends to the whole sequence."""
    kind = _kind(module)
    if kind == _VARLEN:
        left, right = getattr(module, "window_size", (-1, 0))
        return _Varlen(region_over(group, load_balancer, method=method, op=_OP), left, right)
    style = ContextParallel(attention_type=kind, load_balancer=load_balancer, method=method)
    return style.around(module, forward, group)


class _Varlen:
    """The forward pass of attention within packed documents, samples one after the other."""

    def __init__(self, region: ParallelRegion, left: int, right: int) -> None:
        self._region, self._window = region, (left, right)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        *samples, held = q.shape[:-2]  # (batch, sequence) or (tokens,)
        out, lse = varlen.attend(
            self._region,
            (q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3)),
            (attention_masks.cu_seq_q, attention_masks.cu_seq_k),
            self._window,
            scale,
            layouts=encoded((self._region.layout(held).of_all_samples,)),
        )
        out, lse = out.view(*samples, held, *out.shape[1:]), lse.mT.reshape(*samples, held, -1)
        return out if out_transform is None else out_transform(out, lse)
