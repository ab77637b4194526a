"""The one way of attention within a region: `attend_sequence`.

`scaled_dot_product_attention` (sdpa.py), `flex_attention` (flex.py) and the attention of models
translate their arguments into a `SequenceMask` and changes of the scores; all else is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from symm_cp.context_parallel import gathered_keys
from symm_cp.context_parallel.attention import attend_over, is_dtensor
from symm_cp.context_parallel.load_balancers import LoadBalancer, Sequential
from symm_cp.context_parallel.random_numbers import seed_of_attention
from symm_cp.context_parallel.region import ParallelRegion, without_padding
from symm_cp.context_parallel.sequence_mask import SequenceMask, of_sample
from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.flex.op import flex_all_gather_attention

_EVERY_KEY, _CAUSAL = SequenceMask(), SequenceMask(is_causal=True)

#: The output and its log-sum-exp; torch's kernels return none for a mask that is a matrix.
Attended: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def attend_sequence(
    op: str,
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask | None = None,
    *,
    is_causal: bool = False,
    score_mod: Modifier | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    torch_flex: Callable[..., Any] = gathered_keys.compiled_flex,
) -> Attended:
    """Attends to the whole sequence from this rank's part of it. Collective.

    Args:
        op: what the user called, for errors.
        region: gives the group, and how the sequence is spread.
        query: (B, H, S_q, E), this rank's part.
        key, value: (B, G, S_k, E) and (B, G, S_k, V). Keys may be of another sequence.
        mask: which keys a query sees; by default all, or with `is_causal` no later keys.
        is_causal: only without a mask.
        score_mod: changes scores, by indices in the whole sequence, as in `flex_attention`; not
            together with `softcap`, `bias` and `dropout_p`.
        scale: of the scores; 1 / sqrt(E) by default.
        enable_gqa: G may be a divisor of H.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (H,), a logit of each head that takes part in the softmax and has no value.
        bias: added to the scores by distance; see `all_gather_attention`.
        dropout_p: the share of the weights that is dropped. The seed follows from torch's default
            CPU generator, which must have the same seed on all ranks.
        torch_flex: torch's `flex_attention`, for devices that need it (gathered_keys.py).

    Returns (B, H, S_q, V), and the log-sum-exp (B, H, S_q). Raises `ValueError`, `TypeError` and
    `NotImplementedError` before any communication; callers report these to the peers.
    """
    scoring: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "sinks": sinks,
        "bias": bias,
        "dropout_p": dropout_p,
    }
    if mask is None:
        mask = _CAUSAL if is_causal else _EVERY_KEY
    elif is_causal:
        raise ValueError(f"{op}: mask and is_causal=True exclude each other")
    if score_mod is None and mask.matrix is not None:
        score_mod = mask.score_mod
    if mask.relates_positions and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{op}: query has {query.shape[2]} rows and key {key.shape[2]}: causal masks, windows "
            "and documents require equal lengths"
        )
    if not region.of_samples and not region.holds_none:
        tensors = query, key, value
        return _attend(_Call(op, region, tensors, mask, score_mod, scoring, torch_flex))

    def attend(own: ParallelRegion, index: int | None, *tensors: torch.Tensor) -> Attended:
        modifiers = mask, score_mod
        if index is not None:
            modifiers = mask.sample(index), of_sample(score_mod, index, score=True)
        return _attend(_Call(op, own, tensors, *modifiers, scoring, torch_flex))

    def attend_all(*tensors: torch.Tensor) -> Attended:
        return _by_sample(op, region, tensors, attend)

    return without_padding(region, attend_all, 2, query, key, value)


class _Call(NamedTuple):
    op: str
    region: ParallelRegion
    tensors: tuple[torch.Tensor, ...]
    mask: SequenceMask
    score_mod: Modifier | None
    scoring: dict[str, Any]
    torch_flex: Callable[..., Any]


def _by_sample(
    op: str,
    region: ParallelRegion,
    tensors: tuple[torch.Tensor, ...],
    attend: Callable[..., Attended],
) -> Attended:
    """Calls `attend(region, index, *tensors)` for each sample if samples have separate layouts.

    If they share a layout, calls it once for all, with None as the index.
    """
    balancers, query = region.of_samples, tensors[0]
    if not balancers:
        return attend(region, None, *tensors)
    for balancer in balancers:
        if len(balancer.samples) != query.shape[0]:
            raise ValueError(
                f"{op}: query of shape {list(query.shape)} has {query.shape[0]} samples, "
                f"{balancer} is for {len(balancer.samples)}"
            )
    outs, lses = zip(
        *(
            attend(region.of_sample(b), b, *(tensor[b : b + 1] for tensor in tensors))
            for b in range(query.shape[0])
        ),
        strict=True,
    )
    return torch.cat(outs), None if None in lses else torch.cat(lses)


def _attend(call: _Call) -> Attended:
    """Attends in one layout: by one op if options say all of the mask, else by functions."""
    _, region, (query, key, value), mask, score_mod, scoring, _ = call
    # `mask.is_function`, without a call: this runs in each layer.
    by_options = mask.mask_mod is None and mask.block_mask is None and mask.matrix is None
    if score_mod is not None or not by_options:
        return _by_functions(call)
    dropout_p = scoring["dropout_p"]
    ordered = mask.relates_positions or mask.key_mask is not None
    ordered = ordered or scoring["bias"] is not None or dropout_p > 0
    layouts = region.layouts_in_graph(query.device)
    spread: dict[str, Any] = {"load_balancer": layouts}
    if layouts is None:
        queries, keys = _spread(region, query, key, ordered=ordered)
        spread = {"load_balancer": keys}
        if ordered and queries is not keys and queries != keys:
            spread["query_load_balancer"] = queries
    if dropout_p > 0:
        scoring = {**scoring, "dropout_seed": seed_of_attention(region, query.device)}
    call_options = {**mask.arguments(), **scoring, **spread}
    return attend_over(region.group, region.method, query, key, value, **call_options)


def rows_of(tensor: torch.Tensor) -> int:
    """Returns how many positions of a query or key this rank holds, also of a DTensor."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).shape[2]


