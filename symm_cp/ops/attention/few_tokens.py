"""Attention of few tokens, planned once for each kind of arguments; csrc/ops/attention.cpp runs it.

One exchange gathers keys and values, which takes less time than the steps of a pipeline in Python.
Whether a call is small enough depends only on what all ranks share: the dtype and the shapes of all
keys and values, and the options.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from symm_cp.ops.attention import native_tiles
from symm_cp.ops.attention.methods import ROTATE_METHODS
from symm_cp.ops.attention.options import Options
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import additive
from symm_cp.ops.common import group_of
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import Tile, most_parts

FORWARD = "fused_all_gather_attention"
BACKWARD = "fused_all_gather_attention_backward"
#: The most bytes of all keys and values that travel in one exchange.
WHOLE_BYTES = 2**21
# The most pairs of a query and a key for which one call of torch's kernel with a mask takes less
# time than calls without the hidden keys. Larger masks would take much memory, too.
_MASKED_PAIRS = 2**14
# Below this number of keys, torch's kernel treats a row with NaN scores like one that sees no key.
_TORCHS_KEYS = 16
_NO_LIMIT = -(2**63)

IN_PYTHON, ALL, MASKED, TILES = range(4)


class Plan(NamedTuple):
    """How native code computes a call: see `Plan` of csrc/ops/attention.cpp."""

    form: int
    lengths: list[int]
    tiles: list[int]
    wide: bool
    mask: torch.Tensor
    blind: torch.Tensor
    call_name: str


_NONE = torch.empty(0, device="cpu")
_PIPELINED = Plan(IN_PYTHON, [], [], False, _NONE, _NONE, "")


def plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group_name: str, **options: Any
) -> Plan:
    """Plans a forward pass without tensors as options; raises `ValueError` or `TypeError`."""
    return _plan(FORWARD, query, key, value, group_name, options)


def plan_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    group_name: str,
    *,
    grad_logsumexp: torch.Tensor | None = None,
    sinks_grad: bool = True,
    bias_grad: bool = True,
    **options: Any,
) -> Plan:
    """Plans a backward pass without tensors as options; raises `ValueError` or `TypeError`."""
    return _plan(BACKWARD, query, key, value, group_name, options)


def _plan(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group_name: str,
    options: dict[str, Any],
) -> Plan:
    parsed = Options(**options)
    if parsed.method != "allgather":
        return _PIPELINED
    group = group_of(group_name)
    spec = AttentionSpec.of(op, group, query, key, value, **options)
    B, G, _, E = key.shape
    whole = 2 * B * spec.layout.length * G * E * key.element_size()
    if not 0 < whole <= WHOLE_BYTES or spec.rescores or not isinstance(spec.mask, Mask):
        return _PIPELINED
    rows, keys = query.shape[2], spec.layout.length
    tiles = _tiles_of_all(spec, group.rank, rows)
    form = _form(tiles, rows, keys)
    if op == BACKWARD and query.dtype.itemsize == 2 and native_tiles.has_blocks(query.dtype):
        form = TILES  # torch's kernel takes twice as long
    blind = _seeing(tiles, rows).logical_not_()
    return Plan(
        form,
        list(spec.layout.lengths),
        [number for tile in tiles for number in _numbers(tile)],
        most_parts(tiles) > 2 and query.dtype.itemsize == 2,
        additive(_visible(tiles, rows, keys), query.dtype) if form == MASKED else _NONE,
        blind if bool(blind.any()) else _NONE,
        # The rotate method may change between calls, and has no effect here: gradients are added in
        # rank order.
        replace(spec, method=ROTATE_METHODS[0]).call_name(op, key).decode(),
    )


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


def _form(tiles: list[Tile], rows: int, keys: int) -> int:
    if keys < _TORCHS_KEYS:
        return TILES
    if sum(tile.pairs for tile in tiles) == rows * keys:
        return ALL
    return MASKED if rows * keys <= _MASKED_PAIRS else TILES


def _range(end: int) -> torch.Tensor:
    return torch.arange(end, device="cpu")


def _visible(tiles: list[Tile], rows: int, keys: int) -> torch.Tensor:
    """Returns the mask of visible keys, (rows, keys)."""
    visible = torch.zeros(rows, keys, dtype=torch.bool, device="cpu")
    for tile in tiles:
        part = visible[tile.q_begin : tile.q_end, tile.k_begin : tile.k_end]
        offset = _range(part.shape[1]) - _range(part.shape[0]).unsqueeze(1)
        seen = torch.ones_like(part)
        if tile.low is not None:
            seen &= offset >= tile.low
        if tile.high is not None:
            seen &= offset <= tile.high
        part |= seen
    return visible


def _seeing(tiles: list[Tile], rows: int) -> torch.Tensor:
    """Returns which queries see at least one key, (rows,)."""
    seeing = torch.zeros(rows, dtype=torch.bool, device="cpu")
    for tile in tiles:
        row, keys = _range(tile.q_end - tile.q_begin), tile.k_end - tile.k_begin
        first = 0 if tile.low is None else (row + tile.low).clamp_min(0)
        last = keys - 1 if tile.high is None else (row + tile.high).clamp_max(keys - 1)
        seeing[tile.q_begin : tile.q_end] |= torch.as_tensor(first <= last, device="cpu")
    return seeing


def _numbers(tile: Tile) -> tuple[int, ...]:
    low, high = (_NO_LIMIT if limit is None else limit for limit in (tile.low, tile.high))
    return tile.q_begin, tile.q_end, tile.k_begin, tile.k_end, low, high
