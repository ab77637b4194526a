"""Races on symmetric memory are found whatever the timing, and without false reports."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp.testing import RaceError, Ranks, detect_races
from symm_cp.testing.accesses import (
    Access,
    Bytes,
    Event,
    Meeting,
    Put,
    RendezvousBuffer,
    Return,
    Wait,
)
from symm_cp.testing.races import find_races
from tests.exhaustive import some

# --- programs ----------------------------------------------------------------------------------


class Rank:
    """A rank with a buffer of 16 numbers, and its neighbours' buffers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.own = symm_mem.empty(16, device="cpu").zero_()
        self.handle = symm_mem.rendezvous(self.own, group)
        self.next, self.last = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.peer = self.handle.get_buffer(self.next, (16,), torch.float32)


def reads_at_once(r: Rank) -> None:
    r.own.fill_(r.rank)
    r.peer.sum()


def reads_behind_a_barrier(r: Rank) -> None:
    r.own.fill_(r.rank)
    r.handle.barrier()
    r.peer.sum()
    r.handle.barrier()
    r.own.fill_(1)


def writes_again_too_soon(r: Rank) -> None:
    r.own.fill_(r.rank)
    r.handle.barrier()
    r.peer.sum()
    r.own.fill_(1)


def signals(r: Rank) -> None:
    r.peer.fill_(1.0)
    r.handle.put_signal(r.next)
    r.handle.wait_signal(r.last)
    r.own.sum()
    r.handle.put_signal(r.last, 1)
    r.handle.wait_signal(r.next, 1)
    r.peer.fill_(2.0)


def signals_on_another_channel(r: Rank) -> None:
    """The signal that is waited for comes before the write."""
    r.handle.put_signal(r.next)
    r.peer.fill_(1.0)
    r.handle.wait_signal(r.last)
    r.own.sum()


def all_reduces(r: Rank) -> None:
    r.own.fill_(r.rank)
    dist.all_reduce(torch.ones(1), group=r.group)
    r.peer.sum()
    dist.barrier(r.group)
    r.own.add_(1)


def broadcasts_from_0(r: Rank) -> None:
    """Orders the other ranks after the root, but not among themselves."""
    if r.rank == 0:
        r.own.fill_(1)
    dist.broadcast(torch.ones(1), 0, group=r.group)
    if r.rank > 0:
        r.handle.get_buffer(0, (16,), torch.float32).sum()


def broadcasts_and_writes_there(r: Rank) -> None:
    broadcasts_from_0(r)
    if r.rank == 0:
        r.own.fill_(2)


def broadcasts_between_two_others(r: Rank) -> None:
    """A broadcast orders its root before the others, but not the others among themselves."""
    if r.rank == 1:
        r.own.fill_(1)
    dist.broadcast(torch.ones(1), 0, group=r.group)
    if r.rank == 2:
        r.handle.get_buffer(1, (16,), torch.float32).sum()


def reduces_between_two_others(r: Rank) -> None:
    if r.rank == 1:
        r.own.fill_(1)
    dist.reduce(torch.ones(1), 0, group=r.group)
    if r.rank == 2:
        r.handle.get_buffer(1, (16,), torch.float32).sum()


def reduces_to_0(r: Rank) -> None:
    if r.rank > 0:
        r.own.fill_(1)
    dist.reduce(torch.ones(1), 0, group=r.group)
    if r.rank == 0:
        r.handle.get_buffer(1, (16,), torch.float32).sum()


def sends(r: Rank) -> None:
    r.peer.fill_(1.0)
    if r.rank % 2:
        dist.recv(torch.ones(1), r.last, group=r.group)
        r.own.sum()
    elif r.next % 2:
        dist.send(torch.ones(1), r.next, group=r.group)


def columns(r: Rank) -> None:
    """Ranks write to the same rows, each to a column of its own."""
    r.handle.get_buffer(0, (4, 4), torch.float32)[:, r.rank].fill_(1)


def rows_and_a_column(r: Rank) -> None:
    whole = r.handle.get_buffer(0, (4, 4), torch.float32)
    (whole[:, 1] if r.rank else whole[2]).fill_(1)


