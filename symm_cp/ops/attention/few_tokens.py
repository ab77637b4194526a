"""Attention of few tokens on CPU: one exchange gathers keys and values, one pass attends to them.

That takes less time than the steps of a pipeline. In the backward pass another exchange adds up the
gradients. Whether a call is small enough depends only on what all ranks share: the dtype and the
shapes of all keys and values, and the options.

Shapes: query (B, H, S_q, E), key and value (B, G, S_k, E), this rank's shards.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from symm_cp import runtime, tuning
from symm_cp.cuda import plans
from symm_cp.group.memory import Group
from symm_cp.ops.attention import native_tiles
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.methods import ROTATE_METHODS
from symm_cp.ops.attention.options import Options
from symm_cp.ops.attention.pipeline import Tensors, heads_in_rows
from symm_cp.ops.attention.scoring import Gradients, Scoring, TileMask, in_band
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import additive, dense_features, rows_first
from symm_cp.runtime import exchange
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import Tile, most_parts
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

#: The most bytes of all keys and values that travel in one exchange.
WHOLE_BYTES = 2**22
# The most pairs of a query and a key for which one call of torch's kernel with a mask takes less
# time than calls without the hidden keys. Larger masks would take much memory, too.
_MASKED_PAIRS = 2**14
# The same where this project's kernels are faster than torch's: on an AMD EPYC, 8 heads of 512
# tokens take two ranks 1.4 ms forward, 3.0 with torch's kernel.
_MASKED_PAIRS_OF_BLOCKS = 2**10
# Below this number of keys, torch's kernel treats a row with NaN scores like one that sees no key.
_TORCHS_KEYS = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ALL, MASKED, TILES = "all", "masked", "tiles"


class Work(NamedTuple):
    """How a rank attends to all keys, which lie in rank order."""

    form: str
    tiles: tuple[Tile, ...]
    #: Whether tiles are merged in float32.
    wide: bool
    #: (S_q, keys), added to scores; for `MASKED`.
    mask: torch.Tensor | None
    #: (S_q,), the rows that see no key; None if there are none.
    blind: torch.Tensor | None


def serves(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
    options: Options,
) -> bool:
    """Returns whether these functions run a call."""
    if options.method != "allgather" or spec.rescores or not isinstance(spec.mask, Mask):
        return False
    if any(isinstance(option, torch.Tensor) for option in vars(options).values()):
        return False
    B, G, _, E = key.shape
    whole = 2, B, G, spec.layout.length, E
    few = math.prod(whole) * key.element_size() <= WHOLE_BYTES
    if not few or key.dtype not in _DTYPES or key.shape != value.shape:
        return False
    if tuning.forced_algorithm(tuning.ATTENTION_ALGORITHMS) is not None:
        return False
    return runtime.at_once(group, key, whole)


@plans.constant
def work_of(spec: AttentionSpec, rank: int, rows: int, dtype: torch.dtype, backward: bool) -> Work:
    """Returns how a rank with `rows` queries attends."""
    keys = spec.layout.length
    tiles = _tiles_of_all(spec, rank, rows)
    form = _form(tiles, rows, keys, dtype, backward)
    blind = _seeing(tiles, rows).logical_not_()
    return Work(
        form,
        tuple(tiles),
        most_parts(tiles) > 2 and dtype.itemsize == 2,
        additive(_visible(tiles, rows, keys), dtype) if form == MASKED else None,
        blind if bool(blind.any()) else None,
    )


def _name(op: str, spec: AttentionSpec, key: torch.Tensor) -> bytes:
    # The rotate method may change between calls, and has no effect here: gradients are added in
    # rank order.
    return replace(spec, method=ROTATE_METHODS[0]).call_name(op, key)


def _gather(
    group: Group, spec: AttentionSpec, key: torch.Tensor, value: torch.Tensor, name: bytes
) -> Tensors:
    if group.world_size == 1:
        return dense_features(key), dense_features(value)
    split = Split(tuple(spec.layout.lengths), 3)
    both = exchange.all_gather_pair(group, (key, value), split, name)
    return both[0], both[1]


def attend(
    op: str,
    group: Group,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and its log-sum-exp. Collective."""
    work = work_of(spec, group.rank, query.shape[2], query.dtype, False)
    name = _name(op, spec, key)
    all_keys = _gather(group, spec, key, value, name)
    query = dense_features(query)
    results: list[torch.Tensor] = []

    def compute() -> None:
        if query.numel() == 0:
            results.extend((torch.empty_like(query), _no_lse(query)))
        elif work.form == TILES:
            results.extend(_attend_by_tiles(spec, work, query, all_keys))
        else:
            results.extend(_attend_at_once(spec, work, query, all_keys))

    exchange.traced(group, "consume", name, compute)
    return results[0], results[1]


