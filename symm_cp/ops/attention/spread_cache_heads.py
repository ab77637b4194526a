"""Attention to a spread cache whose results come back with heads scattered over the ranks.

As in spread_cache.py each rank attends to its own keys with all heads. Then rank r gets the results
for its H / W heads from all ranks, and merges them: an all-to-all in place of an all-gather.

Shapes: query (B, H, S, E), key (B, G, K, E), value (B, G, K, V); out (B, H / W, S, V). The query is
replicated, keys and values vary in K; the gradients of query and sinks are partial sums.
"""

from __future__ import annotations

from typing import Any

import torch

from symm_cp.ops import autocast
from symm_cp.ops.attention import native_tiles
from symm_cp.ops.attention.scoring import Gradients, TileMask
from symm_cp.ops.attention.spread_cache import (
    FREE,
    OPTIONS,
    SCATTERED,
    Merged,
    Options,
    additive_mask,
    attend,
    cache_types,
    check_arguments,
)
from symm_cp.ops.attention.tiles import dense_features
from symm_cp.ops.call import Call
from symm_cp.ops.common import count_attention_run, world_size_of
from symm_cp.ops.op import BackwardOp, Caller, NoGradient, arguments
from symm_cp.ops.recipe import own_op
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

_BACKWARD = f"_{SCATTERED}_backward"


def _check(
    ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any
) -> None:
    check_arguments(query, key, value, Options(*given))
    if query.shape[1] % ranks:
        raise ValueError(
            f"spread_cache_attention: query has {query.shape[1]} heads, which is not divisible by "
            f"world size {ranks}, as scatter_heads requires"
        )


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, _ = query.shape
    shape = (B, H // world_size_of(group_name), S)
    out = query.new_empty((*shape, value.shape[3]))
    return out, query.new_empty(shape, dtype=wide(query.dtype))


@own_op(
    f"{SCATTERED}(Tensor query, Tensor key, Tensor value, str group_name, {OPTIONS})"
    " -> (Tensor out, Tensor logsumexp)",
    check=_check,
    fake=_fake,
    gradient=BackwardOp(_BACKWARD, once=True),
    types=lambda t, **named: [t.part(x, 1) for x in cache_types(t, **named)],
    autocast=autocast.cast_query_key_value,
    example=lambda on: arguments(*_example(on), on.group_name),
    free=FREE,
)
def _attention(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    count_attention_run()
    options = Options(*given)
    packed, sinks = attend(query, key, value, options), options.sinks
    call.agree(options.text(key.shape[1]))
    by_rank = packed.unflatten(1, (call.world_size, -1)).movedim(1, 0)
    arrived = call.all_to_all(by_rank)
    heads = arrived.shape[2]
    merged = Merged(query, heads, value.shape[3])
    merged.add(arrived)
    merged.add_sinks(None if sinks is None else sinks.narrow(0, call.rank * heads, heads))
    return merged.result()


def _check_backward(
    ranks: int,
    grad_out: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *given: Any,
) -> None:
    _check(ranks, query, key, value, *given)
    B, H, S, _ = query.shape
    shape = [B, H // ranks, S]
    saved = ("out", out, query.dtype), ("logsumexp", logsumexp, wide(query.dtype))
    for name, tensor, dtype in saved:
        if tensor.dtype != dtype or tensor.device != query.device:
            raise TypeError(
                f"{_BACKWARD}: {name} is {tensor.dtype} on {tensor.device}, must be {dtype} on "
                f"{query.device}"
            )
    if list(out.shape) != [*shape, value.shape[3]] or out.shape != grad_out.shape:
        raise ValueError(
            f"{_BACKWARD}: out {list(out.shape)} and grad_out {list(grad_out.shape)} must be "
            f"{[*shape, value.shape[3]]}"
        )
    for name, tensor in (("logsumexp", logsumexp), ("grad_logsumexp", grad_logsumexp)):
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{_BACKWARD}: {name} {list(tensor.shape)} must be {shape}")


def _fake_backward(
    grad_out: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    group_name: str,
    *given: Any,
) -> tuple[torch.Tensor, ...]:
    sinks = Options(*given).sinks
    like = query.new_empty(0) if sinks is None else sinks
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value, like))


@own_op(
    f"{_BACKWARD}(Tensor grad_out, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor logsumexp, str group_name, {OPTIONS})"
    " -> (Tensor query, Tensor key, Tensor value, Tensor sinks)",
    check=_check_backward,
    fake=_fake_backward,
    gradient=NoGradient("second derivatives of spread_cache_attention are not supported"),
    types=lambda t, grad_out, **_: t.all_gather(grad_out, 1),
    autocast=autocast.as_they_are,
    example=lambda on: arguments(
        on.rand(1, 2, 2, 5), None, *_example(on), on.rand(1, 2, 2, 5),
        torch.zeros(1, 2, 2, dtype=wide(on.rand(1).dtype)), on.group_name,
    ),
    internal=True,
)  # fmt: skip
def _attention_backward(
    call: Call,
    grad_out: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, ...]:
    """Gathers what the gradients of all heads need; each rank attends to its own keys again."""
    options, of_sinks = Options(*given), query.new_empty(0)
    inner = native_tiles.inner_products(grad_out, out, grad_logsumexp)
    statistics = torch.stack([logsumexp, inner], -1)
    whole = call.all_gather(torch.cat([grad_out.to(inner.dtype), statistics], -1), 1)
    grad, lse, inners = whole[..., :-2], whole[..., -2], whole[..., -1]
    grads = Gradients(*(new_result(t, t.shape, lse.dtype).zero_() for t in (query, key, value)))
    if query.numel() > 0 and key.shape[2] > 0:
        q, k, v = (dense_features(tensor) for tensor in (query, key, value))
        native_tiles.add_gradients(
            grad.to(query.dtype).contiguous(),
            q,
            k,
            v,
            lse.masked_fill(lse == -torch.inf, torch.inf),
            inners.contiguous(),
            options.scoring(query),
            TileMask(mask=additive_mask(query, options)),
            grads,
        )
    sinks = options.sinks
    if sinks is not None:
        heads, first = logsumexp.shape[1], call.rank * logsumexp.shape[1]
        weights = torch.exp(sinks.narrow(0, first, heads)[None, :, None] - logsumexp)
        of_sinks = torch.zeros_like(sinks)
        of_sinks.narrow(0, first, heads).copy_(-(weights * inner).sum((0, 2)))
    return *(t.to(query.dtype) for t in grads[:3] if t is not None), of_sinks


def _example(on: Caller) -> tuple[torch.Tensor, ...]:
    key, value = (on.rand(1, 2, 3 + on.rank, features) for features in (6, 5))
    return on.ones(1, 2 * on.world_size, 2, 6), key, value
