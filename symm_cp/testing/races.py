"""Finds races on symmetric memory, independently of the ranks' timing in the run.

A barrier, a signal or a collective must order a rank's access to a peer's buffer after the others'
earlier writes to it and before their next ones. A program that lacks one works most of the time, by
luck. Here every rank records which bytes of symmetric memory each op reads and writes, and how
ranks synchronise; afterwards vector clocks over all ranks' records find pairs of unordered
accesses.

Source: happens-before by vector clocks (Fidge, 1988; FastTrack, Flanagan and Freund, 2009).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from symm_cp.testing.accesses import (
    Access,
    Event,
    Log,
    Meeting,
    Put,
    RendezvousBuffer,
    Return,
    noting_accesses,
)

_MOST_RACES = 10


class RaceError(AssertionError):
    """Ranks use the same bytes of symmetric memory, one of them writes, and nothing orders them."""


@contextmanager
def detect_races(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises `RaceError` at its end, on all ranks, if ranks used symmetric memory without order.

    Collective over `group` (by default all ranks). Notes ops of torch on symmetric memory that is
    rendezvoused inside, reads by `tolist`, `repr`, numpy and DLPack, and what orders them:
    collectives, messages, and the barriers and signals of handles. Misses kernels that
    `torch.compile` generates, and writes by numpy and DLPack.
    """
    with noting_accesses() as log:
        yield
    logs: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(logs, log, group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    check_races(dict(zip(ranks, logs, strict=True)))


class _Ordered(NamedTuple):
    """An access, its rank, and its vector clock."""

    access: Access
    rank: int
    clock: dict[int, int]
    last: dict[int, int]  # the clock at the end of a loan; without a loan, equal to `clock`

    def before(self, other: _Ordered) -> bool:
        """Whether the other access comes after this one or, if one is a loan, may come after it."""
        return other.last.get(self.rank, 0) >= self.clock[self.rank]


class _Replay:
    """Replays the notes of all ranks in an order that their waits allow."""

    def __init__(self, logs: dict[int, Log]) -> None:
        self.logs = logs
        self.clocks = {rank: {rank: 1} for rank in logs}
        self.at = dict.fromkeys(logs, 0)
        self.met: dict[Any, dict[int, dict[int, int]]] = defaultdict(dict)
        self.turns: dict[Any, int] = defaultdict(int)
        self.puts: dict[Any, list[tuple[int | None, dict[int, int]]]] = defaultdict(list)
        self.taken: dict[Any, list[dict[int, int]]] = defaultdict(list)
        self.accesses: list[_Ordered] = []
        self.loans: dict[tuple[int, int], dict[int, int]] = {}  # their `last` clocks

    def run(self) -> list[_Ordered]:
        """Returns all accesses with their clocks; for each rank, up to a wait that never ends."""
        moved = True
        while moved:
            moved = False
            for rank, log in self.logs.items():
                while self.at[rank] < len(log) and self._step(rank, log[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        for (rank, _), last in self.loans.items():  # loans that did not end
            last.update(self.clocks[rank])
        return self.accesses

    def _step(self, rank: int, event: Event) -> bool:
        clock = self.clocks[rank]
        if isinstance(event, Access):
            now = last = dict(clock)
            if event.loan:
                last = self.loans[rank, event.loan] = dict(clock)
            self.accesses.append(_Ordered(event, rank, now, last))
            return True
        if isinstance(event, Return):
            self.loans.pop((rank, event.loan)).update(clock)
            return True
        if isinstance(event, Meeting):
            return self._meet(rank, event)
        if isinstance(event, Put):
            key = (rank, event.to, event.key)
            earlier = len(self.puts[key])
            if event.slot and len(self.taken[key]) < earlier:
                return False
            if event.slot and earlier:
                self._join(rank, self.taken[key][earlier - 1])
            self.puts[key].append((event.value, dict(clock)))
            clock[rank] += 1
            return True
        sources = self.logs if event.source < 0 else (event.source,)
        keys = [(source, rank, event.key) for source in sources]
        key = next((key for key in keys if self._signal(key, event.value) is not None), keys[0])
        found = self._signal(key, event.value)
        if found is None:
            return False
        self._join(rank, found)
        self.taken[key].append(dict(clock))
        clock[rank] += 1
        return True

    def _signal(self, key: Any, value: int | None) -> dict[int, int] | None:
        """Returns the clock of the earliest signal that ends a wait."""
        puts = self.puts[key]
        if value is None:
            turn = len(self.taken[key])
            return puts[turn][1] if turn < len(puts) else None
        return next((clock for given, clock in puts if (given or 0) >= value), None)

    def _meet(self, rank: int, event: Meeting) -> bool:
        turn = self.turns[rank, event.key]
        arrived = self.met[event.key, turn]
        arrived.setdefault(rank, dict(self.clocks[rank]))
        awaited: Sequence[int] = event.members
        if event.root is not None and (rank == event.root) != event.to_root:
            awaited = ()
        elif event.root is not None and not event.to_root:
            awaited = (event.root,)
        if any(member not in arrived for member in awaited if member in self.logs):
            return False
        for member in awaited:
            self._join(rank, arrived.get(member, {}))
        self.clocks[rank][rank] += 1
        self.turns[rank, event.key] += 1
        return True

    def _join(self, rank: int, other: dict[int, int]) -> None:
        clock = self.clocks[rank]
        for peer, time in other.items():
            clock[peer] = max(clock.get(peer, 0), time)


def find_races(logs: dict[int, Log]) -> list[tuple[_Ordered, _Ordered]]:
    """Returns pairs of accesses of two ranks, at least one a write, that nothing orders.

    `logs` maps all ranks of a program that has ended to their notes.
    """
    by_region: dict[RendezvousBuffer, dict[Any, _Ordered]] = defaultdict(dict)
    for each in _Replay(logs).run():
        access, key = each.access, (each.rank, each.clock[each.rank], each.last[each.rank])
        by_region[access.region].setdefault((*key, access.bytes, access.write), each)
    races = []
    said = set()
    for region in by_region.values():
        accesses = list(region.values())
        for index, one in enumerate(accesses):
            for other in accesses[index + 1 :]:
                if one.rank == other.rank or not (one.access.write or other.access.write):
                    continue
                if one.before(other) or other.before(one):
                    continue
                places = frozenset({(one.rank, one.access.what), (other.rank, other.access.what)})
                if places not in said and one.access.bytes.meets(other.access.bytes):
                    said.add(places)
                    races.append((one, other))
    return races


def check_races(logs: dict[int, Log]) -> None:
    """Raises `RaceError` if there are races: see `find_races`."""
    races = find_races(logs)
    if not races:
        return
    lines = [_say(*race) for race in races[:_MOST_RACES]]
    if len(races) > _MOST_RACES:
        lines.append(f"... and {len(races) - _MOST_RACES} more")
    raise RaceError("\n".join(lines))


def _say(one: _Ordered, other: _Ordered) -> str:
    writer, second = (one, other) if one.access.write else (other, one)
    region, part = writer.access.region, writer.access.bytes
    verb = "writes there, too" if second.access.write else "reads there"
    where = f"rank {region.owner}'s buffer (rendezvous {region.number} of group {region.group!r})"
    return (
        f"rank {writer.rank} writes bytes {part.begin} to {part.end} of {where} in "
        f"{writer.access.what}; rank {second.rank} {verb} in {second.access.what}; no barrier, "
        "signal or collective orders the two"
    )
