"""Attention over the whole sequence, which replaces diffusers' own.

Shapes are diffusers': query (B, S_q, H, E), key and value (B, S_k, G, E). This rank holds
S_q and S_k positions: in models that attend to text and image together, a part of the text, then a
part of the image. The order of all positions makes no difference, since all queries see the same
keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig

from symm_cp.context_parallel import all_gather_attention
from symm_cp.integrations.diffusers.spread import SpreadModel, gathered, spread_of, spread_over
from symm_cp.ops.attention.mesh_calls import reporting_to_peers

_OP = "diffusers' context parallelism"

# The forward ops of diffusers' backends with torch's kernels. Users choose other backends for their
# kernels, so those are not replaced.
_OF_TORCH = {
    getattr(attention_dispatch, f"{name}_attention_forward_op")
    for name in ("_native", "_native_flash", "_cudnn")
}

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    forward_op: Any,
    backward_op: Any,
    _parallel_config: ParallelConfig,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`_templated_context_parallel_attention` of diffusers: attends to the keys of all ranks.

    Same result as, on the positions of all ranks::

        F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

    `attn_mask`, (B or 1, G or 1, 1, S_k), covers this rank's keys; it is bool, or added to the
    scores. Returns (B, S_q, H, E) and, with `return_lse`, the log-sum-exp of the scores (B, S_q,
    H). Raises `ValueError` and `NotImplementedError` before any communication.
    """
    spread = spread_of(_parallel_config.context_parallel_config)
    refused = {"is_causal": is_causal, "dropout_p": dropout_p}
    return reporting_to_peers(
        spread.group,
        _attend,
        spread,
        (query, key, value),
        attn_mask,
        refused,
        forward_op,
        {"scale": scale, "enable_gqa": enable_gqa},
        return_lse,
    )


def refusing(name: str, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a backend of diffusers that ignores other ranks: it refuses context parallelism."""

    @functools.wraps(backend)
    def attention(*args: Any, _parallel_config: ParallelConfig | None = None, **kwargs: Any) -> Any:
        config = None if _parallel_config is None else _parallel_config.context_parallel_config
        if config is not None:
            reporting_to_peers(spread_of(config).group, _refuse_backend, name)
        return backend(*args, **kwargs)

    return attention


def _refuse_backend(name: str) -> None:
    raise NotImplementedError(
        f"{_OP}: the attention backend {name!r} would attend to this rank's part of the sequence "
        "only: use 'native'"
    )


def _attend(
    spread: SpreadModel,
    tensors: _Tensors,
    mask: torch.Tensor | None,
    refused: dict[str, Any],
    forward_op: Any,
    options: dict[str, Any],
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    _check(refused, forward_op)
    if mask is not None:
        _check_mask(mask, tensors[1], options["scale"])
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    layouts, key_mask, features = None, None, value.shape[3]
    if spread.uneven:
        layouts = spread_over(spread.group, query.shape[2], key.shape[2])
    if mask is not None and mask.dtype == torch.bool and mask.shape[1] == 1 and not spread.uneven:
        key_mask = gathered(mask[:, 0, 0].T, spread.group).T
    elif mask is not None:  # also if graphs have no lengths of the other ranks' parts
        if options["scale"] is None:
            options["scale"] = query.shape[3] ** -0.5
        query, key, value = _with_bias(query, key, value, mask, options["scale"])
    out, lse = all_gather_attention(
        query,
        key,
        value,
        group=spread.group,
        method=spread.method,
        load_balancer=layouts,
        key_mask=key_mask,
        return_lse=True,
        **options,
    )
    out, lse = out[..., :features].transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


def _with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> _Tensors:
    """Returns tensors with one more feature, constant in queries, that adds the mask to scores.

    So the mask is sent with its keys.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, -torch.inf)
    # CUDA kernels need a multiple of 8 features.
    padding = 1 if query.device.type == "cpu" else -query.shape[3] % 8 or 8
    # About 1 / scale, so that the mask keeps its range; a power of two, so that it does not round.
    constant = 2.0 ** round(-math.log2(scale))
    of_keys = (mask / (scale * constant)).to(key.dtype).mT.expand(*key.shape[:3], 1)
    query = F.pad(F.pad(query, (0, 1), value=constant), (0, padding - 1))
    key = F.pad(torch.cat((key, of_keys), -1), (0, padding - 1))
    return query, key, F.pad(value, (0, padding))


def _check(refused: dict[str, Any], forward_op: Any) -> None:
    for name, given in refused.items():
        if given:
            raise NotImplementedError(
                f"{_OP}: {name}={given} is not supported: text and image are cut separately, so "
                "the places of a rank's positions in the sequence are unknown"
            )
    if forward_op not in _OF_TORCH:
        raise NotImplementedError(
            f"{_OP}: the kernels of {forward_op.__name__} are not supported: call "
            "model.set_attention_backend('native'), or symm_cp.integrations.diffusers.disable()"
        )


def _check_mask(mask: torch.Tensor, key: torch.Tensor, scale: float | None) -> None:
    B, S_k, G, _ = key.shape
    fits = mask.dim() == 4 and mask.shape[0] in (1, B) and mask.shape[1] in (1, G)
    if not fits or mask.shape[2:] != (1, S_k):
        raise NotImplementedError(
            f"{_OP}: attn_mask has shape {list(mask.shape)}, must be ({B} or 1, {G} or 1, 1, "
            f"{S_k}): for this rank's keys, equal for all queries"
        )
    if scale is not None and scale <= 0:
        raise NotImplementedError(f"{_OP}: {scale=} with attn_mask, must be positive")
