"""Patterns over the process group, for groups whose ranks work apart (`group/hosts.py`).

Each is a collective of the process group (gloo, NCCL) with the kernels before or after it, so
nothing overlaps. Contributions travel as they are and are added by their owner, in the order and
the dtype that `api.Runtime` promises: sums have the bits that they have on one host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp.group.memory import Group, is_fake
from symm_cp.group.one_process import is_one_of_several
from symm_cp.runtime import process_group
from symm_cp.runtime.api import BackgroundRuntime
from symm_cp.runtime.calls import (
    AllReduceCall,
    Collective,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    ScatterCall,
    Sizes,
)
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.alignment import padded, part_offsets, scratch
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import contiguous, new_result
from symm_cp.tensors.shards import Shape, Shards, Split, viewing


class UnfusedRuntime(BackgroundRuntime):
    """The runtime for groups whose ranks work apart, on any kind of device."""

    def _gather(self, call: GatherCall) -> None:
        with call.group.lock:
            shards = _all_gather(call.group, call.shards, call.name)
            if call.gathered is not None and call.split is not None:
                for rank, parts in enumerate(shards):
                    call.split.of(rank, call.gathered).copy_(parts[0])
            for rank in _own_first(call.group):
                call.consume(shards[rank], rank)

    def _scatter(self, call: ScatterCall) -> None:
        with call.group.lock:
            sums = _Sums(call.group, call.out, call.partials, call.nbytes)
            for rank in reversed(_own_first(call.group)):
                call.produce(rank, sums.partial(rank))
            sums.add_up(call.name, mean=call.mean)

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        with call.group.lock:
            shards = _all_gather(call.group, call.shards, call.name)
            sums = _Sums(call.group, call.out, call.partials, call.nbytes)
            for rank in _own_first(call.group):
                call.consume(shards[rank], rank, sums.partial(rank))
            rank, ranks = call.group.rank, call.group.world_size
            order = [(rank - turn) % ranks for turn in range(ranks)]
            sums.add_up(call.name, order=order if call.ring else None)

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Each rank sums a part, and all gather the parts."""
        group, out = call.group, call.out
        produced = new_result(out, out.shape)
        parts = Split.nearly_equal(out.numel(), group.world_size)
        with group.lock:
            if call.split is None:
                call.produce(group.rank, produced)
            else:
                for rank in reversed(_own_first(group)):
                    call.produce(rank, call.split.of(rank, produced))
            own = new_result(out, (parts.sizes[group.rank],))
            sizes = [size * out.element_size() for size in parts.sizes]
            sums = _Sums(group, own, [(size,) for size in parts.sizes], sizes)
            for rank, part in enumerate(parts.parts(produced.view(-1))):
                sums.partial(rank).copy_(part)
            sums.add_up(call.name, mean=call.mean)
            shards = Shards([own], group.world_size, [((size,),) for size in parts.sizes])
            for rank, shard in enumerate(_all_gather(group, shards, call.name)):
                parts.of(rank, out.view(-1)).copy_(shard[0])

    def _exchange(self, call: ExchangeCall) -> None:
        group, sizes, rank = call.group, call.sizes, call.group.rank
        others = peers(rank, group.world_size)
        travelling = tuple(
            tuple(0 if to == source else padded(size) for to, size in enumerate(to_each))
            for source, to_each in enumerate(sizes)
        )
        outgoing, arriving = _offsets(travelling, rank)
        with group.lock:
            sent = torch.empty(outgoing[-1], dtype=torch.uint8, device=call.device)
            for peer in others:
                call.give(peer, sent[outgoing[peer] :][: sizes[rank][peer]])
            arrived = _all_to_all(group, sent, travelling, call.name)
            call.consume()
            for peer in others:
                call.take(peer, arrived[arriving[peer] :][: sizes[peer][rank]])

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `BackgroundRuntime`. Uses the process group's own collective."""
        return _OfProcessGroup(
            lambda group, tensor: process_group.all_gather(tensor, split, group.name)
        )

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """Like `prepare_all_gather`."""
        reduce_op = "avg" if mean else "sum"
        return _OfProcessGroup(
            lambda group, tensor: process_group.reduce_scatter(tensor, reduce_op, split, group.name)
        )


