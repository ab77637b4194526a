"""Sends and receives of the backend: the same results as with gloo, and their errors."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import some
from tests.patience import patient

#: Elements: none, eager messages up to 64 KiB, and messages that go in pieces.
SIZES = [0, 1, 3, 1000, 16384, 16385, 100_003, 2 << 20]


def _drawn(source: int, destination: int, number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source * 10_000 + destination * 1_000 + number)
    return torch.randn(size, generator=generator)


def _empty(size: int) -> torch.Tensor:
    return torch.full((size,), torch.nan)


def _each_pair_in_turn(rank: int, size: int) -> list[torch.Tensor]:
    found = []
    for source in range(size):
        for destination in range(size):
            for number, elements in enumerate(SIZES):
                if source == destination or rank not in (source, destination):
                    continue
                if rank == source:
                    dist.send(_drawn(source, destination, number, elements), destination)
                else:
                    found.append(_empty(elements))
                    assert dist.recv(found[-1], source) == source
    return found


def _all_at_once_tags_out_of_order(rank: int, size: int) -> list[torch.Tensor]:
    others = [peer for peer in range(size) if peer != rank]
    numbers = list(range(len(SIZES)))
    sends = [
        dist.isend(_drawn(rank, peer, n, SIZES[n]), peer, tag=n) for peer in others for n in numbers
    ]
    found = {(peer, n): _empty(SIZES[n]) for peer in others for n in numbers}
    receives = [dist.irecv(found[p, n], p, tag=n) for p in others for n in reversed(numbers)]
    for work in [*reversed(receives), *sends]:
        assert work is not None
        work.wait()
    return list(found.values())


def _batch(rank: int, size: int) -> list[torch.Tensor]:
    after, before = (rank + 1) % size, (rank - 1) % size
    found = [_empty(elements) for elements in SIZES]
    operations = [
        dist.P2POp(dist.isend, _drawn(rank, after, n, elements), after)
        for n, elements in enumerate(SIZES)
    ]
    operations += [dist.P2POp(dist.irecv, out, before) for out in found]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found


def _any_source(rank: int, size: int) -> list[torch.Tensor]:
    if rank != 0:
        for number in range(10):
            dist.send(_drawn(rank, 0, number, 100), 0)
        return []
    found: dict[int, list[torch.Tensor]] = {}
    for _ in range(10 * (size - 1)):
        out = _empty(100)
        found.setdefault(dist.recv(out), []).append(out)
    return [out for source in sorted(found) for out in found[source]]


def _threads(rank: int, size: int) -> list[torch.Tensor]:
    peer = rank ^ 1
    found = [_empty(elements) for elements in SIZES]

    def both_ways(number: int) -> None:
        sent = dist.isend(_drawn(rank, peer, number, SIZES[number]), peer, tag=number)
        dist.recv(found[number], peer, tag=number)
        assert sent is not None
        sent.wait()

    if peer >= size:
        return []
    threads = [threading.Thread(target=both_ways, args=(n,)) for n in range(len(SIZES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


PROGRAMS = {
    "each pair in turn": _each_pair_in_turn,
    "tags out of order": _all_at_once_tags_out_of_order,
    "batch": _batch,
    "any source": _any_source,
    "threads": _threads,
}


def _run(group: dist.ProcessGroup, backend: str, program: str) -> list[torch.Tensor]:
    with world(group, backend):
        found = PROGRAMS[program](dist.get_rank(), dist.get_world_size())
        dist.barrier()
        return found


@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_as_gloo(ranks: Ranks, program: str, world_size: int) -> None:
    ours = ranks.run(world_size, _run, "symm_cp", program)
    gloos = ranks.run(world_size, _run, "gloo", program)
    for own, wanted in zip(ours, gloos, strict=True):
        assert len(own) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))


@pytest.mark.parametrize("reads", ["11", "00", "10"])
@pytest.mark.ranks(2)
def test_long_messages(group: dist.ProcessGroup, reads: str) -> None:
    """Messages of up to 20 MiB, both ways at once; `reads[rank]` sets SYMM_CP_READ_MESSAGES."""
    os.environ["SYMM_CP_READ_MESSAGES"] = reads[group.rank()]
    try:
        with world(group, "symm_cp"):
            rank, peer = dist.get_rank(), 1 - dist.get_rank()
            for elements in (16_384, 16_385, 1_000_003, 5 << 20):
                sent, found = _drawn(rank, peer, elements, elements), torch.empty(elements)
                strided = _drawn(rank, peer, 1, 60_000).view(200, 300).t()
                works = [dist.isend(sent, peer), dist.isend(strided.contiguous(), peer, tag=1)]
                other = torch.empty(300, 200)
                dist.recv(other, peer, tag=1)
                dist.recv(found, peer)
                for work in works:
                    work.wait()
                assert torch.equal(found, _drawn(peer, rank, elements, elements))
                assert torch.equal(other, _drawn(peer, rank, 1, 60_000).view(200, 300).t())
    finally:
        del os.environ["SYMM_CP_READ_MESSAGES"]


def _sizes_differ(group: dist.ProcessGroup, elements: int) -> str:
    with world(group, "symm_cp"):
        try:
            if dist.get_rank() == 0:
                dist.recv(torch.empty(4), 1, tag=5)
            else:
                dist.send(torch.empty(2, elements // 2), 0, tag=5)
                dist.recv(torch.empty(1), 0)  # the send of a short message has already returned
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("elements", [6, 200_000])
def test_other_sizes_are_named_on_both_sides(ranks: Ranks, elements: int) -> None:
    for error in ranks.run(2, _sizes_differ, elements):
        assert f"rank 1 sends float32[2, {elements // 2}] ({elements * 4} bytes)" in error
        assert "rank 0 receives float32[4] (16 bytes)" in error
        assert "tag 5" in error


def _late(group: dist.ProcessGroup) -> tuple[str, float, torch.Tensor, torch.Tensor]:
    with world(group, "symm_cp"):
        first, second = torch.zeros(50_000), torch.zeros(50_000)
        error, seconds = "", 0.0
        if dist.get_rank() == 0:
            start = time.monotonic()
            work = dist.irecv(first, 1)
            assert work is not None
            try:
                work.wait(datetime.timedelta(milliseconds=100))
            except RuntimeError as raised:
                error, seconds = str(raised), time.monotonic() - start
            dist.barrier()
            dist.recv(second, 1)
        else:
            dist.barrier()
            dist.send(torch.ones(50_000), 0)
        return error, seconds, first, second


def test_a_message_after_the_time_out_goes_to_the_next_receive(ranks: Ranks) -> None:
    error, seconds, first, second = ranks.run(2, _late)[0]
    assert "recv from rank 1" in error
    assert "timed out after 100 ms" in error
    assert 0.1 <= seconds < patient(2)
    assert not first.any()
    assert second.all()


def _peer_dies(group: dist.ProcessGroup, receives: bool, reads: str) -> tuple[str, float]:
    """Returns the error, and when it came."""
    os.environ["SYMM_CP_READ_MESSAGES"] = reads
    with world(group, "symm_cp"):
        x = torch.zeros(2 << 20)
        dist.barrier()
        if dist.get_rank() == 1:
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.start()
        try:
            while True:
                if (dist.get_rank() == 0) == receives:
                    dist.recv(x, 1 - dist.get_rank())
                else:
                    dist.send(x, 1 - dist.get_rank())
        except RuntimeError as error:
            return str(error), time.monotonic()


@pytest.mark.parametrize("reads", ["1", "0"])
@pytest.mark.parametrize("receives", some(True, of=[True, False]))
def test_a_peer_that_is_killed_is_named(ranks: Ranks, receives: bool, reads: str) -> None:
    with ranks.own(2, _peer_dies, receives, reads) as running:
        survivor, killed = running.outcomes()
    assert killed.died_at is not None, killed.failure
    assert survivor.result is not None, survivor.failure
    error, heard_at = survivor.result
    assert "rank 1 died" in error
    assert heard_at - killed.died_at < 2.0
