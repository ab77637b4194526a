"""Attention over the whole sequence, where diffusers calls its own.

Shapes as diffusers has them: query (B, S_q, H, E), key and value (B, S_k, G, E), of which this rank
holds S_q and S_k positions: a part of the text, then a part of the image, in models that attend to
both together. The order of all positions makes no difference, since queries see the same keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig

from symm_cp.context_parallel import all_gather_attention
from symm_cp.context_parallel.refusals import telling_peers
from symm_cp.integrations.diffusers import sequences
from symm_cp.integrations.diffusers.configs import Spread, spread_of
from symm_cp.ops.attention.gather_kv import all_gather_kv

_OP = "diffusers' context parallelism"

# What diffusers' backends with torch's kernels compute. Ours would not be what the others are
# chosen for.
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

    `attn_mask` is of this rank's keys, (B or 1, H or 1, 1, S_k), and of bool or added to the
    scores. Returns (B, S_q, H, E) and, with `return_lse`, the log-sum-exp of the scores (B, S_q,
    H). Raises `ValueError` and `NotImplementedError` before any communication.
    """
    spread = spread_of(_parallel_config.context_parallel_config)
    refused = {"is_causal": is_causal, "dropout_p": dropout_p}
    return telling_peers(
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
    """Returns a backend of diffusers' attention that would ignore the other ranks, and refuses."""

    @functools.wraps(backend)
    def attention(*args: Any, _parallel_config: ParallelConfig | None = None, **kwargs: Any) -> Any:
        config = None if _parallel_config is None else _parallel_config.context_parallel_config
        if config is not None:
            telling_peers(spread_of(config).group, _refuse_backend, name)
        return backend(*args, **kwargs)

    return attention


def _refuse_backend(name: str) -> None:
    raise NotImplementedError(
        f"{_OP}: the attention backend {name!r} would attend to this rank's part of the sequence "
        "only: use 'native'"
    )


def _attend(
    spread: Spread,
    tensors: _Tensors,
    mask: torch.Tensor | None,
    refused: dict[str, Any],
    forward_op: Any,
    options: dict[str, Any],
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    _check(refused, forward_op)
    lengths = (tensors[0].shape[1], tensors[1].shape[1])
    if mask is not None:
        _check_mask(spread, mask, lengths[1], return_lse)
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    of_keys, layouts = None, None
    if spread.uneven:
        of_keys, layouts = sequences.spread_over(spread.group, *lengths)
    if mask is not None:
        sizes = None if of_keys is None else of_keys.tolist()
        mask = sequences.gathered(mask.movedim(-1, 0), spread.group, sizes).movedim(0, -1)
        if not _hides_keys(mask):
            key, value = all_gather_kv(key, value, group=spread.group, sizes=sizes)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
            return out.transpose(1, 2)
    out, lse = all_gather_attention(
        query,
        key,
        value,
        group=spread.group,
        method=spread.method,
        load_balancer=layouts,
        key_mask=None if mask is None else mask[:, 0, 0],
        return_lse=True,
        **options,
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


def _check(refused: dict[str, Any], forward_op: Any) -> None:
    for name, given in refused.items():
        if given:
            raise NotImplementedError(
                f"{_OP}: {name}={given} is not supported: a rank does not know where in the "
                "sequence its positions are, since text and image are cut separately"
            )
    if forward_op not in _OF_TORCH:
        raise NotImplementedError(
            f"{_OP}: the kernels of {forward_op.__name__} are not supported: call "
            "model.set_attention_backend('native'), or symm_cp.integrations.diffusers.disable()"
        )


def _hides_keys(mask: torch.Tensor) -> bool:
    """Whether a mask only hides keys, from all heads alike."""
    return mask.dtype == torch.bool and mask.shape[1] == 1


def _check_mask(spread: Spread, mask: torch.Tensor, keys: int, return_lse: bool) -> None:
    shape = list(mask.shape)
    if len(shape) != 4 or shape[2] != 1 or shape[3] != keys:
        raise NotImplementedError(
            f"{_OP}: attn_mask has shape {shape}, must be (batch or 1, heads or 1, 1, {keys}): of "
            "the keys of this rank, equal for all queries"
        )
    if mask.requires_grad:
        raise NotImplementedError(f"{_OP}: attn_mask has requires_grad=True, must not")
    if _hides_keys(mask):
        return
    what = f"attn_mask of {mask.dtype} and shape {shape}, which does more than hide keys,"
    if spread.method.name != "allgather":
        raise NotImplementedError(f"{_OP}: {what} is not supported with ulysses_degree")
    if return_lse:
        raise NotImplementedError(f"{_OP}: {what} is not supported with return_lse=True")
