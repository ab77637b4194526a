"""Pipelines of groups that span hosts: symmetric memory within a host, a ring between hosts.

In each turn a host works on the shards of one host through its own symmetric memory, while the
process group's point-to-point operations pass on what the next turn needs: each rank sends to the
rank of its place on the next host. So all links between hosts are busy at once, and every shard
crosses each of them once.

Turn t works on the shards of host `host - t`. Gradients and other sums go the same way round, and
are added on the way in a fixed order, in float32 for the 16-bit types.

Source: ring attention (Liu et al., 2023) between hosts; two levels as in NCCL's rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.devices import give_up
from symm_cp.group.hosts import Hosts, hosts_of
from symm_cp.group.memory import Group
from symm_cp.runtime import process_group
from symm_cp.runtime.api import (
    Collective,
    Combine,
    Consume,
    ConsumeAndProduce,
    ConsumeHere,
    PackedBoxes,
    Pass,
    Poll,
    Produce,
    RelayStep,
    Runtime,
    Sizes,
)
from symm_cp.runtime.round_trips import exchange_in_messages
from symm_cp.runtime.sums import wide
from symm_cp.runtime.turns import relay_in_turns
from symm_cp.tensors.alignment import part_offsets, scratch
from symm_cp.tensors.results import copied, new_result
from symm_cp.tensors.shards import Shape, Shapes, Shards, Split, viewing

_SHARD, _SUM = 1, 2  # tags of messages
#: Memory, and where the message of each peer begins there; last, where the last one ends.
_InTurn: TypeAlias = "tuple[torch.Tensor, tuple[int, ...]]"


class _Ring:
    """This rank's place in the ring of the ranks that have its number on their hosts."""

    def __init__(self, group: Group, device: torch.device, call_name: bytes) -> None:
        hosts = hosts_of(group, device)
        assert hosts is not None
        self.hosts: Hosts = hosts
        self.group = group
        self.call_name = call_name.decode(errors="replace")
        self.count = len(hosts.ranks)
        self.next = hosts.ranks[(hosts.host + 1) % self.count][hosts.place]
        self.previous = hosts.ranks[(hosts.host - 1) % self.count][hosts.place]
        self._process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]

    def host(self, turn: int) -> tuple[int, ...]:
        """The ranks whose shards turn `turn` works on."""
        return self.hosts.ranks[(self.hosts.host - turn) % self.count]

    def counterpart(self, turn: int) -> int:
        """The rank of this rank's place on the host of a turn."""
        return self.host(turn)[self.hosts.place]

    def pass_on(self, send: torch.Tensor, receive: torch.Tensor, tag: int) -> list[dist.Work]:
        """Starts sending to the next host and receiving from the one before."""
        operations = [
            dist.P2POp(op, tensor, group=self._process_group, tag=tag, group_peer=peer)
            for op, tensor, peer in (
                (dist.isend, send, self.next),
                (dist.irecv, receive, self.previous),
            )
            if tensor.numel() > 0
        ]
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(error) from error

    def finish(self, works: list[dist.Work]) -> None:
        """Returns when what was started has ended; raises `RuntimeError` when a link failed."""
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error

    def all_to_all(self, peers: Sequence[int], send: _InTurn, receive: _InTurn) -> list[dist.Work]:
        """Starts sending a message to each peer, and receiving one from each."""
        operations = [
            dist.P2POp(op, message, group=self._process_group, tag=_SHARD, group_peer=peer)
            for op, (memory, offsets) in ((dist.isend, send), (dist.irecv, receive))
            for peer, begin, end in zip(peers, offsets, offsets[1:], strict=False)
            if (message := memory[begin:end]).numel() > 0
        ]
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{self.call_name}: rank {self.group.rank} lost the link from rank {self.previous} or "
            f"to rank {self.next}, which are on other hosts: {error}"
        )

    @contextmanager
    def call(self) -> Iterator[_Ring]:
        """A failure in the middle ends the calls of this host's other ranks, too."""
        with self.group.lock:
            try:
                yield self
            except BaseException as error:
                self.hosts.local.refuse("sync", error)
                give_up(self.hosts.local, error)
                raise


