"""Pipelines of groups that span hosts: symmetric memory within a host, a ring between hosts.

The same functions as runtime/cpu.py, for any device. In each turn a host works on the shards of one
host by way of its own symmetric memory, while the process group's point-to-point operations pass
what the next turn needs: each rank sends to the rank of its place on the next host. So all links
between hosts are busy at once, and every shard crosses each of them once.

Turn t works on the shards of host `host - t`. Gradients and other sums go the same way round, and
are added on the way in a fixed order, in float32 for the 16-bit types.

Source: ring attention (Liu et al., 2023) between hosts; two levels as in NCCL's rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.alignment import part_offsets, scratch
from symm_cp.devices import give_up
from symm_cp.hosts import Hosts, hosts_of
from symm_cp.memory import Group
from symm_cp.runtime.cpu import Consume, Shapes

_SHARD, _SUM = 1, 2  # tags of messages


class _Ring:
    """This rank's place in the ring of the ranks that have its number on their hosts."""

    def __init__(self, group: Group, device: torch.device, what: bytes) -> None:
        found = hosts_of(group, device)
        assert found is not None
        self.hosts: Hosts = found
        self.group = group
        self.what = what.decode(errors="replace")
        self.count = len(found.ranks)
        self.next = found.ranks[(found.host + 1) % self.count][found.place]
        self.previous = found.ranks[(found.host - 1) % self.count][found.place]
        self._process_group = _resolve_process_group(group.name)  # type: ignore[arg-type]

    def host(self, turn: int) -> tuple[int, ...]:
        """The ranks whose shards turn `turn` works on."""
        return self.hosts.ranks[(self.hosts.host - turn) % self.count]

    def pass_on(self, send: torch.Tensor, receive: torch.Tensor, tag: int) -> list[Any]:
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

    def finish(self, works: list[Any]) -> None:
        """Returns when what was started has ended; raises `RuntimeError` when a link failed."""
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error

    def _lost(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{self.what}: rank {self.group.rank} lost the link from rank {self.previous} or to "
            f"rank {self.next}, which are on other hosts: {error}"
        )

    @contextmanager
    def call(self) -> Iterator[_Ring]:
        """A failure in the middle ends the calls of this host's other ranks, too."""
        with self.group.lock:
            try:
                yield self
            except BaseException as error:
                local = self.hosts.local
                local.refuse("sync", error)
                give_up(local)
                raise


def _local(tensor: torch.Tensor) -> ModuleType:
    from symm_cp import runtime  # which chooses between this module and the others

    return runtime.on(tensor)


class _Blocks:
    """Shards as messages: their tensors in one run of bytes."""

    def __init__(self, own: Sequence[torch.Tensor], shapes: Sequence[Shapes]) -> None:
        self.own, self.shapes = own, shapes

    def _offsets(self, rank: int) -> tuple[int, ...]:
        sizes = zip(self.shapes[rank], self.own, strict=True)
        return part_offsets([math.prod(shape) * t.element_size() for shape, t in sizes])

    def empty(self, rank: int) -> torch.Tensor:
        return scratch(self.own[0], self._offsets(rank)[-1])

    def parts(self, block: torch.Tensor, rank: int) -> list[torch.Tensor]:
        tensors = zip(self._offsets(rank), self.shapes[rank], self.own, strict=False)
        return [
            block[offset : offset + math.prod(shape) * t.element_size()].view(t.dtype).view(shape)
            for offset, shape, t in tensors
        ]

    def packed(self, rank: int) -> torch.Tensor:
        block = self.empty(rank)
        for part, tensor in zip(self.parts(block, rank), self.own, strict=True):
            part.copy_(tensor)
        return block


def _same_shapes(shard: Sequence[torch.Tensor], ranks: int) -> list[Shapes]:
    return [tuple(tuple(t.shape) for t in shard)] * ranks


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def all_gather_and_consume(
    group: Group,
    shard: Sequence[torch.Tensor],
    consume: Consume,
    what: bytes,
    *,
    shapes: Sequence[Shapes] | None = None,
    gathered: torch.Tensor | None = None,
    columns: bool = False,
) -> None:
    """Calls `consume(shards of rank r, r)` for each rank: own host first, then host by host.

    As `cpu.all_gather_and_consume`.
    """
    all_shapes = _same_shapes(shard, group.world_size) if shapes is None else shapes
    blocks, place = _Blocks(shard, all_shapes), None
    if gathered is not None:
        place = gathered.chunk(group.world_size, 1 if columns else 0)
    with _Ring(group, shard[0].device, what).call() as ring:
        current = blocks.packed(group.rank) if ring.count > 1 else None
        parts = list(shard)
        for turn in range(ring.count):
            works, following = [], None
            if turn + 1 < ring.count:
                assert current is not None
                following = blocks.empty(ring.host(turn + 1)[ring.hosts.place])
                works = ring.pass_on(current, following, _SHARD)
            ranks = ring.host(turn)

            def run(shards: list[torch.Tensor], index: int, ranks: Any = ranks) -> None:
                if place is not None:
                    place[ranks[index]].copy_(shards[0])
                consume(shards, ranks[index])

            _local(shard[0]).all_gather_and_consume(
                ring.hosts.local, parts, run, what, shapes=[all_shapes[rank] for rank in ranks]
            )
            ring.finish(works)
            if following is not None:
                current = following
                parts = blocks.parts(current, ring.host(turn + 1)[ring.hosts.place])