def _spread(
    region: ParallelRegion, query: torch.Tensor, key: torch.Tensor, *, ordered: bool
) -> tuple[LoadBalancer, LoadBalancer | None]:
    """Returns the layouts of queries and keys; `ordered`: the result depends on the keys' order."""
    if region.even and len(region.balancers) == 1 and query.shape[2] == key.shape[2]:
        return region.balancers[0], region.balancers[0]
    local = rows_of(query), rows_of(key)
    return region.layout(local[0]), region.layout_of_keys(*local, ordered=ordered)


def _by_functions(call: _Call) -> Attended:
    """Attends with a mask or scores that are functions of positions, tile by tile."""
    op, region, tensors, mask, score_mod, scoring, torch_flex = call
    query, key, value = tensors
    if any(is_dtensor(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"{op}: DTensors with a tensor or function as mask, or a score_mod, are not supported "
            "within context_parallel: pass this rank's parts (to_local())"
        )
    changes = [name for name in ("softcap", "bias") if scoring[name] is not None]
    changes += ["dropout_p"] if scoring["dropout_p"] else []
    if score_mod is not None and changes:
        raise NotImplementedError(
            f"{op}: {changes[0]} with a score_mod or a floating attn_mask within context_parallel "
            "is not supported: use a mask of bool"
        )
    if region.layouts_in_graph(query.device) is not None:
        # Imported here because it loads Dynamo.
        from symm_cp.context_parallel.flex_trace import flex_in_graph

        options, score_mod, sinks = _as_functions(call)
        out, lse = flex_in_graph(region, query, key, value, mask, score_mod, **options)
        return _with_sinks(out, lse, sinks)
    queries, known = _spread(region, query, key, ordered=True)
    keys = known or Sequential(key.shape[2] * region.world_size, region.world_size)
    if not gathered_keys.in_tiles(query.device):
        options, score_mod, sinks = _as_functions(call)
        out, lse = gathered_keys.attend_gathered(
            region, (query, key, value), (queries, keys), mask, score_mod, torch_flex, **options
        )
        return _with_sinks(out, lse, sinks)
    return flex_all_gather_attention(
        query,
        key,
        value,
        group=resolve(region.group),
        layout=queries.layout,
        kv_layout=keys.layout,
        mask_mod=mask.as_mask_mod() if mask.is_function else None,
        block_mask=mask.whole_blocks,
        score_mod=score_mod,
        method=region.method,
        dropout_seed=seed_of_attention(region, query.device) if scoring["dropout_p"] > 0 else None,
        **scoring,
    )


def _as_functions(
    call: _Call,
) -> tuple[dict[str, Any], Modifier | None, torch.Tensor | None]:
    """Returns options of `flex_attention`, soft cap and bias as a `score_mod`, and the sinks."""
    options = call.scoring
    if options["dropout_p"]:
        raise NotImplementedError(
            f"{call.op}: dropout_p is not supported with a mask that only a function describes, in "
            "compiled code and on GPUs"
        )
    softcap, bias = options["softcap"], options["bias"]
    rest = {"scale": options["scale"], "enable_gqa": options["enable_gqa"]}
    if softcap is None and bias is None:
        return rest, call.score_mod, options["sinks"]
    zero = 0 if bias is None else call.region.whole_length(call.tensors[0].shape[2]) - 1

    def changed(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[h, kv - q + zero]

    return rest, changed, options["sinks"]


def _with_sinks(
    out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None
) -> Attended:
    """Adds a key without a value to each row, which only takes a share of the weights."""
    if sinks is None or lse is None:
        return out, lse
    of_rows = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - of_rows)
    return out * share.unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, of_rows)
