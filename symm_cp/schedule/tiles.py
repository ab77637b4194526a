"""The part of attention that a mask leaves to compute, as tiles of query rows and key rows.

A tile is one call of an attention kernel: some rows of this rank's queries against some rows of
one rank's keys, for some samples of a batch. Tiles omit keys that a mask excludes, and most tiles
need no mask: they are full, or causal from their first row and key. Documents, ranges of keys and
causal masks are cut exactly; only sliding windows need tiles with a band.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from symm_cp.schedule.layout import SequenceLayout, Span
from symm_cp.schedule.mask import Keys, Mask, MaskRegion, overlapping, within

# Query rows in a part of a tile with a band: bounds the memory of its mask and the wasted work.
_BAND_ROWS = 256


@dataclass(frozen=True)
class Tile:
    """Rows [q_begin, q_end) of queries against rows [k_begin, k_end) of keys.

    Key k_begin + j is seen by query q_begin + i when low <= j - i <= high (None: no limit), in the
    samples [b_begin, b_end) of the batch (None: to its end).
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    low: int | None = None
    high: int | None = None
    b_begin: int = 0
    b_end: int | None = None

    @property
    def samples(self) -> slice:
        """The samples, as an index."""
        return slice(self.b_begin, self.b_end)

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.low is None and self.high is None

    @property
    def causal(self) -> bool:
        """Query i sees keys 0 to i: the causal mask of kernels, aligned at the upper left."""
        return self.low is None and self.high == 0

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs of a sample in which the query sees the key."""
        rows, keys = self.q_end - self.q_begin, self.k_end - self.k_begin
        if self.full:
            return rows * keys
        upper = rows * keys if self.high is None else _pairs_below(rows, keys, self.high)
        return upper - (0 if self.low is None else _pairs_below(rows, keys, self.low - 1))


def _pairs_below(rows: int, keys: int, high: int) -> int:
    """The number of pairs (i, j) of a tile with j - i <= high."""
    # Row i sees i + high + 1 keys, but none or all where that is out of range.
    first = min(rows, max(0, -high))
    whole = max(first, min(rows, keys - high - 1))
    return (whole - first) * (first + whole + 2 * high + 1) // 2 + (rows - whole) * keys


def squares(tile: Tile) -> tuple[Tile, ...]:
    """Splits a causal tile into square and full ones; returns any other tile unchanged.

    Kernels disagree about the alignment of a causal mask in a tile that is not square.
    """
    rows, keys = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin
    if not tile.causal or rows == keys:
        return (tile,)
    both = min(rows, keys)
    cut, end = tile.q_begin + both, tile.k_begin + both
    square = replace(tile, q_end=cut, k_end=end)
    # Rows beyond the keys see all keys; keys beyond the rows are seen by no row.
    return (square,) if rows < keys else (square, replace(tile, q_begin=cut, high=None))


def in_rows(tile: Tile, rows: int) -> tuple[Tile, ...]:
    """Cuts a tile into tiles of at most `rows` rows, without the keys that none of them sees."""
    total = tile.q_end - tile.q_begin
    return tuple(
        found
        for begin in range(0, total, rows)
        for found in _trimmed(_of_rows(tile, begin, min(begin + rows, total)))
    )


def in_bands(tile: Tile, rows: int = _BAND_ROWS) -> tuple[Tile, ...]:
    """Cuts a tile with a left limit so that little of it is masked: for kernels that take masks.

    Returns any other tile unchanged.
    """
    if tile.low is None:
        return (tile,)
    return tuple(found for band in in_rows(tile, rows) for found in _banded(band))


def _of_keys(tile: Tile, first: int, end: int) -> Tile:
    """Cuts a tile to its keys [first, end), and drops limits that exclude none of them."""
    rows, keys = tile.q_end - tile.q_begin, end - first
    low = None if tile.low is None else tile.low - first
    high = None if tile.high is None else tile.high - first
    return replace(
        tile,
        k_begin=tile.k_begin + first,
        k_end=tile.k_begin + end,
        low=None if low is None or low <= 1 - rows else low,
        high=None if high is None or high >= keys - 1 else high,
    )


@lru_cache(maxsize=1024)
def tiles(
    layout: SequenceLayout,
    mask: Mask,
    rank: int,
    owner: int,
    queries: SequenceLayout | None = None,
    rows: int | None = None,
) -> tuple[Tile, ...]:
    """The tiles of a rank's queries against the keys of rank `owner`, for one sample.

    Queries are spread like the keys unless `queries` is given. If the mask ignores positions, there
    may be any number of query rows: `rows`.
    """
    queries = layout if queries is None else queries
    spans = queries.spans(rank)
    if rows is not None and not mask.relates_positions:
        spans = (Span(0, rows, 0),) if rows else ()
    elif rank == owner and queries == layout and mask.is_causal and _ascends(spans):
        rows = layout.lengths[rank]
        return (Tile(0, rows, 0, rows, high=0),) if rows else ()
    return _tiles_of(spans, layout.spans(owner), mask)


@lru_cache(maxsize=256)
def held_by_others(layout: SequenceLayout, rank: int) -> tuple[tuple[int, Span], ...]:
    """The keys of all other ranks in the order of the sequence: the rank and span of each run."""
    held = (
        (owner, span)
        for owner in range(layout.world_size)
        if owner != rank
        for span in layout.spans(owner)
        if span.length > 0
    )
    return tuple(sorted(held, key=lambda run: run[1].start))


@lru_cache(maxsize=256)
def tiles_of_others(
    layout: SequenceLayout,
    mask: Mask,
    rank: int,
    queries: SequenceLayout | None = None,
    rows: int | None = None,
) -> tuple[Tile, ...]:
    """Like `tiles`, for the keys of all other ranks, in the order of `held_by_others`.

    The keys that a query sees are then in few tiles: in one, with a causal mask and a chunk for
    each rank.
    """
    queries = layout if queries is None else queries
    spans = queries.spans(rank)
    if rows is not None and not mask.relates_positions:
        spans = (Span(0, rows, 0),) if rows else ()
    held, row = [], 0
    for _, span in held_by_others(layout, rank):
        held.append(replace(span, row=row))
        row += span.length
    return _tiles_of(spans, held, mask)


def _tiles_of(spans: Sequence[Span], held: Sequence[Span], mask: Mask) -> tuple[Tile, ...]:
    """The tiles of spans of queries against spans of keys."""
    held = sorted(held, key=_start_of)
    starts = [span.start for span in held]
    found: list[Tile] = []
    seen: dict[int, list[tuple[Span, Keys]]] = {}
    for span in spans:
        for region in mask.regions_of(span):
            if region.first not in seen:
                seen[region.first] = sorted(_held(held, starts, region), key=_row_of)
            if seen[region.first]:
                q = within(span, region.first, region.end)
                found += (tile for k, keys in seen[region.first] for tile in _cut(q, k, keys))
    return tuple(_join_rows(_join_keys(found)))


def _held(
    spans: Sequence[Span], starts: Sequence[int], region: MaskRegion
) -> Iterator[tuple[Span, Keys]]:
    """Yields the parts of ascending spans that queries of a region see."""
    for keys in region.keys:
        place = max(0, bisect_right(starts, keys.first) - 1)
        for span in itertools.islice(spans, place, None):
            if span.start >= keys.end:
                break
            part = within(span, keys.first, keys.end)
            if part.length > 0:
                yield part, keys


def _start_of(span: Span) -> int:
    return span.start


def _row_of(held: tuple[Span, Keys]) -> int:
    return held[0].row


def for_samples(masks: Sequence[Mask], tiles_of: Callable[[Mask], Sequence[Tile]]) -> list[Tile]:
    """The tiles of a batch with a mask for each sample; neighbours with equal masks share tiles."""
    found: list[Tile] = []
    begin = 0
    for mask, group in itertools.groupby(masks):
        end = begin + len(list(group))
        found += [replace(tile, b_begin=begin, b_end=end) for tile in tiles_of(mask)]
        begin = end
    return found


def pairs(layout: SequenceLayout, mask: Mask, rank: int) -> int:
    """The number of (query, key) pairs that a rank computes: its share of the work."""
    return sum(
        tile.pairs
        for owner in range(layout.world_size)
        for tile in tiles(layout, mask, rank, owner)
    )


@lru_cache(maxsize=256)
def seen_by_peers(
    layout: SequenceLayout, masks: tuple[Mask, ...], queries: SequenceLayout | None = None
) -> tuple[tuple[int, int], ...]:
    """For each rank, the first row and the end of its keys that queries of other ranks may see.

    `masks` are the masks of the samples. The limits may be too wide.
    """
    queries = layout if queries is None else queries
    ranks = range(layout.world_size)
    seen = [[mask.seen_by(queries.spans(rank)) for mask in masks] for rank in ranks]
    found = []
    for owner in ranks:
        parts = [
            within(span, ranges[0][0], ranges[-1][1])
            for span in layout.spans(owner)
            for rank in ranks
            if rank != owner
            for of_mask in seen[rank]
            if (ranges := overlapping(of_mask, span.start, span.start + span.length))
        ]
        ends = [part.row + part.length for part in parts]
        found.append((min(part.row for part in parts), max(ends)) if parts else (0, 0))
    return tuple(found)


def most_parts(tiles: Sequence[Tile]) -> int:
    """The largest number of tiles that a row of queries is in."""
    most = 0
    for _, group in itertools.groupby(sorted(tiles, key=_sample), key=_sample):
        ends = [change for t in group for change in ((t.q_begin, 1), (t.q_end, -1))]
        most = max([most, *itertools.accumulate(step for _, step in sorted(ends))])
    return most


def _sample(tile: Tile) -> int:
    return tile.b_begin


def _ascends(spans: tuple[Span, ...]) -> bool:
    # If rows ascend by position, causal by row is causal by position, even with gaps.
    return all(a.start < b.start for a, b in itertools.pairwise(spans))


def _cut(q: Span, k: Span, keys: Keys) -> Iterator[Tile]:
    """The tiles of two spans, with the band's limits in rows instead of positions."""
    shift = k.start - q.start
    low = None if keys.left is None else -keys.left - shift
    high = None if keys.right is None else keys.right - shift
    whole = Tile(q.row, q.row + q.length, k.row, k.row + k.length, low, high)
    if low is None or low <= -(q.length - 1):  # the left limit excludes no key
        yield from _below(whole)
        return
    # Rows that see a key: earlier rows see only keys before this span, later rows only behind it.
    first = 0 if high is None else max(0, -high)
    end = min(q.length, k.length - low)
    if first < end:
        yield from _trimmed(_of_rows(whole, first, end))


