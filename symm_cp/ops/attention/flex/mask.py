"""Masks of flex attention, evaluated with global indices one tile at a time.

Shapes: B batch, H query heads, Q rows of queries and K of keys in a tile. A mask is (B or 1,
H or 1, Q, K): size 1 where it does not depend on that index.

A `BlockMask` has precedence: a query sees all keys of a full block, the keys of a partial block for
which `mask_mod` is true, and no others. torch's kernels interpret it in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from symm_cp.schedule.layout import SequenceLayout, Span
from symm_cp.schedule.tiles import Tile

#: A `mask_mod` or `score_mod`.
Modifier: TypeAlias = Callable[..., torch.Tensor]

#: States of a block in a block mask, and of a run of keys under a mask.
EMPTY, PARTIAL, FULL = 0, 1, 2

# The largest tile: its mask fits into the processor's cache, and a causal mask wastes few rows.
_ROWS, _KEYS = 256, 2048
#: The most elements to evaluate at once.
AREA = _ROWS * _KEYS
# Granularity of runs of keys: shorter ones are not worth a kernel call of their own.
_CELL = 128


def over_indices(modifier: Modifier, *, score: bool = False) -> Modifier:
    """Maps a function of scalar indices over b (B,), h (H,), q_idx (Q,), kv_idx (K,).

    Returns (B, H, Q, K); with `score` the first argument is a tensor of that shape. A dimension
    that the result does not depend on has stride 0.
    """
    for index in (3, 2, 1, 0):
        dims = tuple(0 if index == place else None for place in range(4))
        modifier = torch.vmap(modifier, in_dims=((0,) if score else ()) + dims)

    def mapped(*arguments: torch.Tensor) -> torch.Tensor:
        # Imported here, as the import takes a second. It makes `tensor[q_idx]` work under vmap.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            return modifier(*arguments)

    return mapped


def evaluate(
    mask_mod: Modifier,
    batch: int,
    heads: int,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    head_offset: int = 0,
) -> torch.Tensor:
    """Returns which keys are visible: (B or 1, H or 1, Q, K) of bool.

    The first head is number `head_offset`.
    """
    device = q_idx.device
    if mask_mod is noop_mask:
        return torch.ones(1, 1, len(q_idx), len(kv_idx), dtype=torch.bool, device=device)
    b = torch.arange(batch, device=device)
    h = torch.arange(head_offset, head_offset + heads, device=device)
    visible = over_indices(mask_mod)(b, h, q_idx, kv_idx)
    if visible.dtype != torch.bool:
        raise TypeError(f"mask_mod: must return a bool tensor, returned {visible.dtype}")
    for dim in (0, 1):
        if visible.stride(dim) == 0:
            visible = visible.narrow(dim, 0, 1)
    return visible


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Returns which columns are among the first `counts` indices: (..., rows, columns) of bool."""
    columns = max(columns, indices.shape[-1])
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    listed = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    listed.scatter_(-1, torch.where(counted, indices, columns).long(), True)
    return listed[..., :columns]