def only_views(r: Rank) -> None:
    r.own.fill_(1)
    r.peer.view(4, 4)[1:].t().detach()
    assert torch.zeros_like(r.peer).shape == r.peer.new_empty(16).shape
    assert not r.peer.is_pinned()


def ops(r: Rank) -> None:
    r.own.fill_(r.rank)
    torch.ops.symm_mem.one_shot_all_reduce(r.own, "sum", r.group.group_name)
    r.own.fill_(2)


def puts(r: Rank) -> None:
    r.own.fill_(1)
    torch.ops.symm_mem.nvshmem_put(r.own, r.next)


def puts_between_barriers(r: Rank) -> None:
    halves = r.own.split(8)
    halves[0].fill_(r.rank)
    r.handle.barrier()
    if r.rank == 0:
        torch.ops.symm_mem.nvshmem_put(halves[0], r.next)
    r.handle.barrier()
    halves[0].sum()


def puts_with_signals(r: Rank) -> None:
    """The signal orders what was put before it, whoever it was that put."""
    pad = symm_mem.empty(1, dtype=torch.int64, device="cpu").zero_()
    symm_mem.rendezvous(pad, r.group)
    half = r.own[:8].fill_(r.rank)
    r.handle.barrier()
    if r.rank == 0:
        torch.ops.symm_mem.nvshmem_put_with_signal(half, pad, 1, 1)
    if r.rank == 1:
        torch.ops.symm_mem.nvshmem_wait_for_signal(pad, 1, 0)
        half.sum()


def puts_with_signals_in_pads(r: Rank) -> None:
    """The same, with the pad that torch gives the handle."""
    half = r.own[:8].fill_(r.rank)
    pad = r.handle.get_signal_pad(r.rank)[4:6].zero_()
    r.handle.barrier()
    if r.rank == 0:
        torch.ops.symm_mem.nvshmem_put_with_signal(half, pad, 1, 1)
    if r.rank == 1:
        torch.ops.symm_mem.nvshmem_wait_for_signal(pad, 1, 0)
        half.sum()


def subgroup(r: Rank) -> None:
    """A barrier of a subgroup does not order the accesses of other ranks."""
    pair = dist.new_group([0, 1])
    r.own.fill_(1)
    if r.rank < 2:
        dist.barrier(pair)
    r.peer.sum()


def lists(r: Rank) -> None:
    r.own.fill_(r.rank)
    r.peer.tolist()


def prints(r: Rank) -> None:
    r.own.fill_(r.rank)
    assert f"{r.peer}".startswith("tensor(")


def asks_numpy(r: Rank) -> None:
    r.own.fill_(r.rank)
    np.asarray(r.peer).sum()


def copies_by_numpy(r: Rank) -> None:
    r.own.fill_(r.rank)
    copied = np.asarray(r.peer, dtype=np.float64)
    r.handle.barrier()
    copied.sum()


def hands_to_numpy(r: Rank) -> None:
    r.own.fill_(r.rank)
    np.from_dlpack(r.peer).sum()


def views_of_numpy(r: Rank) -> None:
    """A view may be made at any time: what matters is when it is read."""
    views = [r.peer.numpy(), np.from_dlpack(r.peer), torch.from_dlpack(r.peer)]
    lasting = r.peer.numpy()[3:]
    r.own.fill_(r.rank)
    r.handle.barrier()
    assert [view.sum() for view in views] == [16 * r.next] * 3
    del views
    r.handle.barrier()
    r.own.fill_(7)
    r.handle.barrier()
    assert lasting.sum() == 13 * 7


def views_that_are_gone_too_late(r: Rank) -> None:
    """The view is deleted without a barrier before its owner writes again."""
    r.own.fill_(r.rank)
    r.handle.barrier()
    view = r.peer.numpy()
    view.sum()
    del view
    r.own.fill_(7)


def prints_ends(r: Rank) -> None:
    """`repr` of more than 1000 numbers reads only three at each end."""
    own = symm_mem.empty(2000, device="cpu").zero_()
    handle = symm_mem.rendezvous(own, r.group)
    handle.barrier()
    own[3:-3].fill_(1)
    assert "..." in repr(handle.get_buffer(r.next, (2000,), torch.float32))


