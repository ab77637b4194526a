"""Pipelines of groups that span hosts: symmetric memory within a host, a ring between hosts.

In each turn a host works on the shards of one host through its own symmetric memory, while the
process group's point-to-point operations send the shards of the next turn: each rank sends to the
rank with its number on the next host. So all links between hosts are busy at once, and every shard
crosses each link once.

Turn t works on the shards of host `host - t`. Gradients and other sums travel in the same
direction, and are added on the way in a fixed order, in float32 for the 16-bit types.

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

from symm_cp.group.hosts import Hosts, hosts_of
from symm_cp.group.memory import Group
from symm_cp.runtime import process_group
from symm_cp.runtime.api import BackgroundRuntime, Runtime
from symm_cp.runtime.calls import (
    AllReduceCall,
    Collective,
    CombineCall,
    Consume,
    ConsumeAndProduce,
    ExchangeCall,
    GatherAndScatterCall,
    GatherCall,
    Produce,
    ScatterCall,
)
from symm_cp.tensors.alignment import part_offsets, scratch
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import copied, new_result
from symm_cp.tensors.shards import Shards, Split, viewing

_SHARD, _SUM = 1, 2  # tags of messages
#: Memory, and the offset of each peer's message in it; the last entry is the last message's end.
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
        """The ranks whose shards are processed in turn `turn`."""
        return self.hosts.ranks[(self.hosts.host - turn) % self.count]

    def counterpart(self, turn: int) -> int:
        """The rank with this rank's number on the host of a turn."""
        return self.host(turn)[self.hosts.place]

    def pass_on(self, send: torch.Tensor, receive: torch.Tensor, tag: int) -> list[dist.Work]:
        """Starts sending to the next host and receiving from the previous one."""
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
        """Returns when all works have ended; raises `RuntimeError` when a link failed."""
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
    def call(self, inner: Runtime) -> Iterator[_Ring]:
        """Runs a call; if it fails midway, the calls of this host's other ranks fail as well.

        `inner` is the runtime within the host.
        """
        with self.group.lock:
            try:
                yield self
            except BaseException as error:
                self.hosts.local.refuse("sync", error)
                inner.give_up(self.hosts.local, error)
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


