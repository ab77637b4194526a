"""Attention of new tokens to a cache of keys and values that is spread over the ranks.

Every rank has the same queries and its own part of the keys, of any length. It attends to these,
and merges the results of all ranks by log-sum-exp, in rank order. Only one result for each query
travels, however long the cache is.

Shapes: query (B, H, S, E), key (B, G, K, E), value (B, G, K, V); K differs from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from symm_cp import runtime
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.attention import kernels, native_tiles
from symm_cp.ops.attention.checks import check_tensors
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.scoring import Scoring, TileMask
from symm_cp.ops.attention.tiles import additive, dense_features
from symm_cp.ops.common import OnRank, count_attention_run, kernel_and_fake, name_of
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.op import ONE_BY_ONE, NoGradient, Op, arguments, declare
from symm_cp.runtime.calls import GatherIntoCall
from symm_cp.runtime.exchange import exchanged, traced
from symm_cp.tensors.dtypes import FLOATING, wide
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

_OP = "spread_cache_attention"
SCATTERED = "spread_cache_attention_scattered"  # declared in spread_cache_heads.py
#: What differs from token to token: see `Op.free`.
FREE = {"key": 2, "value": 2, "mask": 3, "key_positions": 0, "first_query": None}
# The most bytes of a rank's results in one exchange. Bounds the memory for all ranks' results, and
# lets a fast rank begin its next queries while its peers are still behind.
_CHUNK_BYTES = 2 << 20

#: The fields of `Options`, in a schema.
OPTIONS = (
    "Tensor? mask=None, Tensor? key_positions=None, SymInt? first_query=None, "
    "SymInt? window_left=None, float? scale=None, float? softcap=None, Tensor? sinks=None"
)


class Options(NamedTuple):
    """The arguments behind the group's name."""

    mask: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    first_query: int | None = None
    window_left: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def scoring(self, query: torch.Tensor) -> Scoring:
        """Returns how scores follow from products."""
        return Scoring(scale=factor_of(query, self.scale), softcap=self.softcap)

    def text(self, *more: object) -> str:
        """Returns what the ranks compare; plans put in the `first_query` of each call."""
        first = "" if self.first_query is None else f"first_query={self.first_query} "
        details = self.window_left, self.scale, self.softcap, self.sinks is not None
        return f"{first}{(*more, *details)}"