class _Messages:
    """Shards as messages: the tensors of a shard in one run of bytes."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def empty(self) -> torch.Tensor:
        return scratch(self.shards.own[0], self.shards.nbytes)

    def packed(self, rank: int) -> torch.Tensor:
        message = self.empty()
        self.shards.pack(rank, viewing(message))
        return message

    def parts(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        return self.shards.views(rank, viewing(message))


class HostsRuntime:
    """The runtime for groups that span hosts, each of which runs `inner`; see `api.Runtime`."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner

    def all_gather_and_consume(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: Consume,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None = None,
        gathered: torch.Tensor | None = None,
        split: Split | None = None,
    ) -> None:
        """See `Runtime`. Own host first, then host by host."""
        shards = Shards(shard, group.world_size, shapes)
        messages = _Messages(shards)
        if gathered is not None:
            split = split or Split.equal(shard[0].shape[0], group.world_size)

        def consume_of(ranks: tuple[int, ...]) -> Consume:
            def run(parts: list[torch.Tensor], index: int) -> None:
                if gathered is not None and split is not None:
                    split.of(ranks[index], gathered).copy_(parts[0])
                consume(parts, ranks[index])

            return run

        with _Ring(group, shard[0].device, call_name).call() as ring:
            current = messages.packed(group.rank)
            parts = list(shard)
            for turn in range(ring.count):
                works, following = [], messages.empty()
                if turn + 1 < ring.count:
                    works = ring.pass_on(current, following, _SHARD)
                ranks = ring.host(turn)
                self._inner.all_gather_and_consume(
                    ring.hosts.local,
                    parts,
                    consume_of(ranks),
                    call_name,
                    shapes=[shards.shapes[rank] for rank in ranks],
                )
                ring.finish(works)
                current = following
                parts = messages.parts(current, ring.counterpart(turn + 1))

    def all_gather_and_combine(
        self,
        group: Group,
        shard: torch.Tensor,
        combine: Combine,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """See `Runtime`. Keeps a copy of every shard."""
        kept: dict[int, torch.Tensor] = {}

        def keep(parts: list[torch.Tensor], rank: int) -> None:
            kept[rank] = copied(parts[0])

        all_shapes = None if shapes is None else [(shape,) for shape in shapes]
        self.all_gather_and_consume(group, [shard], keep, call_name, shapes=all_shapes)
        combine([kept[rank] for rank in range(group.world_size)])

    def all_gather_and_poll(
        self, group: Group, shard: Sequence[torch.Tensor], kernel: Poll, call_name: bytes
    ) -> None:
        """Raises `NotImplementedError`: shards of other hosts do not come by copy engine."""
        raise NotImplementedError(
            f"{call_name.decode()}: kernels cannot poll for the shards of other hosts"
        )

    def produce_and_reduce_scatter(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shape] | None = None,
        mean: bool = False,
    ) -> None:
        """See `Runtime`. Own host last.

        Sums are in float32 for the 16-bit types, also within a host: a sum for each host would
        else be rounded.
        """
        partials = [tuple(out.shape)] * group.world_size if shapes is None else shapes
        total_dtype = wide(out.dtype)

        def produce_for(ranks: tuple[int, ...]) -> Produce:
            def run(index: int, partial: torch.Tensor) -> None:
                if total_dtype == out.dtype:
                    produce(ranks[index], partial)
                    return
                narrow = new_result(partial, partial.shape, out.dtype)
                produce(ranks[index], narrow)
                partial.copy_(narrow)

            return run

        with _Ring(group, out.device, call_name).call() as ring:
            works: list[dist.Work] = []
            received: torch.Tensor | None = None
            for turn in range(1, ring.count + 1):
                ranks = ring.host(turn)  # after the last turn one is back at home
                own = partials[ring.counterpart(turn)]
                total = new_result(out, own, total_dtype)
                self._inner.produce_and_reduce_scatter(
                    ring.hosts.local,
                    produce_for(ranks),
                    total,
                    call_name,
                    shapes=[partials[rank] for rank in ranks],
                )
                ring.finish(works)
                if received is not None:
                    total.add_(received)
                if turn < ring.count:
                    # What is for a rank of the next turn's host.
                    shape = partials[ring.counterpart(turn + 1)]
                    received = new_result(out, shape, total_dtype)
                    works = ring.pass_on(total, received, _SUM)
            out.copy_(total.div_(group.world_size) if mean else total)

    def produce_and_all_reduce(
        self,
        group: Group,
        produce: Produce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        split: Split | None = None,
        mean: bool = False,
    ) -> None:
        """See `Runtime`. Each rank sums a part, and all gather the parts."""
        produced: list[torch.Tensor] = []
        whole, parts = out, split
        if split is None:
            whole = out.view(-1)
            parts = Split.nearly_equal(out.numel(), group.world_size)
        assert parts is not None
        divided = parts

        def produce_part(rank: int, partial: torch.Tensor) -> None:
            if split is not None:
                produce(rank, partial)
                return
            if not produced:
                produced.append(new_result(out, out.shape))
                produce(group.rank, produced[0])
            partial.copy_(divided.of(rank, produced[0].view(-1)))

        own = new_result(out, divided.shape_of(group.rank, whole.shape))
        shapes = [tuple(divided.shape_of(rank, whole.shape)) for rank in range(group.world_size)]
        self.produce_and_reduce_scatter(
            group, produce_part, own, call_name, shapes=shapes, mean=mean
        )
        self.all_gather_and_consume(
            group,
            [own],
            lambda shard, rank: None,
            call_name,
            shapes=[(shape,) for shape in shapes],
            gathered=whole,
            split=divided,
        )

    def exchange_and_consume(
        self,
        group: Group,
        give: Pass,
        consume: ConsumeHere,
        take: Pass,
        device: torch.device,
        call_name: bytes,
        *,
        sizes: Sizes,
    ) -> None:
        """See `Runtime`. By the process group's all-to-all, which starts when all was given."""
        peers = [rank for rank in range(group.world_size) if rank != group.rank]
        with _Ring(group, device, call_name).call() as ring:
            outgoing = part_offsets([sizes[group.rank][peer] for peer in peers])
            arriving = part_offsets([sizes[peer][group.rank] for peer in peers])
            like = torch.empty(0, dtype=torch.uint8, device=device)
            sent, arrived = scratch(like, outgoing[-1]), scratch(like, arriving[-1])
            for index, peer in enumerate(peers):
                begin = outgoing[index]
                give(peer, sent[begin : begin + sizes[group.rank][peer]])
            works = ring.all_to_all(peers, (sent, outgoing), (arrived, arriving))
            consume()
            ring.finish(works)
            for index, peer in enumerate(peers):
                begin = arriving[index]
                take(peer, arrived[begin : begin + sizes[peer][group.rank]])

    def exchange(
        self,
        group: Group,
        packed: PackedBoxes,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        call_name: bytes,
    ) -> None:
        """See `Runtime`."""
        exchange_in_messages(self, group, packed, tensors, outputs, call_name)

    def consume_and_reduce_scatter(
        self,
        group: Group,
        shard: Sequence[torch.Tensor],
        consume: ConsumeAndProduce,
        out: torch.Tensor,
        call_name: bytes,
        *,
        shapes: Sequence[Shapes] | None,
        partials: Sequence[Shape],
        ring: bool = False,
    ) -> None:
        """See `Runtime`.

        Between hosts the sum for a shard follows it round the ring, and comes home with the last
        message.
        """
        messages = _Messages(Shards(shard, group.world_size, shapes))

        def consume_of(ranks: tuple[int, ...]) -> ConsumeAndProduce:
            def run(parts: list[torch.Tensor], index: int, partial: torch.Tensor) -> None:
                consume(parts, ranks[index], partial)

            return run

        with _Ring(group, out.device, call_name).call() as around:
            current = messages.packed(group.rank)
            parts = list(shard)
            sums: list[dist.Work] = []
            received: torch.Tensor | None = None
            for turn in range(around.count):
                ranks, works, following = around.host(turn), [], messages.empty()
                if turn + 1 < around.count:
                    works = around.pass_on(current, following, _SHARD)
                total = new_result(out, partials[around.counterpart(turn)])
                self._inner.consume_and_reduce_scatter(
                    around.hosts.local,
                    parts,
                    consume_of(ranks),
                    total,
                    call_name,
                    shapes=[messages.shards.shapes[rank] for rank in ranks],
                    partials=[partials[rank] for rank in ranks],
                    ring=ring,
                )
                around.finish(works)
                around.finish(sums)
                if received is not None:
                    total.add_(received)
                # What follows a shard goes on to where the shard goes, in the end to its owner.
                received = new_result(out, partials[around.counterpart(turn + 1)])
                sums = around.pass_on(total, received, _SUM)
                current = following
                parts = messages.parts(current, around.counterpart(turn + 1))
            around.finish(sums)
            assert received is not None
            out.copy_(received)

    def relay(
        self,
        group: Group,
        step: RelayStep,
        like: torch.Tensor,
        shapes: Sequence[Shape],
        call_name: bytes,
        *,
        reverse: bool = False,
    ) -> None:
        """See `Runtime`. The ranks take turns, whatever host they are on."""
        relay_in_turns(self, group, step, like, shapes, call_name, reverse=reverse)

    def prepare_all_gather(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes
    ) -> Collective:
        """See `BackgroundRuntime`. It is the process group's own collective."""
        return _OfProcessGroup(
            lambda group, tensor: process_group.all_gather(tensor, split, group.name)
        )

    def prepare_reduce_scatter(
        self, group: Group, tensor: torch.Tensor, split: Split, call_name: bytes, *, mean: bool
    ) -> Collective:
        """As `prepare_all_gather`."""
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
