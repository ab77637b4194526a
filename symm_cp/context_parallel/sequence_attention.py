"""Attention with a `SequenceMask` within a region, for integrations of models."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from symm_cp.context_parallel import flex
from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.random_numbers import seed_of_attention
from symm_cp.context_parallel.region import (
    ParallelRegion,
    outside_graph_if_empty,
    without_padding,
)
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.op import flex_all_gather_attention

_OP = "attend_sequence"


def attend_sequence(
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attends to the whole sequence from this rank's part of it. Collective.

    Args:
        region: gives the group, and how the sequence is spread.
        query: (B, H, S_q, E), this rank's part.
        key, value: (B, G, S_k, E) and (B, G, S_k, V). Keys may be of another sequence.
        mask: which keys a query sees; by default all, or with `is_causal` no later keys.
        is_causal: only without a mask.
        scale: of the scores; 1 / sqrt(E) by default.
        enable_gqa: G may be a divisor of H.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (H,), a logit of each head that takes part in the softmax and has no value.
        bias: added to the scores by distance; see `all_gather_attention`.
        dropout_p: the share of the weights that is dropped. The seed follows from torch's default
            CPU generator, which must have the same seed on all ranks.

    Returns (B, H, S_q, V). Raises `ValueError`, `TypeError` and `NotImplementedError` before any
    communication; callers report these to the peers.
    """
    if region.holds_none and torch.compiler.is_dynamo_compiling():
        given = (region, query, key, value, mask)
        return outside_graph_if_empty()(  # type: ignore[no-any-return]
            attend_sequence,
            *given,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            softcap=softcap,
            sinks=sinks,
            bias=bias,
            dropout_p=dropout_p,
        )
    if mask is None:
        mask = SequenceMask(is_causal=is_causal)
    elif is_causal:
        raise ValueError(f"{_OP}: mask and is_causal=True exclude each other")
    options = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "sinks": sinks,
        "bias": bias,
        "dropout_p": dropout_p,
    }
    related = mask.relates_positions
    if related and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{_OP}: query has {query.shape[2]} rows and key {key.shape[2]}: causal masks, windows "
            "and documents require equal lengths"
        )

    if not region.of_samples and not region.holds_none:
        return _attend_batch(_Call(region, query, key, value, mask, options), related)

    def attend(
        own: ParallelRegion, index: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        own_mask = mask if index is None else mask.sample(index)
        return _attend_batch(_Call(own, q, k, v, own_mask, options), related)

    def attend_all(*tensors: torch.Tensor) -> torch.Tensor:
        return by_sample(_OP, region, tensors, attend)

    return without_padding(region, attend_all, 2, query, key, value)


class _Call(NamedTuple):
    region: ParallelRegion
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: SequenceMask
    options: dict[str, Any]


def by_sample(
    op: str,
    region: ParallelRegion,
    tensors: tuple[torch.Tensor, ...],
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Calls `attend(region, index, *tensors)` for each sample if samples have separate layouts.

    If they share a layout, calls it once for all, with None as the index.
    """
    balancers = region.of_samples
    if not balancers:
        return attend(region, None, *tensors)
    query = tensors[0]
    for balancer in balancers:
        if len(balancer.samples) != query.shape[0]:
            raise ValueError(
                f"{op}: query of shape {list(query.shape)} has {query.shape[0]} samples, "
                f"{balancer} is for {len(balancer.samples)}"
            )
    return torch.cat(
        [
            attend(region.of_sample(b), b, *(tensor[b : b + 1] for tensor in tensors))
            for b in range(query.shape[0])
        ]
    )


def _attend_batch(call: _Call, related: bool) -> torch.Tensor:
    """Attends in one layout; `related`: whether the mask relates positions of queries and keys."""
    region, query, key, value, mask, options = call
    if mask.mask_mod is not None:
        return _by_tiles(call)
    dropout_p = options["dropout_p"]
    ordered = related or mask.key_mask is not None or options["bias"] is not None or dropout_p > 0
    layouts = region.layouts_in_graph(query.device)
    spread: dict[str, Any] = {"load_balancer": layouts}
    if layouts is None:
        queries, keys = flex.spread(region, query, key, ordered=ordered)
        spread = {"load_balancer": keys}
        if ordered and queries is not keys and queries != keys:
            spread["query_load_balancer"] = queries
    return all_gather_attention(  # type: ignore[no-any-return]
        query,
        key,
        value,
        group=region.group,
        **mask.arguments(),
        method=region.method,
        dropout_seed=seed_of_attention(region, query.device) if dropout_p > 0 else None,
        **options,
        **spread,
    )


def _by_tiles(call: _Call) -> torch.Tensor:
    """Attends with a mask that is a function of positions."""
    region, query, key, value, mask, options = call
    if region.layouts_in_graph(query.device) is not None:
        return _in_graph(call)
    if not flex.in_tiles(query.device):
        return _by_torch(call)
    queries, keys = flex.spread(region, query, key)
    out, _ = flex_all_gather_attention(
        query,
        key,
        value,
        group=resolve(region.group),
        layout=queries.layout,
        kv_layout=keys.layout,
        mask_mod=mask.as_mask_mod(),
        method=region.method,
        dropout_seed=seed_of_attention(region, query.device) if options["dropout_p"] > 0 else None,
        **options,
    )
    return out


def _in_graph(call: _Call) -> torch.Tensor:
    """Attends with a mask that is a function of positions, as one op in the graph."""
    region, query, key, value, mask, options = call
    # Imported here because it loads Dynamo.
    from symm_cp.context_parallel.flex_trace import flex_in_graph

    options, score_mod, sinks = _by_functions(options, region.whole_length(query.shape[2]))
    mask_mod = mask.as_mask_mod()
    out, lse = flex_in_graph(
        region, query, key, value, score_mod, mask_mod=mask_mod, return_lse=True, **options
    )
    return _with_sinks(out, lse, sinks)


def _by_torch(call: _Call) -> torch.Tensor:
    """Attends with a mask that is a function of positions, by torch's kernels to gathered keys."""
    region, query, key, value, mask, options = call
    options, score_mod, sinks = _by_functions(options, region.whole_length(query.shape[2]))
    queries, keys = flex.spread(region, query, key)
    lengths = (queries.seq_length, keys.seq_length)
    blocks = _blocks_of.get(mask)
    if blocks is None or tuple(blocks.seq_lengths) != lengths:
        blocks = _blocks_of[mask] = create_block_mask(
            mask.as_mask_mod(), query.shape[0], None, *lengths, device=query.device
        )
    out, more = flex.attend_over(
        region,
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=blocks,
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return _with_sinks(out, more.lse, sinks)


# All layers of a model share a few masks.
_blocks_of: weakref.WeakKeyDictionary[SequenceMask, BlockMask] = weakref.WeakKeyDictionary()


def _by_functions(
    options: dict[str, Any], queries: int
) -> tuple[dict[str, Any], Callable[..., torch.Tensor] | None, torch.Tensor | None]:
    """Returns options for `flex_attention`, with soft cap and bias as `score_mod`, and the sinks.

    `queries` is the number of queries in the whole sequence.
    """
    if options["dropout_p"]:
        raise NotImplementedError(
            f"{_OP}: dropout_p is not supported with a mask that only a function describes, in "
            "compiled code and on GPUs"
        )
    softcap, bias = options["softcap"], options["bias"]
    zero = queries - 1

    def capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    def biased(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return score + bias[h, kv - q + zero]

    def both(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap) + bias[h, kv - q + zero]

    by_bias = None if bias is None else biased
    by_both = capped if bias is None else both
    rest = {"scale": options["scale"], "enable_gqa": options["enable_gqa"]}
    return rest, by_bias if softcap is None else by_both, options["sinks"]


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Adds a key without a value to each row, which only takes a share of the weights."""
    if sinks is None:
        return out
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share.unsqueeze(-1).to(out.dtype)