def _check_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> None:
    whole = (*query.shape[:3], key.shape[2])
    fits = mask.dim() == 4 and all(
        own in (1, size) for own, size in zip(mask.shape, whole, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{_OP}: mask has shape {list(mask.shape)}, must be {list(whole)} or have ones "
            "instead of some: (batch, heads, queries, this rank's keys)"
        )
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise TypeError(f"{_OP}: mask is {mask.dtype}, must be bool or floating")
    if mask.device != query.device:
        raise ValueError(f"{_OP}: mask is on {mask.device} and query on {query.device}")


def _check_positions(query: torch.Tensor, key: torch.Tensor, options: Options) -> None:
    _, positions, first_query, window_left, *_ = options
    if (positions is None) != (first_query is None):
        raise ValueError(
            f"{_OP}: key_positions and first_query={first_query} must be given together"
        )
    if window_left is not None and (positions is None or window_left < 0):
        raise ValueError(
            f"{_OP}: {window_left=} must not be negative, and requires key_positions and "
            "first_query"
        )
    if positions is None:
        return
    if positions.dtype != torch.int64 or list(positions.shape) != [key.shape[2]]:
        raise ValueError(
            f"{_OP}: key_positions is {positions.dtype} {list(positions.shape)}, must be "
            f"torch.int64 [{key.shape[2]}]: one for each of this rank's keys, ascending"
        )
    if positions.device != query.device:
        raise ValueError(
            f"{_OP}: key_positions is on {positions.device} and query on {query.device}"
        )


def _check_sinks(query: torch.Tensor, sinks: torch.Tensor) -> None:
    if list(sinks.shape) != [query.shape[1]] or sinks.device != query.device:
        raise ValueError(
            f"{_OP}: sinks has shape {list(sinks.shape)} on {sinks.device}, must be "
            f"[{query.shape[1]}] on {query.device}: one for each head of query"
        )
    if sinks.dtype not in FLOATING:
        raise TypeError(f"{_OP}: sinks is {sinks.dtype}, must be floating")


def check_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> None:
    """Raises `ValueError` or `TypeError` for arguments that do not fit."""
    check_tensors(_OP, query, key, value, enable_gqa=True)
    if query.shape[3] == 0 or value.shape[3] == 0:
        raise ValueError(
            f"{_OP}: query {list(query.shape)} and value {list(value.shape)} must have features"
        )
    if options.mask is not None:
        _check_mask(query, key, options.mask)
    _check_positions(query, key, options)
    softcap = options.softcap
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{_OP}: {softcap=} must be positive and finite; None is no cap")
    if options.sinks is not None:
        _check_sinks(query, options.sinks)


def _check_no_gradient(mask: torch.Tensor | None) -> None:
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{_OP}: mask has no gradient: detach it")


def _spread_cache_attention(
    place: OnRank,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group_name: str,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = Options(*given)
    check_arguments(query, key, value, options)
    group = place.group
    if group is None:
        shape = (*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
        return query.new_empty(shape), lse
    count_attention_run()
    details = f"{options.text()} heads={key.shape[1]} features={value.shape[3]}"
    name = name_of(_OP, query.dtype, query.shape, details)
    merged, ranks = Merged(query, query.shape[1], value.shape[3]), group.world_size
    for begin, rows in _chunks(query, value):
        work = partial(attend, query, key, value, options, begin, rows)
        packed = traced(group, "produce", name, work)
        parts = packed.unsqueeze(0)
        if ranks > 1:
            parts = new_result(packed, (ranks, *packed.shape))
            split = Split.equal(1, ranks)
            runtime.run(GatherIntoCall(group, [packed.unsqueeze(0)], [parts], split, name))
        with exchanged():
            merged.add(parts, begin)
    with exchanged():
        merged.add_sinks(options.sinks)
        return merged.result()


def _chunks(query: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields the first query and the number of queries of each exchange."""
    B, H, S, _ = query.shape
    row = B * H * (value.shape[3] + 1) * wide(query.dtype).itemsize
    most = max(1, _CHUNK_BYTES // max(1, row)) if query.device.type == "cpu" else max(1, S)
    for begin in range(0, max(1, S), most):
        yield begin, min(most, S - begin)


def _visible(query: torch.Tensor, options: Options) -> torch.Tensor | None:
    """Which keys the queries see by position, (S, K); None: all."""
    _, positions, first_query, window_left, *_ = options
    if positions is None or first_query is None:
        return None
    rows = torch.arange(first_query, first_query + query.shape[2], device=query.device)
    behind = rows.unsqueeze(1) - positions
    visible = behind >= 0
    return visible if window_left is None else visible & (behind <= window_left)


def additive_mask(query: torch.Tensor, options: Options) -> torch.Tensor | None:
    """Combines the mask and the positions into one additive mask; None if there is neither."""
    mask, visible = options.mask, _visible(query, options)
    if mask is None and visible is None:
        return None
    if mask is None or visible is None or mask.dtype == torch.bool:
        both = [each for each in (mask, visible) if each is not None]
        joined = both[0] if len(both) == 1 else both[0] & both[1]
        return additive(joined, query.dtype) if joined.dtype == torch.bool else joined
    return mask.masked_fill(visible.logical_not(), -torch.inf)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    begin: int = 0,
    rows: int | None = None,
) -> torch.Tensor:
    """Attends with some queries to this rank's keys, which may be free arguments of the op.

    Returns (B, H, rows, V + 1), the log-sum-exp after the features.
    """
    rows = query.shape[2] if rows is None else rows
    scoring, positions = options.scoring(query), options.key_positions
    dtype, features = wide(query.dtype), value.shape[3]
    packed = new_result(query, (*query.shape[:2], rows, features + 1), dtype)
    out, lse = packed[..., :features], packed[..., features]
    if query.device.type == "cpu":
        torch.ops.symm_cp.attend_to_part(
            query, key, value, *options[:4], scoring.scale, scoring.softcap, begin, out, lse
        )
        return packed
    if positions is not None and bool((positions.diff() <= 0).any()):
        raise ValueError(f"{_OP}: key_positions must ascend")
    out.zero_()
    lse.fill_(-torch.inf)
    if query.numel() > 0 and key.shape[2] > 0:
        tile_mask = TileMask(mask=additive_mask(query, options))
        query, key, value = (dense_features(tensor) for tensor in (query, key, value))
        native_tiles.attend(query, key, value, scoring, tile_mask, out, lse)
    return packed


class Merged:
    """Attention merged over the keys of ranks: no key so far."""

    def __init__(self, query: torch.Tensor, heads: int, features: int) -> None:
        dtype, (B, _, S, _) = wide(query.dtype), query.shape
        self._dtype = query.dtype
        self.out = new_result(query, (B, heads, S, features), dtype).zero_()
        self.lse = new_result(query, (B, heads, S), dtype).fill_(-torch.inf)

    def add(self, parts: torch.Tensor, begin: int = 0) -> None:
        """Adds results of `attend`, one for each rank, for the queries from `begin` on."""
        out, lse = (whole.narrow(2, begin, parts.shape[3]) for whole in (self.out, self.lse))
        for part in parts:
            kernels.merge(out, lse, part[..., :-1], part[..., -1])

    def add_sinks(self, sinks: torch.Tensor | None) -> None:
        """Adds sinks, which have no values."""
        if sinks is not None and self.lse.numel() > 0:
            of_sinks = sinks.to(self.lse.dtype)[None, :, None].expand_as(self.lse)
            kernels.merge(self.out, self.lse, torch.zeros_like(self.out), of_sinks)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output in the dtype of the query, and its log-sum-exp."""
        return self.out.to(self._dtype), self.lse


_kernel, _fake = kernel_and_fake(_spread_cache_attention)


def cache_types(t: Any, query: Any, key: Any, value: Any, **rest: Any) -> Any:
    """Describes attention of all heads to a cache that is spread along its positions."""
    t.ignore(rest)
    text = "attend({}: R, {}, {}) -> R"
    out = t.from_shards(text, "bhq_,bh__,bh_e->bhqe", query, key, value, dim=2)
    return out, t.local("", "bhqe->bhq", out)


declare(
    Op(
        name=_OP,
        types=cache_types,
        schema=(
            f"(Tensor query, Tensor key, Tensor value, str group_name, {OPTIONS})"
            " -> (Tensor out, Tensor logsumexp)"
        ),
        kernel=_kernel,
        fake=_fake,
        gradient=NoGradient(
            "attend to a cache under torch.no_grad(), or with scatter_heads=True; "
            "all_gather_attention has gradients"
        ),
        autocast=autocast.cast_query_key_value,
        vmap=ONE_BY_ONE,
        example=lambda on: arguments(
            on.ones(1, 4, 2, 6), on.rand(1, 2, 3 + on.rank, 6), on.rand(1, 2, 3 + on.rank, 5),
            on.group_name,
        ),
        free=FREE,
    )
)  # fmt: skip


@entry_point(words={SCATTERED: _OP})
def spread_cache_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: GroupLike,
    mask: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    first_query: int | None = None,
    window_left: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scatter_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to keys and values that are spread over ranks, with the same queries on all ranks.

    Same result as attention to the keys and values of all ranks, for decoding over a cache that is
    spread over ranks::

        keys, values, masks = (all_gather_tensor(each) for each in (key, value, mask))
        F.scaled_dot_product_attention(query, keys, values, masks, scale=scale, enable_gqa=True)
        # [:, rank * H // W : (rank + 1) * H // W] with scatter_heads

    Args:
        query: (B, H, S, E), equal on all ranks.
        key, value: (B, G, K, E) and (B, G, K, V), this rank's; G divides H. K may differ from rank
            to rank, and be 0.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        mask: visible keys of this rank (bool), or numbers to add to their scores; (B, H, S, K),
            where any dimension may be 1.
        key_positions: (K,) of int64, ascending: the positions of this rank's keys in the sequence.
            With them, attention is causal: query i, at position `first_query` + i, sees no later
            key, nor any more than `window_left` positions before it.
        scale, softcap: as in `all_gather_attention`; equal on all ranks, like `first_query`.
        sinks: (H,), a logit for each head that takes a part of the weights; equal on all ranks.
        scatter_heads: return this rank's H / W heads only, as tensor parallelism needs them for the
            output projection; W must divide H. 1 / W of the results travels. With `key_positions`
            the backward pass makes a mask of S x K numbers.

    Returns the output (B, H, S, V), and its log-sum-exp (B, H, S) in float32 or float64, both
    contiguous, with the same bits on all ranks: results are merged in rank order, in float32 for
    16-bit types. A query that sees no key gets zeros and -inf. Makes one all-gather (with
    `scatter_heads`, all-to-all) of a result for each query. With `scatter_heads` once
    differentiable: each rank gets the gradients of its keys and values, and its part of those of
    `query` and `sinks`, to be summed over ranks; else there is no gradient. Raises `ValueError` or
    `TypeError` for arguments that do not fit, before any communication; `RuntimeError` when a peer
    fails or disagrees.
    Source: split-key decoding (flash-decoding), with the parts on different ranks; for
    `scatter_heads`, Bhatia et al., "Helix Parallelism" (2025).
    """
    if scatter_heads:
        _check_no_gradient(mask)
    result: tuple[torch.Tensor, torch.Tensor] = direct(SCATTERED if scatter_heads else _OP)(
        query, key, value, group_name(group), mask, key_positions, first_query, window_left, scale,
        softcap, sinks,
    )  # fmt: skip
    return result