class HostsRuntime(BackgroundRuntime):
    """The runtime for groups that span hosts; within each host it runs `inner`."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner

    def _gather(self, call: GatherCall) -> None:
        """Gathers from this host first, then from one host after the other."""
        group, shards, gathered, split = call.group, call.shards, call.gathered, call.split
        messages = _Messages(shards)

        def consume_of(ranks: tuple[int, ...]) -> Consume:
            def run(parts: list[torch.Tensor], index: int) -> None:
                if gathered is not None and split is not None:
                    split.of(ranks[index], gathered).copy_(parts[0])
                call.consume(parts, ranks[index])

            return run

        with _Ring(group, shards.own[0].device, call.name).call(self._inner) as ring:
            current = messages.packed(group.rank)
            parts = list(shards.own)
            for turn in range(ring.count):
                works, following = [], messages.empty()
                if turn + 1 < ring.count:
                    works = ring.pass_on(current, following, _SHARD)
                ranks = ring.host(turn)
                self._inner.all_gather_and_consume(
                    ring.hosts.local,
                    parts,
                    consume_of(ranks),
                    call.name,
                    shapes=[shards.shapes[rank] for rank in ranks],
                )
                ring.finish(works)
                current = following
                parts = messages.parts(current, ring.counterpart(turn + 1))

    def _combine(self, call: CombineCall) -> None:
        """Copies every shard to memory of this rank."""
        copies: dict[int, torch.Tensor] = {}

        def copy(parts: list[torch.Tensor], rank: int) -> None:
            copies[rank] = copied(parts[0])

        self._gather(GatherCall(call.group, call.shards, copy, call.name))
        call.combine([copies[rank] for rank in range(call.group.world_size)])

    def _scatter(self, call: ScatterCall) -> None:
        """Computes the sums of this host last.

        Sums are in float32 for the 16-bit types, also within a host: otherwise each host's sum
        would be rounded.
        """
        group, out, partials = call.group, call.out, call.partials
        total_dtype = wide(out.dtype)

        def produce_for(ranks: tuple[int, ...]) -> Produce:
            def run(index: int, partial: torch.Tensor) -> None:
                if total_dtype == out.dtype:
                    call.produce(ranks[index], partial)
                    return
                narrow = new_result(partial, partial.shape, out.dtype)
                call.produce(ranks[index], narrow)
                partial.copy_(narrow)

            return run

        with _Ring(group, out.device, call.name).call(self._inner) as ring:
            works: list[dist.Work] = []
            received: torch.Tensor | None = None
            for turn in range(1, ring.count + 1):
                ranks = ring.host(turn)  # the last turn is the own host's
                own = partials[ring.counterpart(turn)]
                total = new_result(out, own, total_dtype)
                self._inner.produce_and_reduce_scatter(
                    ring.hosts.local,
                    produce_for(ranks),
                    total,
                    call.name,
                    shapes=[partials[rank] for rank in ranks],
                )
                ring.finish(works)
                if received is not None:
                    total.add_(received)
                if turn < ring.count:
                    # The sum for a rank of the next turn's host.
                    shape = partials[ring.counterpart(turn + 1)]
                    received = new_result(out, shape, total_dtype)
                    works = ring.pass_on(total, received, _SUM)
            out.copy_(total.div_(group.world_size) if call.mean else total)

    def _all_reduce(self, call: AllReduceCall) -> None:
        """Each rank sums a part, and all gather the parts."""
        group, out = call.group, call.out
        produced: list[torch.Tensor] = []
        if call.split is None:
            whole, split = out.view(-1), Split.nearly_equal(out.numel(), group.world_size)
        else:
            whole, split = out, call.split

        def produce_part(rank: int, partial: torch.Tensor) -> None:
            if call.split is not None:
                call.produce(rank, partial)
                return
            if not produced:
                produced.append(new_result(out, out.shape))
                call.produce(group.rank, produced[0])
            partial.copy_(split.of(rank, produced[0].view(-1)))

        own = new_result(out, split.shape_of(group.rank, whole.shape))
        shapes = [tuple(split.shape_of(rank, whole.shape)) for rank in range(group.world_size)]
        self.produce_and_reduce_scatter(
            group, produce_part, own, call.name, shapes=shapes, mean=call.mean
        )
        self.all_gather_and_consume(
            group,
            [own],
            lambda shard, rank: None,
            call.name,
            shapes=[(shape,) for shape in shapes],
            gathered=whole,
            split=split,
        )

    def _exchange(self, call: ExchangeCall) -> None:
        """Uses the process group's all-to-all, which starts when all parts are written."""
        group, sizes = call.group, call.sizes
        peers = [rank for rank in range(group.world_size) if rank != group.rank]
        with _Ring(group, call.device, call.name).call(self._inner) as ring:
            outgoing = part_offsets([sizes[group.rank][peer] for peer in peers])
            arriving = part_offsets([sizes[peer][group.rank] for peer in peers])
            like = torch.empty(0, dtype=torch.uint8, device=call.device)
            sent, arrived = scratch(like, outgoing[-1]), scratch(like, arriving[-1])
            for begin, peer in zip(outgoing, peers, strict=False):
                call.give(peer, sent[begin : begin + sizes[group.rank][peer]])
            works = ring.all_to_all(peers, (sent, outgoing), (arrived, arriving))
            call.consume()
            ring.finish(works)
            for begin, peer in zip(arriving, peers, strict=False):
                call.take(peer, arrived[begin : begin + sizes[peer][group.rank]])

    def _gather_and_scatter(self, call: GatherAndScatterCall) -> None:
        """The sum for a shard follows it round the ring, and reaches its owner last."""
        group, out, partials = call.group, call.out, call.partials
        messages = _Messages(call.shards)

        def consume_of(ranks: tuple[int, ...]) -> ConsumeAndProduce:
            def run(parts: list[torch.Tensor], index: int, partial: torch.Tensor) -> None:
                call.consume(parts, ranks[index], partial)

            return run

        with _Ring(group, out.device, call.name).call(self._inner) as around:
            current = messages.packed(group.rank)
            parts = list(call.shards.own)
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
                    call.name,
                    shapes=[call.shards.shapes[rank] for rank in ranks],
                    partials=[partials[rank] for rank in ranks],
                    ring=call.ring,
                )
                around.finish(works)
                around.finish(sums)
                if received is not None:
                    total.add_(received)
                # The sum goes where its shard goes, in the end to the shard's owner.
                received = new_result(out, partials[around.counterpart(turn + 1)])
                sums = around.pass_on(total, received, _SUM)
                current = following
                parts = messages.parts(current, around.counterpart(turn + 1))
            around.finish(sums)
            assert received is not None
            out.copy_(received)

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