class _OfProcessGroup:
    """A collective of torch's process group, which runs in the background."""

    def __init__(self, start: Callable[[Group, torch.Tensor], torch.Tensor]) -> None:
        self._start = start

    def start(
        self, group: Group, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Collective`. With `out` it is complete when this returns."""
        result = self._start(group, tensor)
        return result if out is None else out.copy_(funcol.wait_tensor(result))


class _Sums:
    """This rank's contributions to the outputs of all ranks, and the sum in `out`.

    `shapes` and `nbytes` are the shapes and sizes of the outputs.
    """

    def __init__(
        self, group: Group, out: torch.Tensor, shapes: Sequence[Shape], nbytes: Sequence[int]
    ) -> None:
        self._group, self._out, self._shapes = group, out, shapes
        self._offsets = part_offsets(nbytes)
        self._sent = scratch(out, self._offsets[-1])
        self._view_at = viewing(self._sent)

    def partial(self, rank: int) -> torch.Tensor:
        """Returns memory for the contribution to a rank's output."""
        return self._view_at(self._offsets[rank], tuple(self._shapes[rank]), self._out.dtype)

    def add_up(
        self, call_name: bytes, *, mean: bool = False, order: Sequence[int] | None = None
    ) -> None:
        """Writes the sum, or the mean, of all ranks' contributions to `out`. Collective.

        Contributions are added in an order of the ranks, by default 0, 1, ...
        """
        group, out, ranks = self._group, self._out, self._group.world_size
        sizes = tuple(end - begin for begin, end in itertools.pairwise(self._offsets))
        view_at = viewing(_all_to_all(group, self._sent, (sizes,) * ranks, call_name))
        shape, own = tuple(self._shapes[group.rank]), sizes[group.rank]
        first, *others = order or range(ranks)
        total = view_at(first * own, shape, out.dtype).to(wide(out.dtype))
        for rank in others:
            total.add_(view_at(rank * own, shape, out.dtype))
        out.copy_(total.div_(ranks) if mean else total)


def _own_first(group: Group) -> tuple[int, ...]:
    return (group.rank, *peers(group.rank, group.world_size))


def _offsets(sizes: Sizes, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns where the parts for all ranks, and from all ranks, begin; the last are the ends."""
    return part_offsets(sizes[rank]), part_offsets([to_each[rank] for to_each in sizes])


@contextmanager
def _named(group: Group, call_name: bytes) -> Iterator[None]:
    """Names the call in the errors of the process group, which does not know it."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{call_name.decode(errors='replace')}: on rank {group.rank} the collective of process "
            f"group {group.name!r} failed, perhaps because a rank has died: {error}"
        ) from error


def _all_gather(group: Group, shards: Shards, call_name: bytes) -> list[list[torch.Tensor]]:
    """Returns the tensors of each rank's shard. Collective."""
    ranks, nbytes = group.world_size, shards.nbytes
    if ranks == 1:
        return [[contiguous(tensor) for tensor in shards.own]]
    messages = scratch(shards.own[0], nbytes)
    shards.pack(group.rank, viewing(messages))
    if nbytes > 0:
        with _named(group, call_name):
            gathered = process_group.all_gather(messages, Split.equal(nbytes, ranks), group.name)
            messages = funcol.wait_tensor(gathered)
    view_at = viewing(messages)
    return [shards.views(rank, view_at, rank * nbytes) for rank in range(ranks)]


def _all_to_all(group: Group, sent: torch.Tensor, sizes: Sizes, call_name: bytes) -> torch.Tensor:
    """Exchanges bytes, `sizes[source][to]` each. Collective."""
    if not any(map(any, sizes)):
        return sent
    arriving = [to_each[group.rank] for to_each in sizes]
    # torch's backend refuses to send nothing and receive something.
    if is_fake(group.name) and not is_one_of_several():
        return sent.new_zeros(sum(arriving))
    with _named(group, call_name):
        started = torch.ops._c10d_functional.all_to_all_single(
            sent, arriving, list(sizes[group.rank]), group.name
        )
        received: torch.Tensor = funcol.wait_tensor(started)
    return received