def _of_rows(tile: Tile, first: int, end: int) -> Tile:
    """Cuts a tile to its rows [first, end), with all of its keys."""
    low, high = (side if side is None else side + first for side in (tile.low, tile.high))
    rows = {"q_begin": tile.q_begin + first, "q_end": tile.q_begin + end}
    return replace(tile, **rows, low=low, high=high)


def _trimmed(tile: Tile) -> Iterator[Tile]:
    """A tile without the first and last keys that none of its rows sees."""
    rows, keys = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin
    first = 0 if tile.low is None else max(0, tile.low)
    end = keys if tile.high is None else min(keys, tile.high + rows)
    if first < end:
        yield _of_keys(tile, first, end)


def _below(tile: Tile) -> Iterator[Tile]:
    """Splits "j <= i + high" into full tiles and one that is causal from its first row."""
    rows, keys, high = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin, tile.high
    if high is None or high >= keys - 1:
        yield Tile(tile.q_begin, tile.q_end, tile.k_begin, tile.k_end)
        return
    first = max(0, -high)  # rows before it see nothing
    if first >= rows:
        return
    seen = max(0, high)  # keys before it are seen by all
    if seen:
        yield Tile(tile.q_begin, tile.q_end, tile.k_begin, tile.k_begin + seen)
    # The diagonal is a square; rows below it see all its keys.
    side = min(rows - first, keys - seen)
    q_begin, k_begin = tile.q_begin + first, tile.k_begin + seen
    yield Tile(q_begin, q_begin + side, k_begin, k_begin + side, high=0)
    if q_begin + side < tile.q_end:
        yield Tile(q_begin + side, tile.q_end, k_begin, tile.k_end)


