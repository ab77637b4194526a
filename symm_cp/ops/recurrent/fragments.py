"""The fragments that make up a rank's part of a sequence, in the order of the sequence.

A state passes the ranks in *sweeps*: from rank 0 up, from the last rank down, up again, and so on.
In each sweep a rank has one fragment of its part, or none. Parts in rank order take one sweep, the
head-tail layout takes two: ranks exchange only the states, and the rows that convolutions see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from symm_cp.ops.common import rank_in, world_size_of
from symm_cp.ops.recurrent.halo import exchange_halo
from symm_cp.schedule.layout import SequenceLayout


class SweepPart(NamedTuple):
    """The `length` positions from `start` on that a rank has in a sweep."""

    rank: int
    sweep: int
    start: int
    length: int


class Fragments(NamedTuple):
    """A rank's fragments, one for each sweep.

    `runs`: if a layout is given, the non-empty fragments of all ranks, in the order of the
    sequence. `agreed`: numbers that must be equal on all ranks.
    """

    starts: list[int]
    lengths: list[int]
    total: int
    runs: list[SweepPart]
    agreed: list[int]


def fragments_of(
    op: str,
    sizes: Sequence[int] | None,
    layout: SequenceLayout | None,
    length: int,
    group_name: str,
) -> Fragments:
    """Returns the fragments of this rank's `length` positions.

    Without `layout`, parts are in rank order, of `sizes` positions, by default equally long. Raises
    `ValueError` or `NotImplementedError` for arguments that do not fit.
    """
    ranks, rank = world_size_of(group_name), rank_in(group_name)
    if layout is None:
        lengths = [length] * ranks if sizes is None else list(sizes)
        if len(lengths) != ranks or lengths[rank] != length:
            raise ValueError(
                f"{op}: sizes={lengths} must have {ranks} numbers, for rank {rank} the {length} "
                "positions of its part"
            )
        return Fragments([sum(lengths[:rank])], [length], sum(lengths), [], lengths)
    if sizes is not None:
        raise ValueError(f"{op}: got sizes and layout, needs at most one of them")
    order, each = list(layout.chunk_order), len(layout.chunk_order) // layout.world_size
    if layout.world_size != ranks:
        raise ValueError(f"{op}: layout is of {layout.world_size} ranks, the group has {ranks}")
    held = [order[r * each : (r + 1) * each] for r in range(ranks)]
    if any(chunks != sorted(chunks) for chunks in held):
        raise NotImplementedError(
            f"{op}: layout has chunk_order={order}, ranks must hold their chunks in ascending order"
        )
    runs = runs_of(order, list(layout.chunk_lengths), ranks)
    sweeps = runs[-1].sweep + 1 if runs else 1
    own = {run.sweep: run for run in runs if run.rank == rank}
    starts = [own[sweep].start if sweep in own else 0 for sweep in range(sweeps)]
    lengths = [own[sweep].length if sweep in own else 0 for sweep in range(sweeps)]
    if sum(lengths) != length:
        raise ValueError(
            f"{op}: layout gives rank {rank} {sum(lengths)} positions, its part has {length}"
        )
    agreed = [*order, *layout.chunk_lengths]
    return Fragments(starts, lengths, sum(layout.chunk_lengths), runs, agreed)


def runs_of(order: list[int], lengths: list[int], ranks: int) -> list[SweepPart]:
    """Returns chunks in sequence order, each in the first sweep that can still reach its rank."""
    owners = [0] * len(order)
    for place, chunk in enumerate(order):
        owners[chunk] = place * ranks // len(order)
    runs, sweep, last, start = [], 0, -1, 0
    for owner, length in zip(owners, lengths, strict=True):
        if length:
            ahead = owner > last if sweep % 2 == 0 else owner < last
            sweep, last = (sweep if ahead else sweep + 1), owner
            runs.append(SweepPart(owner, sweep, start, length))
        start += length
    return runs


def halos(x: torch.Tensor, fragments: Fragments, rows: int, group_name: str) -> torch.Tensor:
    """Returns the `rows` before each fragment, (B, channels, sweeps, rows), zeros before the first.

    x is (B, channels, S). The last rows of all fragments travel to all ranks.
    """
    ranks, rank = world_size_of(group_name), rank_in(group_name)
    ends = []
    for part in x.split(fragments.lengths, 2):
        end = part[..., max(0, part.shape[2] - rows) :]
        ends.append(torch.nn.functional.pad(end, (rows - end.shape[2], 0)))
    own = torch.stack(ends).unsqueeze(0)  # (1, sweeps, B, channels, rows)
    # Each rank is one position of this sequence, so the halo holds the rows of all other ranks.
    around = exchange_halo(own, ranks - 1, ranks - 1, 0, group=group_name)
    everything = around.narrow(0, ranks - 1 - rank, ranks)
    flat = everything.permute(2, 3, 0, 1, 4).flatten(2)
    with_zero = torch.nn.functional.pad(flat, (0, 1))
    before = _columns(fragments, rank, rows, flat.shape[2])
    columns = torch.tensor(before, dtype=torch.int64, device=x.device)
    found = with_zero.index_select(2, columns)
    return found.view(*x.shape[:2], len(fragments.lengths), rows)


def _columns(fragments: Fragments, rank: int, rows: int, zero: int) -> list[int]:
    """Returns the columns of the `rows` rows before each fragment of a rank.

    Columns are last rows of fragments, ordered by rank, sweep and row; `zero` is a column of zeros,
    for positions before the first.
    """
    sweeps = len(fragments.lengths)
    before = [zero] * rows
    found = [before] * sweeps
    for run in fragments.runs:
        if run.rank == rank:
            found[run.sweep] = before
        begin = (run.rank * sweeps + run.sweep + 1) * rows
        last = range(begin - min(rows, run.length), begin)
        before = [*before, *last][len(last) :]
    return [column for columns in found for column in columns]
