"""`_gather_sequence`: gives graphs one tensor of all positions of a sequence.

The op gathers the ranks' parts, and reads the layouts (layouts.py) when it runs.

Shapes: B samples, S positions of the whole sequence.
"""

from __future__ import annotations

import zlib

import torch

from symm_cp import runtime
from symm_cp.ops.attention.layouts import decoded, encoded, layout_held
from symm_cp.ops.common import call_signature, group_of
from symm_cp.ops.op import LEFT_TO_TORCH, NoGradient, Op, arguments, declare, untouched
from symm_cp.runtime.calls import GatherCall
from symm_cp.schedule.layout import head_tail, sequential

_GATHER = "_gather_sequence"


def _gather_kernel(
    shard: torch.Tensor, layouts: torch.Tensor, length: int, group_name: str
) -> torch.Tensor:
    """Gathers the columns of all ranks as one tensor (B, S), S = `length`."""
    group = group_of(group_name)
    known = decoded(_GATHER, layouts, group.world_size)
    layout = layout_held(_GATHER, known, shard.shape[1], group.rank, group.world_size, head_tail)
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
    name = call_signature(_GATHER, shard[:, :0], detail=f"{length} positions, layout {digest:08x}")
    shapes = [((shard.shape[0], held),) for held in layout.lengths]
    # Uses the channel of attention: if a peer refuses its next attention, this call fails as well.
    runtime.run(GatherCall(group, [shard.contiguous()], consume, name, shapes=shapes))
    return whole


def _gather_fake(
    shard: torch.Tensor, layouts: torch.Tensor, length: int, group_name: str
) -> torch.Tensor:
    return shard.new_empty(shard.shape[0], length)


declare(
    Op(
        name=_GATHER,
        types=lambda t, shard, layouts, **_: (t.ignore(layouts), t.all_gather(shard, 1))[1],
        schema="(Tensor shard, Tensor layouts, SymInt length, str group_name) -> Tensor",
        kernel=_gather_kernel,
        fake=_gather_fake,
        gradient=NoGradient("positions and masks have none"),
        autocast=untouched,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 4),
            encoded((sequential(4 * on.world_size, on.world_size),)),
            4 * on.world_size,
            on.group_name,
        ),
        mixes_devices=True,  # layouts are on CPU
        internal=True,
    )
)