def _banded(tile: Tile) -> Iterator[Tile]:
    """Splits a tile of few rows into the keys that all rows see and the keys before and behind."""
    rows, keys = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin
    middle = 0 if tile.low is None else min(keys, max(0, tile.low + rows - 1))
    until = keys if tile.high is None else min(keys, max(0, tile.high + 1))
    if until - middle < rows:
        yield tile
        return
    for first, end in ((0, middle), (middle, until), (until, keys)):
        if first < end:
            yield _of_keys(tile, first, end)


def _join_keys(found: list[Tile]) -> list[Tile]:
    """Joins full tiles of the same queries with adjoining keys."""
    joined: list[Tile] = []
    for tile in found:
        last = joined[-1] if joined else None
        adjoins = last is not None and (last.q_begin, last.q_end, last.k_end) == (
            tile.q_begin,
            tile.q_end,
            tile.k_begin,
        )
        if last is not None and last.full and tile.full and adjoins:
            joined[-1] = Tile(last.q_begin, last.q_end, last.k_begin, tile.k_end)
        else:
            joined.append(tile)
    return joined


def _join_rows(found: list[Tile]) -> list[Tile]:
    """Joins full tiles of the same keys with adjoining queries."""
    joined: list[Tile] = []
    ends: dict[tuple[int, int, int], int] = {}  # (k_begin, k_end, q_end) -> place in joined
    for tile in found:
        if not tile.full:
            joined.append(tile)
            continue
        place = ends.pop((tile.k_begin, tile.k_end, tile.q_begin), None)
        if place is None:
            place = len(joined)
            joined.append(tile)
        else:
            joined[place] = Tile(joined[place].q_begin, tile.q_end, tile.k_begin, tile.k_end)
        ends[tile.k_begin, tile.k_end, tile.q_end] = place
    return joined