def _no_lse(query: torch.Tensor) -> torch.Tensor:
    return query.new_full(query.shape[:3], -torch.inf, dtype=wide(query.dtype))


def _attend_at_once(
    spec: AttentionSpec, work: Work, query: torch.Tensor, all_keys: Tensors
) -> Tensors:
    part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *all_keys, 0.0, False, attn_mask=work.mask, scale=spec.scale
    )
    out = part if part.stride() == query.stride() else torch.empty_like(query).copy_(part)
    lse = lse.contiguous()
    if work.blind is not None:
        lse.masked_fill_(work.blind, -torch.inf)
    return out, lse


def _attend_by_tiles(
    spec: AttentionSpec, work: Work, query: torch.Tensor, all_keys: Tensors
) -> Tensors:
    out = torch.empty_like(query, dtype=wide(query.dtype) if work.wide else query.dtype)
    lse = _no_lse(query)
    scoring = Scoring(scale=factor_of(query, spec.scale))
    for tile in work.tiles:
        rows, keys = slice(tile.q_begin, tile.q_end), slice(tile.k_begin, tile.k_end)
        key, value = (each[:, :, keys] for each in all_keys)
        mask = TileMask(low=tile.low, high=tile.high)
        native_tiles.attend(
            query[:, :, rows], key, value, scoring, mask, out[:, :, rows], lse[:, :, rows]
        )
    if work.blind is not None:
        out.masked_fill_(work.blind.unsqueeze(-1), 0.0)
    return (torch.empty_like(query).copy_(out) if work.wide else out), lse


def attend_backward(
    op: str,
    group: Group,
    spec: AttentionSpec,
    tensors: Tensors,
    saved: Tensors,
) -> Tensors:
    """Returns the gradients of `tensors`: query, key and value. Collective.

    `saved` are the gradient of the output, the output and its log-sum-exp.
    """
    query, key, value = tensors
    work = work_of(spec, group.rank, query.shape[2], query.dtype, True)
    name = _name(op, spec, key)
    all_keys = _gather(group, spec, key, value, name)
    grads: list[torch.Tensor] = []
    exchange.traced(
        group,
        "consume",
        name,
        lambda: grads.extend(_gradients_of_all(spec, work, query, all_keys, saved)),
        before=True,  # another exchange
    )
    own = grads[1:]
    if group.world_size > 1:
        own = _sum_over_ranks(group, spec, key, grads[1:], name)
    dtype = query.dtype
    return tuple(_as_result(grad, dtype) for grad in (grads[0], *own))


def _gradients_of_all(
    spec: AttentionSpec,
    work: Work,
    query: torch.Tensor,
    all_keys: Tensors,
    saved: Tensors,
) -> Tensors:
    """Returns the gradients of this rank's queries, and their part of all keys' and values'."""
    grad_out, query, out = map(dense_features, (saved[0], query, saved[1]))
    if query.numel() == 0:
        of_keys = _zeros(all_keys)
        return torch.empty_like(query), of_keys[0], of_keys[1]
    # The strides that torch's kernel returns.
    lse = saved[2].to(wide(query.dtype)).transpose(1, 2).contiguous().transpose(1, 2)
    if work.blind is not None:
        lse = lse.masked_fill(work.blind, torch.inf)  # zero weights
    if work.form != TILES:
        found: Tensors = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, *all_keys, out, lse, 0.0, False,
            attn_mask=work.mask, scale=spec.scale,
        )  # fmt: skip
        return found
    of_keys, of_query = _zeros(all_keys), rows_first(query, query.shape, wide(query.dtype)).zero_()
    inner = native_tiles.inner_products(grad_out, out)
    scoring = Scoring(scale=factor_of(query, spec.scale))
    for tile in work.tiles:
        rows, keys = slice(tile.q_begin, tile.q_end), slice(tile.k_begin, tile.k_end)
        key, value = (each[:, :, keys] for each in all_keys)
        native_tiles.add_gradients(
            grad_out[:, :, rows], query[:, :, rows], key, value, lse[:, :, rows],
            inner[:, :, rows], scoring, TileMask(low=tile.low, high=tile.high),
            Gradients(of_query[:, :, rows], of_keys[0, :, :, keys], of_keys[1, :, :, keys]),
        )  # fmt: skip
    return of_query, of_keys[0], of_keys[1]


