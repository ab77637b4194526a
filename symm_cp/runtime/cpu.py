"""Pipelines on CPU: exchanges (exchange.py), with kernels before, between or after them.

Plans (csrc/plan) record and replay the exchanges and the ops of kernels. Shards, messages and
partial sums begin at multiples of 64 bytes, except shards that are read in place or in the caller's
gathered tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from symm_cp.group.hosts import QUESTION, numbers_on_host
from symm_cp.group.memory import Group, has_symmetric, symmetric_place, symmetric_tensor
from symm_cp.native import wire
from symm_cp.runtime import exchange
from symm_cp.runtime import loops as _loops  # noqa: F401 - gives every new group its loops
from symm_cp.runtime.api import Runtime
from symm_cp.runtime.calls import (
    AllReduceCall,
    BoxesCall,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    GatherIntoCall,
    ScatterCall,
)
from symm_cp.runtime.exchange import traced
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import part_offsets, scratch
from symm_cp.tensors.results import contiguous
from symm_cp.tensors.shards import Shards, Split, viewing

#: The most bytes of all ranks' shards that one exchange gathers. Larger shards arrive one after the
#: other, so that one of them takes memory at a time.
GATHERED_BYTES = 4 << 20

#: A rank, the tensors of its shard, and whether peers still wait for an exchange of this rank.
_Arrived = tuple[int, list[torch.Tensor], bool]


class CpuRuntime(Runtime):
    """The runtime for CPU tensors of ranks on one host."""

    def _gather(self, call: GatherCall) -> None:
        if call.group.world_size * call.shards.nbytes <= GATHERED_BYTES:
            consume_at_once(call)
            return
        with call.group.own_lock():  # no other call of this rank comes in between
            places = _places(call.group, call.shards, call.name)
            if places is None:
                shards = _in_turn(call.group, call.shards, call.name, call.gathered, call.split)
            else:
                shards = _in_place(call.group, call.shards, call.name, places)
            _consume(call, shards)

    def _scatter(self, call: ScatterCall) -> None:
        """Produces for all ranks, then reduce-scatters."""
        group, rank, out = call.group, call.group.rank, call.out
        if group.world_size == 1:
            traced(group, "produce", call.name, partial(call.produce, rank, out))
            return
        offsets = part_offsets(call.nbytes)
        view_at = viewing(scratch(out, offsets[-1]))
        for target in (*peers(rank, group.world_size), rank):
            memory = view_at(offsets[target], call.partials[target], out.dtype)
            produce = partial(call.produce, target, memory)
            traced(group, "produce", call.name, produce, target)
        parts = view_at(0, (offsets[-1] // out.itemsize,), out.dtype)
        exchange.reduce_scatter_into(
            group, parts, offsets, call.nbytes, out, call.name, mean=call.mean
        )

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Produces all parts, then all-reduces."""
        group, rank, out, split = call.group, call.group.rank, call.out, call.split
        if split is None:
            traced(group, "produce", call.name, partial(call.produce, rank, out))
        else:
            # Kernels write aligned memory, and the parts of `out` follow one another.
            row = out[:1].nbytes
            sizes = [size * row for size in split.sizes]
            offsets = part_offsets(sizes)
            view_at = viewing(scratch(out, offsets[-1]))
            for target in (*peers(rank, group.world_size), rank):
                shape = tuple(split.shape_of(target, out.shape))
                memory = view_at(offsets[target], shape, out.dtype)
                produce = partial(call.produce, target, memory)
                traced(group, "produce", call.name, produce, target)
                split.of(target, out).copy_(memory)
        exchange.all_reduce_(group, out, call.name, mean=call.mean)

    def _exchange(self, call: ExchangeCall) -> None:
        """Gives to all peers and works on local data, then exchanges, then takes from all peers."""
        group, rank, name = call.group, call.group.rank, call.name
        others = peers(rank, group.world_size)
        given, taken = list(call.sizes[rank]), [sizes[rank] for sizes in call.sizes]
        given[rank] = taken[rank] = 0
        sent, arrived = (_new_parts(sizes, call.device) for sizes in (given, taken))
        for peer in others:
            traced(group, "give", name, partial(call.give, peer, sent[peer]), peer, before=True)
        traced(group, "consume", name, call.consume, before=True)
        exchange.all_to_all(group, sent[-1], given, arrived[-1], taken, name)
        for peer in others:
            traced(group, "take", name, partial(call.take, peer, arrived[peer]), peer)

    def _exchange_boxes(self, call: BoxesCall) -> None:
        exchange.exchange_boxes(call.group, call.packed, call.shard, call.outputs, call.name)

    def _gather_into(self, call: GatherIntoCall) -> None:
        for tensor, output in zip(call.shard, call.outputs, strict=True):
            exchange.all_gather_into(call.group, tensor, output, call.split, call.name)

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        with call.group.own_lock():
            (_add_in_turn if call.ring else _add_at_once)(call)


def consume_at_once(call: GatherCall) -> None:
    """Gathers by one exchange, then calls `consume` for each rank."""
    _consume(call, _at_once(call.group, call.shards, call.name))


def _consume(call: GatherCall, shards: Iterable[_Arrived]) -> None:
    gathered, split = call.gathered, call.split
    for source, parts, pending in shards:
        if gathered is not None and split is not None:
            place = split.of(source, gathered)
            if place.data_ptr() != parts[0].data_ptr():
                place.copy_(parts[0])
        consume = partial(call.consume, parts, source)
        traced(call.group, "consume", call.name, consume, source, before=pending)