def prints_an_end_that_is_written(r: Rank) -> None:
    own = symm_mem.empty(2000, device="cpu").zero_()
    handle = symm_mem.rendezvous(own, r.group)
    handle.barrier()
    own[-3:].fill_(1)
    repr(handle.get_buffer(r.next, (2000,), torch.float32))


def reads_its_own_by_other_means(r: Rank) -> None:
    """Reads its own buffer, and a tensor outside of symmetric memory."""
    r.own.fill_(r.rank)
    plain = r.own.clone()
    for x in (r.own, plain):
        assert [x.tolist(), str(x), x.numpy().sum(), np.from_dlpack(x).sum()]
    with pytest.raises(BufferError, match="require gradient"):
        torch.nn.Parameter(r.own).__dlpack__()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.nn.Parameter(r.own).numpy()
    assert torch.nn.Parameter(r.own).numpy(force=True).sum() == 16 * r.rank


RIGHT = [
    *(reads_behind_a_barrier, signals, all_reduces, broadcasts_from_0, columns, only_views, ops),
    *(reduces_to_0, puts_between_barriers),
    puts_with_signals,
    puts_with_signals_in_pads,
    sends,
    *(views_of_numpy, prints_ends, reads_its_own_by_other_means),
]
WRONG = {
    reads_at_once: (
        r"rank 1 writes bytes 0 to 64 of rank 1's buffer \(rendezvous 0 of group '.*'\) in "
        r"aten\.fill_ at test_races\.py:\d+; rank 0 reads there in aten\.sum at test_races\.py:"
        r"\d+; no barrier, signal or collective orders the two"
    ),
    writes_again_too_soon: "reads there in aten.sum",
    signals_on_another_channel: "reads there in aten.sum",
    broadcasts_and_writes_there: "rank 0 writes .* in aten.fill_ .*; rank [12] reads",
    broadcasts_between_two_others: "rank 1 writes .* in aten.fill_ .*; rank 2 reads",
    reduces_between_two_others: "rank 1 writes .* in aten.fill_ .*; rank 2 reads",
    rows_and_a_column: "rank 0 writes bytes 32 to 48 .*; rank 1 writes there, too",
    puts: "symm_mem.nvshmem_put at",
    subgroup: "rank 2",
    lists: r"reads there in Tensor.tolist at test_races.py:\d+;",
    prints: r"reads there in Tensor.__repr__ at test_races.py:\d+;",
    asks_numpy: r"reads there in Tensor.numpy at test_races.py:\d+;",
    copies_by_numpy: r"reads there in Tensor.numpy at test_races.py:\d+;",
    hands_to_numpy: r"reads there in Tensor.__dlpack__ at test_races.py:\d+;",
    views_that_are_gone_too_late: "reads there in Tensor.numpy",
    prints_an_end_that_is_written: r"bytes 7988 to 8000 of .* reads there in Tensor.__repr__",
}


def looks(group: dist.ProcessGroup, program: Callable[[Rank], None]) -> str:
    try:
        with detect_races(group):
            program(Rank(group))
    except RaceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("program", RIGHT)
def test_programs_without_races(ranks: Ranks, program: Callable[[Rank], None]) -> None:
    assert ranks.run(3, looks, program) == [""] * 3


@pytest.mark.parametrize("program", WRONG)
def test_programs_with_races(ranks: Ranks, program: Callable[[Rank], None]) -> None:
    found = ranks.run(3, looks, program)
    assert found[0] == found[1] == found[2]
    assert re.search(WRONG[program], found[0]), found[0]


# --- random notes ------------------------------------------------------------------------------


