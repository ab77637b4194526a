"""What gated linear attention and the gated delta rule share: heads, scale and local stage.

Source: Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.ops.recurrent.chunks import Decay
from symm_cp.ops.recurrent.recurrence import Summarise, check_tensors, recur


def _check(op: str, named: dict[str, torch.Tensor]) -> None:
    query, key, value, g = (named[name] for name in ("query", "key", "value", "g"))
    if key.dim() != 4 or value.dim() != 4 or query.shape != key.shape:
        raise ValueError(
            f"{op}: query {list(query.shape)} and key {list(key.shape)} must be (B, S, H, K), "
            f"value {list(value.shape)} (B, S, heads, V)"
        )
    heads = key.shape[2]
    if value.shape[:2] != key.shape[:2] or heads == 0 or value.shape[2] % heads != 0:
        raise ValueError(
            f"{op}: value {list(value.shape)} must have the batch and length of key "
            f"{list(key.shape)}, and a multiple of its heads"
        )
    of_heads = value.shape[:3]
    beta = named.get("beta")
    if beta is not None and beta.shape != of_heads:
        raise ValueError(
            f"{op}: beta {list(beta.shape)} must be {list(of_heads)}: one number for each "
            "position and head of value"
        )
    of_features = (*of_heads, key.shape[3])
    if g.shape not in (of_heads, of_features):
        raise ValueError(
            f"{op}: g {list(g.shape)} must be {list(of_heads)} or {list(of_features)}: one number "
            "for each position and head of value, or one for each feature of its key"
        )


def _local(
    decay: Decay,
    before: torch.Tensor,
    written: torch.Tensor,
    q: torch.Tensor,
    attended: torch.Tensor,
) -> torch.Tensor:
    return (q * decay.since_begin) @ before + attended @ written


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


def gated(
    op: str,
    summary: Summarise,
    named: dict[str, torch.Tensor],
    group_name: str,
    *,
    scale: float | None,
    normalise: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the last state of `op`; `named` are its tensors by argument."""
    check_tensors(op, named, options["chunk_size"])
    _check(op, named)

    def scaled(decay: Decay, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> Any:
        if normalise:
            q, k = _normalised(q), _normalised(k)
        return summary(decay, q * (k.shape[-1] ** -0.5 if scale is None else scale), k, *others)

    tensors, g = dict(named), named["g"]
    del tensors["g"]
    repeats = g.shape[2] // named["key"].shape[2]
    if repeats > 1:
        for name in ("query", "key"):
            tensors[name] = named[name].repeat_interleave(repeats, 2)
    return recur(op, scaled, _local, [*tensors.values()], g, group_name, **options)