def _zeros(all_keys: Tensors) -> torch.Tensor:
    key = all_keys[0]
    return new_result(key, (2, *key.shape), wide(key.dtype)).zero_()


def _sum_over_ranks(
    group: Group, spec: AttentionSpec, key: torch.Tensor, of_all: list[torch.Tensor], name: bytes
) -> list[torch.Tensor]:
    """Adds up the gradients of this rank's keys and values from all ranks' queries."""
    B, G, _, E = key.shape
    shapes = [(2, B, G, length, E) for length in spec.layout.lengths]
    sizes = [math.prod(shape) for shape in shapes]
    parts = new_result(key, (sum(sizes),), wide(key.dtype))
    begins = itertools.accumulate(spec.layout.lengths, initial=0)
    for part, shape, begin in zip(parts.split_with_sizes(sizes), shapes, begins, strict=False):
        for to, grads in zip(part.view(shape), of_all, strict=True):
            to.copy_(grads[:, :, begin : begin + shape[3]])
    own = exchange.reduce_scatter(group, parts, shapes, name, mean=False)
    return [own[0], own[1]]


def _as_result(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if grad.dtype == dtype:
        return heads_in_rows(grad, own_memory=True)
    return rows_first(grad, grad.shape, dtype).copy_(grad)


def _tiles_of_all(spec: AttentionSpec, rank: int, rows: int) -> list[Tile]:
    """The tiles of a rank's queries and all keys, which lie in rank order."""
    layout = spec.layout
    begins = itertools.accumulate(layout.lengths, initial=0)
    moved = [
        replace(tile, k_begin=begin + tile.k_begin, k_end=begin + tile.k_end)
        for owner, begin in zip(range(layout.world_size), begins, strict=False)
        for tile in spec.tiles(rank, owner, rows)
    ]
    whole = Tile(0, rows, 0, layout.length)
    return [whole] if sum(tile.pairs for tile in moved) == whole.pairs else moved


def _form(tiles: list[Tile], rows: int, keys: int, dtype: torch.dtype, backward: bool) -> str:
    if keys < _TORCHS_KEYS:
        return TILES
    most, own = _MASKED_PAIRS, native_tiles.has_blocks(dtype)
    if own:  # torch's backward pass of 16-bit types takes twice as long
        most = 0 if backward and dtype.itemsize == 2 else _MASKED_PAIRS_OF_BLOCKS
    if sum(tile.pairs for tile in tiles) == rows * keys:
        return TILES if own else ALL
    return MASKED if rows * keys <= most else TILES


def _visible(tiles: list[Tile], rows: int, keys: int) -> torch.Tensor:
    """Returns the mask of visible keys, (rows, keys)."""
    visible = torch.zeros(rows, keys, dtype=torch.bool, device="cpu")
    for tile in tiles:
        part = visible[tile.q_begin : tile.q_end, tile.k_begin : tile.k_end]
        rows_of_tile, keys_of_tile = part.shape
        part |= in_band(rows_of_tile, keys_of_tile, tile.low, tile.high, part.device)
    return visible


def _seeing(tiles: list[Tile], rows: int) -> torch.Tensor:
    """Returns which queries see at least one key, (rows,)."""
    seeing = torch.zeros(rows, dtype=torch.bool, device="cpu")
    for tile in tiles:
        row = torch.arange(tile.q_end - tile.q_begin, device="cpu")
        keys = tile.k_end - tile.k_begin
        first = 0 if tile.low is None else (row + tile.low).clamp_min(0)
        last = keys - 1 if tile.high is None else (row + tile.high).clamp_max(keys - 1)
        seeing[tile.q_begin : tile.q_end] |= torch.as_tensor(first <= last, device="cpu")
    return seeing