def all_gather_and_combine(
    group: Group,
    shard: torch.Tensor,
    combine: Callable[[list[torch.Tensor]], None],
    what: bytes,
) -> None:
    """Calls `combine(shards of all ranks)` once. As `cpu.all_gather_and_combine`."""
    found: dict[int, torch.Tensor] = {}

    def keep(shards: list[torch.Tensor], rank: int) -> None:
        found[rank] = shards[0].clone()

    all_gather_and_consume(group, [shard], keep, what)
    combine([found[rank] for rank in range(group.world_size)])


def produce_and_reduce_scatter(
    group: Group,
    produce: Callable[[int, torch.Tensor], None],
    out: torch.Tensor,
    what: bytes,
    *,
    mean: bool = False,
) -> None:
    """Calls `produce(r, partial)` for each rank r, own host last; `out` is the sum over ranks.

    As `cpu.produce_and_reduce_scatter`. Sums are in float32 for the 16-bit types, also within a
    host: a sum for each host would else be rounded.
    """
    wide = _wide(out.dtype)
    narrow = None if wide == out.dtype else torch.empty_like(out)
    with _Ring(group, out.device, what).call() as ring:
        total, received = torch.empty_like(out, dtype=wide), torch.empty_like(out, dtype=wide)
        works: list[Any] = []
        for turn in range(1, ring.count + 1):
            ranks = ring.host(turn)  # after the last turn one is back at home

            def run(index: int, partial: torch.Tensor, ranks: Any = ranks) -> None:
                produce(ranks[index], partial if narrow is None else narrow)
                if narrow is not None:
                    partial.copy_(narrow)

            total = torch.empty_like(total)  # the one before is on its way
            _local(out).produce_and_reduce_scatter(ring.hosts.local, run, total, what)
            ring.finish(works)
            if turn > 1:
                total.add_(received)
            if turn < ring.count:
                received = torch.empty_like(total)
                works = ring.pass_on(total, received, _SUM)
        out.copy_(total.div_(group.world_size) if mean else total)


def consume_and_reduce_scatter(
    group: Group,
    shard: Sequence[torch.Tensor],
    consume: Callable[[list[torch.Tensor], int, torch.Tensor], None],
    out: torch.Tensor,
    what: bytes,
    *,
    shapes: Sequence[Shapes],
    partials: Shapes,
    ring: bool = False,
) -> None:
    """Calls `consume(shards of rank r, r, partial)` for each rank r; `out` sums what is for it.

    As `cpu.consume_and_reduce_scatter`. Between hosts the sum for a shard follows it round the
    ring, and comes home with the last message.
    """
    blocks = _Blocks(shard, shapes)
    with _Ring(group, out.device, what).call() as around:
        place, local = around.hosts.place, around.hosts.local
        current = blocks.packed(group.rank)
        parts, total = list(shard), out
        sums: list[Any] = []
        received: torch.Tensor | None = None
        for turn in range(around.count):
            ranks, works, following = around.host(turn), [], None
            if turn + 1 < around.count:
                following = blocks.empty(around.host(turn + 1)[place])
                works = around.pass_on(current, following, _SHARD)
            total = out.new_empty(tuple(partials[ranks[place]]))

            def run(
                shards: list[torch.Tensor], index: int, partial: torch.Tensor, ranks: Any = ranks
            ) -> None:
                consume(shards, ranks[index], partial)

            _local(out).consume_and_reduce_scatter(
                local,
                parts,
                run,
                total,
                what,
                shapes=[shapes[rank] for rank in ranks],
                partials=[partials[rank] for rank in ranks],
                ring=ring,
            )
            around.finish(works)
            around.finish(sums)
            if received is not None:
                total.add_(received)
            # What follows a shard goes on to where the shard goes, in the end to its owner.
            received = out.new_empty(tuple(partials[around.host(turn + 1)[place]]))
            sums = around.pass_on(total, received, _SUM)
            if following is not None:
                current, parts = following, blocks.parts(following, around.host(turn + 1)[place])
        around.finish(sums)
        assert received is not None
        out.copy_(received)
