"""All-reduces of ranks on several sockets: sums within each first, then between them.

No machine of these tests has several: `SYMM_CP_SOCKETS` divides the ranks as if it had. Six and
eight ranks, on two and four sockets, are threads of a process (`python -m tests.native`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_cp
from symm_cp import env
from symm_cp.native.wire import ExchangeKind, ReduceOp
from symm_cp.schedule import Signal
from symm_cp.testing import RankError, Ranks
from tests.exhaustive import exhaustive, some
from tests.test_exchange import CHANNELS, DTYPES, LARGE, PIECE, SIZES, exchange, given, reduced

OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)


@contextmanager
def spread(group: dist.ProcessGroup, sockets: int) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks, as if on `sockets` sockets."""
    os.environ["SYMM_CP_SOCKETS"] = str(sockets)
    own = dist.new_group(list(range(group.size())), backend="symm_cp")
    try:
        yield own
    finally:
        dist.destroy_process_group(own)
        os.environ.pop("SYMM_CP_SOCKETS")


def flags_raised(group: dist.ProcessGroup, nbytes: int) -> set[str]:
    """Checks an all-reduce of ones; returns the flags that this rank raises in it."""
    x = torch.ones(nbytes // 4)
    with symm_cp.trace() as recording:
        dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full_like(x, group.size()))
    steps = [event.step for event in recording.timeline.events]
    return {step.flag for step in steps if isinstance(step, Signal)}


def by_socket(parts: Sequence[torch.Tensor], sockets: int, op: ReduceOp) -> torch.Tensor:
    each = len(parts) // sockets
    within = [reduced(parts[at : at + each], op) for at in range(0, len(parts), each)]
    return reduced(within, op)


def check_sums(
    group: dist.ProcessGroup, sockets: int, cases: Sequence[tuple[int, torch.dtype, int, ReduceOp]]
) -> None:
    rank, ranks = group.rank(), range(group.size())
    with spread(group, sockets) as own:
        for channel, dtype, size, op in cases:
            lengths = [max(0, size // len(ranks) + (5 * part - 3) * (size > 100)) for part in ranks]
            parts = [[given(dtype, r, part, lengths[part]) for part in ranks] for r in ranks]
            found = [torch.full_like(part, 77) for part in parts[rank]]
            kind = ExchangeKind.TWO_SHOT_ALL_REDUCE
            exchange(own, kind, parts[rank], found, channel=channel, op=op)
            for part in ranks:
                wanted = by_socket([parts[source][part] for source in ranks], sockets, op)
                assert torch.equal(found[part], wanted), (channel, dtype, size, op, part)


def random_cases(sizes: Sequence[int], count: int) -> list[tuple[int, torch.dtype, int, ReduceOp]]:
    cases = [
        (channel, dtype, size, op)
        for channel in CHANNELS
        for dtype in DTYPES
        for size in sizes
        for op in OPS
        if op is not ReduceOp.AVG or dtype.is_floating_point
    ]
    return random.sample(cases, min(count, len(cases)))


def test_sums_are_those_of_each_socket_and_then_of_all(ranks: Ranks) -> None:
    cases = [*random_cases(SIZES, 8), *random_cases(LARGE, 2)]
    ranks.run(4, check_sums, 2, cases)


@exhaustive
def test_all_sums(ranks: Ranks) -> None:
    ranks.run(4, check_sums, 2, random_cases(SIZES, 1000))
    ranks.run(4, check_sums, 2, random_cases(LARGE, 12))


def check_where_it_runs(group: dist.ProcessGroup, sockets: int, divides: bool) -> None:
    with spread(group, sockets) as own:
        flags = flags_raised(own, PIECE)
        assert ("relayed" in flags) is divides, flags
        assert "relayed" not in flags_raised(own, 1024)  # in one shot
        # A symmetric tensor is reduced in place.
        symmetric = symm_mem.empty((PIECE,), device="cpu").fill_(1)
        symm_mem.rendezvous(symmetric, own)
        torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", own.group_name)
        assert torch.equal(symmetric, torch.full_like(symmetric, own.size()))


@pytest.mark.parametrize(
    ("world_size", "sockets", "divides"),
    [(4, 2, True), (4, 1, False), (4, 4, False), (3, 2, False)],
)
def test_sockets_that_ranks_do_not_divide_into(
    ranks: Ranks, world_size: int, sockets: int, divides: bool
) -> None:
    ranks.run(world_size, check_where_it_runs, sockets, divides)


def test_a_number_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.sockets() is None
    for text in ("0", "two", "-1", "1.5"):
        monkeypatch.setenv("SYMM_CP_SOCKETS", text)
        with pytest.raises(ValueError, match=f"SYMM_CP_SOCKETS='{text}' must be a number"):
            env.sockets()
    monkeypatch.setenv("SYMM_CP_SOCKETS", "2")
    assert env.sockets() == 2


def check_background(group: dist.ProcessGroup) -> None:
    rank, world_size = group.rank(), group.size()
    with spread(group, 2) as own:
        sizes = [70_001, 1_000_003, 3, 300_000]
        tensors = [torch.arange(size, dtype=torch.float64) * (rank + 1) for size in sizes]
        works = [dist.all_reduce(tensor, group=own, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        for tensor, size in zip(tensors, sizes, strict=True):
            factor = world_size * (world_size + 1) // 2
            assert torch.equal(tensor, torch.arange(size, dtype=torch.float64) * factor)


def test_in_the_background(ranks: Ranks) -> None:
    ranks.run(4, check_background)


def disagree(group: dist.ProcessGroup) -> None:
    """Rank 3 of 4 passes another size; it is neither on rank 0's socket nor its twin."""
    with spread(group, 2) as own:
        for _ in range(2):
            x = torch.ones(PIECE + (group.rank() == 3))
            with pytest.raises(RuntimeError, match="ranks disagree"):
                dist.all_reduce(x, group=own)
            assert "relayed" in flags_raised(own, PIECE)


def test_ranks_that_disagree(ranks: Ranks) -> None:
    ranks.run(4, disagree)


def die(group: dist.ProcessGroup, victim: int) -> str:
    with spread(group, 2) as own:
        flags_raised(own, PIECE)
        if group.rank() == victim:
            os._exit(7)
        with pytest.raises(RuntimeError, match=f"rank {victim}") as caught:
            dist.all_reduce(torch.ones(4 * PIECE), group=own)
        return str(caught.value)


@pytest.mark.parametrize("victim", some(3, of=[0, 1, 2, 3]))
def test_a_rank_that_dies_is_named_on_both_sockets(ranks: Ranks, victim: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(4, die, victim)
    assert f"rank {victim}" in str(caught.value)
