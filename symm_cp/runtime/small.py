"""Small calls of the patterns on CPU: one exchange before or after the kernels.

A pattern that works shard by shard takes many steps in Python; plans (csrc/plan) record and replay
an exchange and the ops of kernels. Results are those of the pattern, to the bit: shards and partial
sums lie at multiples of 64 bytes, and kernels run in the pattern's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from symm_cp import env
from symm_cp.group.memory import Group
from symm_cp.runtime.calls import CombineCall, ExchangeCall, GatherCall, RelayCall, ScatterCall
from symm_cp.runtime.exchange import (
    all_gather_shards,
    all_to_all,
    exchanged,
    reduce_scatter_into,
    traced,
    unfinished,
)
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets, scratch
from symm_cp.tensors.shards import viewing

#: The most bytes of the slots of all ranks.
MOST_BYTES = 1 << 20

#: Whether small calls are made this way; the same on all ranks. See `symm_cp.tuning.forced`.
enabled = True


def serves(group: Group, slot_bytes: int) -> bool:
    """Whether a call is made this way; the same on all ranks."""
    if not 0 < group.world_size * slot_bytes <= MOST_BYTES:
        return False
    return enabled and env.algorithm() is None and env.attention() is None


def gather(call: GatherCall) -> None:
    """Gathers all shards, then consumes them."""
    group, shards, gathered, split = call.group, call.shards, call.gathered, call.split
    view_at = viewing(all_gather_shards(group, shards, call.name))
    with exchanged():
        for source in (group.rank, *peers(group.rank, group.world_size)):
            parts = list(shards.own)
            if source != group.rank or not shards.contiguous:
                parts = shards.views(source, view_at, source * shards.nbytes)
            if gathered is not None and split is not None:
                split.of(source, gathered).copy_(parts[0])
            traced(group, "consume", call.name, partial(call.consume, parts, source), source)


def combine(call: CombineCall) -> None:
    """Gathers all shards, then combines them."""
    group, shards = call.group, call.shards
    view_at = viewing(all_gather_shards(group, shards, call.name))
    ranks = range(group.world_size)
    gathered = [shards.views(source, view_at, source * shards.nbytes)[0] for source in ranks]
    traced(group, "combine", call.name, partial(call.combine, gathered))


def scatter(call: ScatterCall) -> None:
    """Produces for all ranks, then reduce-scatters."""
    group, out, offsets = call.group, call.out, part_offsets(call.nbytes)
    view_at = viewing(scratch(out, offsets[-1]))
    with unfinished(group):
        for target in (*peers(group.rank, group.world_size), group.rank):
            memory = view_at(offsets[target], call.partials[target], out.dtype)
            traced(group, "produce", call.name, partial(call.produce, target, memory), target)
    parts = view_at(0, (offsets[-1] // out.itemsize,), out.dtype)
    reduce_scatter_into(group, parts, offsets, call.nbytes, out, call.name, mean=call.mean)


def exchange(call: ExchangeCall) -> None:
    """Gives to all peers and works on local data, then exchanges, then takes from all peers."""
    group, rank, name = call.group, call.group.rank, call.name
    given, taken = list(call.sizes[rank]), [sizes[rank] for sizes in call.sizes]
    given[rank] = taken[rank] = 0
    sent, arrived = (_new_parts(sizes, call.device) for sizes in (given, taken))
    with unfinished(group):
        for peer in peers(rank, group.world_size):
            traced(group, "give", name, partial(call.give, peer, sent[peer]), peer, before=True)
        traced(group, "consume", name, call.consume, before=True)
    all_to_all(group, sent[-1], given, arrived[-1], taken, name)
    for peer in peers(rank, group.world_size):
        traced(group, "take", name, partial(call.take, peer, arrived[peer]), peer)


def reporting(call: RelayCall) -> RelayCall:
    """Returns a relay whose turns are exchanges (`Runtime._relay`), with errors of its steps told.

    The last rank of the chain makes its last step after the last exchange.
    """
    last = (0 if call.reverse else call.group.world_size - 1), len(call.shapes) - 1

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        ended = (call.group.rank, piece) == last
        with exchanged() if ended else unfinished(call.group):
            call.step(piece, received, passed)

    return call._replace(step=step)


def _new_parts(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Returns aligned parts of these sizes in bytes and, last, the memory that holds them."""
    offsets = part_offsets(sizes)
    memory = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
    parts = zip(offsets, sizes, strict=False)
    return [*(memory.narrow(0, offset, size) for offset, size in parts), memory]
