"""What graphs know of the whole sequence: ops that read the layouts (layouts.py) when they run.

    _gather_sequence     a tensor of all positions, from the ranks' parts of it
    _held_positions      the positions of this rank's rows

Shapes: B samples, S positions of the whole sequence.
"""

from __future__ import annotations

import torch

from symm_cp.ops.attention.flex.mask import positions
from symm_cp.ops.attention.layouts import decoded, layout_held
from symm_cp.ops.common import group_of, lib
from symm_cp.ops.low_contention import low_contention_all_gather
from symm_cp.schedule.layout import SequenceLayout

_GATHER = "_gather_sequence"
_POSITIONS = "_held_positions"

lib.define(f"{_GATHER}(Tensor shard, Tensor layouts, SymInt length, str group_name) -> Tensor")
lib.define(f"{_POSITIONS}(Tensor layouts, SymInt rows, str group_name) -> Tensor")


def _gather_kernel(
    shard: torch.Tensor, layouts: torch.Tensor, length: int, group_name: str
) -> torch.Tensor:
    """Returns the (B, S) tensor of which each rank holds some columns, S = `length`."""
    group = group_of(group_name)
    known = decoded(_GATHER, layouts, group.world_size)
    layout = layout_held(_GATHER, known, shard.shape[1], group.rank, group.world_size)
    if (layout.length, layout.lengths[group.rank]) != (length, shard.shape[1]):
        raise ValueError(
            f"{_GATHER}: this rank has {shard.shape[1]} of {length} positions, but the load "
            f"balancer gives it {layout.lengths[group.rank]} of {layout.length}"
        )
    lengths = layout.lengths
    gathered = low_contention_all_gather(
        shard.t().contiguous(),
        group=group_name,
        sizes=None if len(set(lengths)) == 1 else lengths,
    )
    return in_sequence_order(gathered, layout).t().contiguous()


def in_sequence_order(gathered: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """Returns the rows that ranks hold, rank after rank, in the order of the sequence."""
    pieces: list[tuple[int, int, int]] = []
    begin = 0
    for rank, length in enumerate(layout.lengths):
        for span in layout.spans(rank):
            pieces.append((span.start, begin + span.row, span.length))
        begin += length
    pieces.sort()
    return torch.cat([gathered[row : row + length] for _, row, length in pieces])


def _gather_fake(
    shard: torch.Tensor, layouts: torch.Tensor, length: int, group_name: str
) -> torch.Tensor:
    return shard.new_empty(shard.shape[0], length)


def _positions_kernel(layouts: torch.Tensor, rows: int, group_name: str) -> torch.Tensor:
    """Returns the position in the sequence of each of this rank's rows: (rows,) of int64."""
    group = group_of(group_name)
    known = decoded(_POSITIONS, layouts, group.world_size)
    layout = layout_held(_POSITIONS, known, rows, group.rank, group.world_size)
    if layout.lengths[group.rank] != rows:
        raise ValueError(
            f"{_POSITIONS}: this rank has {rows} positions, but the load balancer gives it "
            f"{layout.lengths[group.rank]}"
        )
    return positions(layout.spans(group.rank), "cpu")


def _positions_fake(layouts: torch.Tensor, rows: int, group_name: str) -> torch.Tensor:
    return layouts.new_empty(rows)


def register() -> None:
    """Adds the kernels and the fake kernels; the results have no gradient."""
    for name, kernel, fake in (
        (_GATHER, _gather_kernel, _gather_fake),
        (_POSITIONS, _positions_kernel, _positions_fake),
    ):
        lib.impl(name, kernel, "CPU")
        lib.impl(name, fake, "Meta")