def _at_once(group: Group, shards: Shards, name: bytes) -> list[_Arrived]:
    """Gathers all shards by one exchange."""
    rank, others = group.rank, peers(group.rank, group.world_size)
    found: list[_Arrived] = [(rank, [contiguous(tensor) for tensor in shards.own], False)]
    if others:
        view_at = viewing(exchange.all_gather_shards(group, shards, name))
        for peer in others:
            found.append((peer, shards.views(peer, view_at, peer * shards.nbytes), False))
    return found


def _in_turn(
    group: Group,
    shards: Shards,
    name: bytes,
    gathered: torch.Tensor | None = None,
    split: Split | None = None,
) -> Iterator[_Arrived]:
    """Gathers one shard after the other, first tensors to their part of `gathered` if possible."""
    rank, ranks, sizes = group.rank, group.world_size, shards.sizes
    others, own = peers(rank, ranks), [contiguous(tensor) for tensor in shards.own]
    yield rank, own, bool(others)
    memory: torch.Tensor | None = None
    for turn, peer in enumerate(others, 1):
        place = None if gathered is None or split is None else split.of(peer, gathered)
        if place is not None and len(own) == 1 and place.is_contiguous():
            parts = [place]
        else:
            memory = scratch(own[0], shards.nbytes) if memory is None else memory
            parts = shards.views(peer, viewing(memory))
        to, nbytes = (rank - turn) % ranks, zip(sizes.parts[rank], sizes.parts[peer], strict=True)
        for tensor, part, (given, taken) in zip(own, parts, nbytes, strict=True):
            exchange.pass_on(group, tensor, to, given, part, peer, taken, name)
        yield peer, parts, turn < len(others)


def _places(group: Group, shards: Shards, name: bytes) -> list[tuple[int, int]] | None:
    """Returns where the ranks' shards lie in symmetric memory; None if one cannot be read there.

    Collective. Ranks may differ: a shard may be contiguous on one rank and not on another, if only
    because a dimension that was moved to the front has length 1 there.
    """
    if len(shards.own) > 1 or shards.sizes.some_empty or not has_symmetric(group):
        return None
    own = symmetric_place(shards.own[0], group) if shards.contiguous else None
    if group.world_size == 1:
        return None
    numbers = own if own is not None else (-1, 0)
    places = numbers_on_host(group, (QUESTION + name)[: wire.MAX_CALL_NAME], numbers)
    if any(sequence < 0 for sequence, _ in places):
        return None
    return [(sequence, offset) for sequence, offset in places]


def _in_place(
    group: Group, shards: Shards, name: bytes, places: Sequence[tuple[int, int]]
) -> Iterator[_Arrived]:
    """Yields the shards where they lie. `_places` has awaited the ranks' writes."""
    dtype = shards.own[0].dtype
    yield group.rank, list(shards.own), True
    for peer in peers(group.rank, group.world_size):
        shape = shards.shapes[peer][0]
        yield peer, [symmetric_tensor(group, peer, places[peer], shape, dtype)], True
    # Awaits the end of all peers' reads: the caller may overwrite its tensor afterwards.
    numbers_on_host(group, name, [0])


def _shards(call: GatherAndScatterCall) -> Iterable[_Arrived]:
    """Returns the shards of all ranks, this rank's first."""
    at_once = call.group.world_size * call.shards.nbytes <= GATHERED_BYTES
    return (_at_once if at_once else _in_turn)(call.group, call.shards, call.name)


def _add_at_once(call: GatherAndScatterCall) -> None:
    """Makes the partial sums for all ranks, then reduce-scatters."""
    group, out, offsets = call.group, call.out, part_offsets(call.nbytes)
    view_at = viewing(scratch(out, offsets[-1]))
    for source, parts, _ in _shards(call):
        partial_sum = view_at(offsets[source], call.partials[source], out.dtype)
        consume = partial(call.consume, parts, source, partial_sum)
        traced(group, "consume", call.name, consume, source, before=True)
    sums = view_at(0, (offsets[-1] // out.itemsize,), out.dtype)
    exchange.reduce_scatter_into(group, sums, offsets, call.nbytes, out, call.name, mean=False)


def _add_in_turn(call: GatherAndScatterCall) -> None:
    """Sends each partial sum to its owner at once, and adds those that arrive."""
    group, out, name = call.group, call.out, call.name
    rank, ranks, own = group.rank, group.world_size, call.nbytes[group.rank]
    made, arrived = (scratch(out, size) for size in (max(call.nbytes), own))
    for turn, (source, parts, _) in enumerate(_shards(call)):
        if source == rank:
            consume = partial(call.consume, parts, rank, out)
            traced(group, "consume", name, consume, rank, before=ranks > 1)
            continue
        partial_sum = viewing(made)(0, call.partials[source], out.dtype)
        consume = partial(call.consume, parts, source, partial_sum)
        traced(group, "consume", name, consume, source, before=True)
        exchange.pass_on(
            group, made, source, call.nbytes[source], arrived, (rank - turn) % ranks, own, name
        )
        out.add_(viewing(arrived)(0, tuple(out.shape), out.dtype))


def _new_parts(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Returns aligned parts of these sizes in bytes and, last, the memory that holds them."""
    offsets = part_offsets(sizes)
    memory = scratch(torch.empty(0, dtype=torch.uint8, device=device), offsets[-1])
    parts = zip(offsets, sizes, strict=False)
    return [*(memory.narrow(0, offset, size) for offset, size in parts), memory]