def block_states(block_mask: BlockMask) -> torch.Tensor:
    """Returns the state of each block of a block mask: (B or 1, H or 1, rows, columns) of int8."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    states = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns).to(torch.int8)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
        states.masked_fill_(full, FULL)
    return states


def check_lengths(block_mask: BlockMask, queries: int, keys: int) -> None:
    """Raises `ValueError` unless a block mask is that of the whole sequence."""
    lengths = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    if lengths != (queries, keys):
        raise ValueError(
            f"flex_attention: block_mask is for {lengths} queries and keys; within "
            f"context_parallel it must be that of the whole sequence, {(queries, keys)}. Models of "
            "transformers make masks of padding or packed sequences for this rank's part only: "
            "pass the model to context_parallel(model=...), or pass it a BlockMask of the whole "
            "sequence as attention_mask"
        )


def within(
    visible: torch.Tensor,
    states: torch.Tensor,
    sizes: tuple[int, int],
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """Applies blocks to a mask: all keys of full blocks are visible, and none of empty ones."""
    blocks = states[:, :, q_idx // sizes[0]][..., kv_idx // sizes[1]]
    return (visible | (blocks == FULL)) & (blocks != EMPTY)


def extents(copies: int) -> tuple[int, int]:
    """Returns the rows and keys of the largest tile, if `copies` of it are evaluated at once."""
    rows, keys = _ROWS, _KEYS
    while copies * rows * keys > AREA and keys > 1:
        if keys > 2 * _CELL or rows <= 16:
            keys //= 2
        else:
            rows //= 2
    return rows, keys


def cut(tile: Tile, copies: int) -> Iterator[Tile]:
    """Cuts a tile into tiles that are small enough to evaluate `copies` of each at once."""
    rows, keys = extents(copies)
    for q_begin in range(tile.q_begin, tile.q_end, rows):
        for k_begin in range(tile.k_begin, tile.k_end, keys):
            q_end, k_end = min(q_begin + rows, tile.q_end), min(k_begin + keys, tile.k_end)
            yield Tile(q_begin, q_end, k_begin, k_end)


def positions(spans: tuple[Span, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the position in the sequence of each row of a rank, made on the device."""
    parts = [torch.arange(span.start, span.start + span.length, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def _strips(spans: tuple[Span, ...], limit: int) -> list[tuple[int, int]]:
    """Cuts rows where runs of positions end, at most `limit` rows each; joins short runs."""
    strips: list[tuple[int, int]] = []
    joins = False
    for span in spans:
        end, short = span.row + span.length, span.length < _CELL
        if joins and short and end - strips[-1][0] <= limit:
            strips[-1] = (strips[-1][0], end)
        else:
            strips += [(row, min(row + limit, end)) for row in range(span.row, end, limit)]
        joins = short
    return strips


def _runs(some: torch.Tensor, every: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields runs of keys that no query sees, some see, or all see, as (begin, end, state).

    `some` and `every` say for each key whether any query or all queries see it.
    """
    keys = len(some)
    some = F.pad(some, (0, -keys % _CELL)).view(-1, _CELL).any(1)
    every = F.pad(every, (0, -keys % _CELL), value=True).view(-1, _CELL).all(1)
    states = (some.int() + (some & every).int()).tolist()
    begin = 0
    for state, cells in itertools.groupby(states):
        end = min(keys, begin + _CELL * len(list(cells)))
        yield begin, end, state
        begin = end


def _joined(
    masked_tiles: Iterator[tuple[Tile, torch.Tensor | None]],
) -> Iterator[tuple[Tile, torch.Tensor | None]]:
    """Joins full tiles of the same queries with adjacent keys."""
    pending: Tile | None = None
    for tile, visible in masked_tiles:
        if visible is None and pending is not None and pending.k_end == tile.k_begin:
            pending = Tile(tile.q_begin, tile.q_end, pending.k_begin, tile.k_end)
            continue
        if pending is not None:
            yield pending, None
        pending = tile if visible is None else None
        if visible is not None:
            yield tile, visible
    if pending is not None:
        yield pending, None


class MaskTiles:
    """The tiles of one rank's queries and each rank's keys that are not empty under a mask.

    Decides once which tiles are empty and which are full; evaluates masks on each use.
    """

    def __init__(
        self,
        mask_mod: Modifier | None,
        block_mask: BlockMask | None,
        heads: tuple[int, int],
        queries: SequenceLayout,
        keys: SequenceLayout,
        rank: int,
        head_offset: int,
        block_heads: tuple[int, int],
    ) -> None:
        """`block_heads`: the range of these heads in the block mask."""
        self._mask_mod = noop_mask if mask_mod is None else mask_mod
        self.queries, self._heads, self._keys, self._rank = queries, heads, keys, rank
        self.head_offset = head_offset
        self._states: torch.Tensor | None = None
        self._sizes = (1, 1)
        self._q_idx = positions(queries.spans(rank))
        self._decided: dict[int, list[tuple[Tile, bool]]] = {}
        if block_mask is not None:
            self._sizes = block_mask.BLOCK_SIZE
            self._states = block_states(block_mask)
            if self._states.shape[1] > 1:
                self._states = self._states[:, slice(*block_heads)]
            if self._mask_mod is noop_mask:
                self._states = self._states.clamp(max=1) * FULL
        self._copies = self._probe() if queries.length and keys.length and all(heads) else 1

    def _probe(self) -> int:
        # Evaluates the mask for one pair, on every rank and before any communication: shows whether
        # it depends on batch and head, and whether it raises.
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        shape = self._evaluated(first, first).shape[:2]
        if self._states is not None:
            shape = torch.broadcast_shapes(shape, self._states.shape[:2])
        return int(shape.numel())

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self._heads[1]

    @property
    def all_full(self) -> bool:
        """Whether there is no mask."""
        return self._mask_mod is noop_mask and self._states is None

    def q_idx(self, tile: Tile) -> torch.Tensor:
        """Returns the positions of a tile's queries."""
        return self._q_idx[tile.q_begin : tile.q_end]

    def kv_idx(self, owner: int) -> torch.Tensor:
        """Returns the positions of a rank's keys."""
        return positions(self._keys.spans(owner))

    def tiles(self, owner: int) -> Iterator[tuple[Tile, torch.Tensor | None]]:
        """Yields the tiles of a rank's keys, each with its mask, or None if it is full."""
        kv_idx = self.kv_idx(owner)
        if len(kv_idx) == 0 or len(self._q_idx) == 0 or not all(self._heads):
            return
        if self.all_full:
            yield Tile(0, len(self._q_idx), 0, len(kv_idx)), None
            return
        if owner in self._decided:
            for tile, full in self._decided[owner]:
                yield tile, None if full else self._visible(tile, kv_idx)
            return
        decided = []
        for strip in _strips(self.queries.spans(self._rank), extents(self._copies)[0]):
            for tile, visible in _joined(self._strip(*strip, kv_idx)):
                decided.append((tile, visible is None))
                yield tile, visible
        self._decided[owner] = decided

    def _strip(
        self, q_begin: int, q_end: int, kv_idx: torch.Tensor
    ) -> Iterator[tuple[Tile, torch.Tensor | None]]:
        """Yields the tiles of some rows."""
        limit = extents(self._copies)[1]
        for begin, end, state in self._by_blocks(q_begin, q_end, kv_idx):
            if state == FULL:
                yield Tile(q_begin, q_end, begin, end), None
            if state != PARTIAL:
                continue
            for first in range(begin, end, limit):
                visible = self._visible(
                    Tile(q_begin, q_end, first, min(end, first + limit)), kv_idx
                )
                some, every = visible.any(2).flatten(0, 1).any(0), visible.all(2).flatten(0, 1)
                for k_begin, k_end, run in _runs(some, every.all(0)):
                    tile = Tile(q_begin, q_end, first + k_begin, first + k_end)
                    if run != EMPTY:
                        yield tile, None if run == FULL else visible[..., k_begin:k_end]

    def _by_blocks(
        self, q_begin: int, q_end: int, kv_idx: torch.Tensor
    ) -> Iterator[tuple[int, int, int]]:
        """Yields runs of keys of some rows by their state in the block mask alone."""
        if self._states is None:
            yield 0, len(kv_idx), PARTIAL
            return
        blocks = torch.unique(self._q_idx[q_begin:q_end] // self._sizes[0])
        states = self._states[:, :, blocks].flatten(0, 2)
        columns = kv_idx // self._sizes[1]
        yield from _runs((states.amax(0) != EMPTY)[columns], (states.amin(0) == FULL)[columns])

    def _evaluated(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return evaluate(self._mask_mod, *self._heads, q_idx, kv_idx, self.head_offset)

    def _visible(self, tile: Tile, kv_idx: torch.Tensor) -> torch.Tensor:
        q_idx, kv_idx = self.q_idx(tile), kv_idx[tile.k_begin : tile.k_end]
        visible = self._evaluated(q_idx, kv_idx)
        if self._states is not None:
            visible = within(visible, self._states, self._sizes, q_idx, kv_idx)
        return visible
