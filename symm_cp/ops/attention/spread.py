"""The layouts of the keys and the queries of a call over the ranks, from its options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from symm_cp.group.hosts import numbers_of_all
from symm_cp.group.memory import Group
from symm_cp.ops.attention.layouts import decoded, layout_held, layout_of_keys, must_count_keys
from symm_cp.ops.attention.mesh_calls import propagates_failure
from symm_cp.ops.attention.methods import Grid, Method
from symm_cp.ops.attention.options import Options
from symm_cp.ops.common import group_of
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential


def spread_of(
    op: str, group: Group, query: torch.Tensor, key: torch.Tensor, options: Options
) -> tuple[SequenceLayout, SequenceLayout | None]:
    """Returns the layout of keys, and the layout of queries if it matters and differs.

    Raises `ValueError` if the shards of this rank do not fit, or if an option depends on the
    positions of queries and these are not known.
    """
    rows = (query.shape[2], key.shape[2])
    if options.layouts is not None:
        keys, queries = _of_tensor(op, group, rows, options, options.layouts)
    else:
        keys = _layout_of(op, group, rows[1], options.chunk_order, options.chunk_lengths)
        queries = _of_queries(op, group, rows, options)
    if not options.by_position or queries == keys:
        return keys, None
    if queries is not None and queries.length != keys.length and options.of_documents:
        raise ValueError(
            f"{op}: there are {queries.length} queries and {keys.length} keys in the whole "
            f"sequences: {' and '.join(options.of_documents)} require equal lengths"
        )
    return keys, queries


def spread_of_queries(
    op: str,
    group: Group,
    query: torch.Tensor,
    spread: tuple[SequenceLayout, SequenceLayout | None],
    options: Options,
) -> SequenceLayout:
    """Returns the layout of queries, even if their positions do not matter.

    In that case ranks exchange their numbers of queries, unless the options give them: queries of
    another sequence may be as many as the keys on some ranks and not on others. `spread` is the
    result of `spread_of`.
    """
    keys, queries = spread
    if options.by_position:
        return queries or keys
    rows = query.shape[2]
    if options.query_chunk_order is not None or options.query_chunk_lengths is not None:
        order, lengths = options.query_chunk_order, options.query_chunk_lengths
        return _layout_of(op, group, rows, order, lengths, of="query")
    known = [keys]
    if options.layouts is not None:
        known += decoded(op, options.layouts, group.world_size)
    method = Method.of(op, options)
    if method.grid is not None:
        return _queries_over(method.grid, op, group, rows, known)
    return _layout_by_counts(op, group, "queries", rows, known)


def keys_held(
    op: str,
    group: Group,
    rows: tuple[int, int],
    known: Sequence[SequenceLayout],
    *,
    ordered: bool,
) -> SequenceLayout:
    """Returns the layout of keys; `rows` are this rank's numbers of queries and keys.

    `known` are the layouts of known sequences. If nothing depends on the order of keys, and queries
    are spread unequally, keys may belong to another sequence although this rank has as many keys as
    queries: then ranks exchange their numbers of keys.
    """
    if must_count_keys(known, ordered=ordered):
        return _layout_by_counts(op, group, "keys", rows[1], known)
    ranks = group.world_size
    found = layout_of_keys(op, known, rows, group.rank, ranks, head_tail, ordered=ordered)
    return sequential(rows[1] * ranks, ranks) if found is None else found


def _queries_over(
    grid: Grid, op: str, group: Group, rows: int, known: Sequence[SequenceLayout]
) -> SequenceLayout:
    """Returns the layout of queries: exact in this rank's column, totals for other columns.

    First the ranks of a column, then the ranks of a row exchange numbers: a rank that refuses the
    call reports this to its column and its row only. Other columns' totals suffice: the layout
    assigns each to the column's first rank. Collective.
    """
    name, own = f"{op}: numbers of queries", grid.columns[grid.column_of(group.rank)]
    with propagates_failure(grid.keys, calling=grid.heads, mesh=True):
        counts = _numbers_of_all(group_of(grid.heads), name, rows)
    with propagates_failure(grid.heads, calling=grid.keys, mesh=True):
        sums = _numbers_of_all(group_of(grid.keys), name, sum(counts))
    for layout in known:
        of_columns = [sum(layout.lengths[rank] for rank in column) for column in grid.columns]
        if of_columns == sums and [layout.lengths[rank] for rank in own] == counts:
            return layout
    lengths = dict(zip(own, counts, strict=True))
    for column, total in zip(grid.columns, sums, strict=True):
        if column != own:
            lengths[column[0]] = total
    return _layout_with([lengths.get(rank, 0) for rank in range(group.world_size)], ())


def _layout_by_counts(
    op: str, group: Group, noun: str, rows: int, known: Sequence[SequenceLayout]
) -> SequenceLayout:
    """Returns the layout of a sequence with `rows` rows on this rank. Collective."""
    return _layout_with(_numbers_of_all(group, f"{op}: numbers of {noun}", rows), known)


def _numbers_of_all(group: Group, name: str, number: int) -> list[int]:
    """Returns the number of each rank, in rank order. Collective."""
    return [each for (each,) in numbers_of_all(group, name, [number])]


def _layout_with(lengths: list[int], known: Sequence[SequenceLayout]) -> SequenceLayout:
    """Returns the first known layout with these lengths, or else one in rank order."""
    for layout in known:
        if list(layout.lengths) == lengths:
            return layout
    return _layout(len(lengths), tuple(range(len(lengths))), tuple(lengths))


def _of_tensor(
    op: str, group: Group, rows: tuple[int, int], options: Options, layouts: torch.Tensor
) -> tuple[SequenceLayout, SequenceLayout | None]:
    chunks = ("chunk_order", "chunk_lengths", "query_chunk_order", "query_chunk_lengths")
    if any(getattr(options, name) is not None for name in chunks):
        raise ValueError(f"{op}: layouts and chunks are both given, pass only one")
    known = decoded(op, layouts, group.world_size)
    place = (group.rank, group.world_size)
    ordered = bool(options.by_position) or options.key_mask is not None
    keys = keys_held(op, group, rows, known, ordered=ordered)
    if rows[0] == rows[1]:
        return keys, None
    if options.by_position != options.scored_by_position:
        raise _unequal(op, rows, options)
    return keys, layout_held(op, known, rows[0], *place, head_tail) if options.by_position else None


def _of_queries(
    op: str, group: Group, rows: tuple[int, int], options: Options
) -> SequenceLayout | None:
    """Returns the layout of queries if the options give it."""
    order, lengths = options.query_chunk_order, options.query_chunk_lengths
    if order is not None or lengths is not None:
        return _layout_of(op, group, rows[0], order, lengths, of="query")
    if rows[0] != rows[1] and options.by_position:
        raise _unequal(op, rows, options)
    return None


def _unequal(op: str, rows: tuple[int, int], options: Options) -> ValueError:
    names = options.by_position
    return ValueError(
        f"{op}: query has {rows[0]} rows and key {rows[1]}: {' and '.join(names)} "
        f"{'requires' if len(names) == 1 else 'require'} equal lengths, or query_chunk_order or "
        "query_chunk_lengths"
    )


@lru_cache(maxsize=512)
def _layout(world_size: int, order: tuple[int, ...], lengths: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout(world_size, order, lengths)


def _layout_of(
    op: str,
    group: Group,
    rows: int,
    chunk_order: list[int] | None,
    chunk_lengths: list[int] | None,
    *,
    of: str = "key",
) -> SequenceLayout:
    """Returns a sequence's layout; raises `ValueError` if this rank's shard has other rows."""
    prefix, noun = ("", "keys") if of == "key" else ("query_", "queries")
    world_size, rank = group.world_size, group.rank
    count = len(chunk_order or chunk_lengths or range(world_size))
    order = tuple(range(count)) if chunk_order is None else tuple(chunk_order)
    if chunk_lengths is None:
        chunks = max(1, count // world_size)
        if rows % chunks != 0:
            raise ValueError(
                f"{op}: this rank's {rows} {noun} cannot be split into its {chunks} chunks "
                f"equally: pass {prefix}chunk_lengths"
            )
        lengths = (rows // chunks,) * count
    else:
        lengths = tuple(chunk_lengths)
    try:
        layout = _layout(world_size, order, lengths)
    except ValueError as error:
        raise ValueError(f"{op}: {prefix}{error}") from None
    if layout.lengths[rank] != rows:
        raise ValueError(
            f"{op}: {prefix}chunk_lengths give rank {rank} {layout.lengths[rank]} {noun}, {of} has "
            f"{rows}"
        )
    return layout