def random_program(ranks: int, steps: int, draw: random.Random) -> tuple[list[list[Event]], set]:
    """Returns logs of a possible run, and the pairs of accesses that nothing orders."""
    logs: list[list[Event]] = [[] for _ in range(ranks)]
    nodes: list[tuple[int, int]] = []  # rank, place in its log
    edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sent: list[tuple[int, int, tuple[int, int]]] = []
    lent: list[tuple[tuple[int, int], int]] = []
    ends: dict[tuple[int, int], tuple[int, int]] = {}  # of loans

    def add(rank: int, event: Event) -> tuple[int, int]:
        node = (rank, len(logs[rank]))
        logs[rank].append(event)
        edges[node] = [(rank, node[1] - 1)] if node[1] else []
        nodes.append(node)
        return node

    for _ in range(steps):
        kind, rank = (
            draw.choice(["access", "access", "access", "return", "meet", "put", "wait"]),
            draw.randrange(ranks),
        )
        if kind == "access":
            begin = 4 * draw.randrange(4)
            part = Bytes(begin, (draw.randrange(1, 3),), (1,), 4)
            region = RendezvousBuffer("g", 0, draw.randrange(2))
            write = draw.random() < 0.5
            loan = len(nodes) + 1 if not write and draw.random() < 0.5 else 0
            node = add(rank, Access(region, part, write, f"{rank} {len(logs[rank])}", loan))
            if loan:
                lent.append((node, loan))
        elif kind == "return" and lent:
            node, loan = lent.pop(draw.randrange(len(lent)))
            ends[node] = add(node[0], Return(loan))
        elif kind == "meet":
            members = tuple(sorted(draw.sample(range(ranks), draw.randrange(2, ranks + 1))))
            arrived = [add(member, Meeting(("m", members), members)) for member in members]
            for node in arrived:
                edges[node] += [(r, place - 1) for r, place in arrived if place]
        elif kind == "put":
            to = draw.choice([r for r in range(ranks) if r != rank])
            sent.append((rank, to, add(rank, Put(to, ("s",)))))
        elif kind == "wait" and sent:
            source, to, node = next(s for s in sent)
            sent.remove((source, to, node))
            edges[add(to, Wait(source, ("s",)))].append(node)

    ends |= {node: (node[0], len(logs[node[0]]) - 1) for node, _ in lent}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for node in nodes:  # in an order that every edge agrees with
        before[node] = set().union(*({e} | before.get(e, set()) for e in edges[node]))
    accesses = [n for n in nodes if isinstance(logs[n[0]][n[1]], Access)]
    races = set()
    for one in accesses:
        for other in accesses:
            a, b = logs[one[0]][one[1]], logs[other[0]][other[1]]
            assert isinstance(a, Access)
            assert isinstance(b, Access)
            apart = a.bytes.end <= b.bytes.begin or b.bytes.end <= a.bytes.begin
            if one[0] >= other[0] or a.region != b.region or apart or not (a.write or b.write):
                continue
            if (
                one not in before[ends.get(other, other)]
                and other not in before[ends.get(one, one)]
            ):
                races.add(frozenset({a.what, b.what}))
    return logs, races


@pytest.mark.parametrize("count", some(300, of=[300, 20_000]))
def test_random_notes(count: int) -> None:
    """Compares the races found with all paths of the happens-before graph."""
    draw = random.Random(torch.initial_seed())
    racy = 0
    for _ in range(count):
        ranks = draw.randrange(2, 5)
        logs, races = random_program(ranks, draw.randrange(4, 40), draw)
        found = {
            frozenset({one.access.what, other.access.what})
            for one, other in find_races(dict(enumerate(logs)))
        }
        assert found <= races
        assert bool(found) == bool(races)
        racy += bool(races)
    assert count / 10 < racy < count


def test_bytes_that_meet() -> None:
    rows, column = Bytes(32, (4,), (1,), 4), Bytes(4, (4,), (4,), 4)
    assert rows.dense
    assert not column.dense
    assert rows.meets(column)
    assert not Bytes(0, (4,), (4,), 4).meets(column)
    assert not Bytes(48, (1,), (1,), 4).meets(rows)
    # A transposed tensor has no gaps, either.
    assert Bytes(0, (2, 3), (1, 2), 8).dense
    # A view of another dtype, from the middle of a number.
    assert Bytes(6, (1,), (1,), 2).meets(column)
    assert not Bytes(2, (1,), (1,), 2).meets(column)
