"""What graphs know of the whole sequence: ops that read the layouts (layouts.py) when they run.

    _gather_sequence     a tensor of all positions, from the ranks' parts of it
    _held_positions      the positions of this rank's rows

Shapes: B samples, S positions of the whole sequence.
"""

from __future__ import annotations

import zlib

import torch

from symm_cp import runtime
from symm_cp.ops.attention.flex.mask import positions
from symm_cp.ops.attention.layouts import decoded, layout_held
from symm_cp.ops.common import group_of, lib, register_kernel, what_is

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
    whole = shard.new_empty(shard.shape[0], length)

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        for span in layout.spans(owner):
            part = shards[0].narrow(1, span.row, span.length)
            whole.narrow(1, span.start, span.length).copy_(part)

    digest = zlib.crc32(repr(layout).encode())
    name = what_is(_GATHER, shard[:, :0], detail=f"{length} positions, layout {digest:08x}")
    shapes = [((shard.shape[0], held),) for held in layout.lengths]
    # On the channel of attention: a peer that refuses its next attention is heard of here, too.
    on = runtime.of(shard, group)
    on.all_gather_and_consume(group, [shard.contiguous()], consume, name, shapes=shapes)
    return whole


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
    register_kernel(_GATHER, _gather_kernel)
    lib.impl(_POSITIONS, _positions_kernel, "CPU")
    # Not as kernels for "Meta", for which tensors must be on one device; the layouts are on CPU.
    for name, fake in ((_GATHER, _gather_fake), (_POSITIONS, _positions_fake)):
        torch.library.register_fake(f"symm_mem::{name}", fake, lib=lib)
