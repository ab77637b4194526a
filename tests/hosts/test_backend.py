"""The backend in groups that span hosts: results as on one host, errors that reach every rank."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Place, Ranks, say
from tests.backend import programs, sharded
from tests.backend.test_collectives import multiplied
from tests.backend.test_programs import compare
from tests.exhaustive import exhaustive, some
from tests.hosts.fabric import fabric

BACKEND = "symm_cp"
Op = dist.ReduceOp
#: The host of each rank.
SPREADS = pytest.mark.parametrize("hosts", some("0011", of=["0011", "0101", "0123", "012", "01"]))
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


@contextmanager
def on_hosts(group: dist.ProcessGroup, hosts: str) -> Iterator[None]:
    """Groups created inside treat their ranks as ranks of these hosts."""
    with mock.patch.dict(os.environ, SYMM_CP_HOST=f"host {hosts[group.rank()]}"):
        yield


@contextmanager
def spanning(
    group: dist.ProcessGroup, hosts: str, timeout: float = 60
) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks with the backend, spread over hosts."""
    limit, ranks = datetime.timedelta(seconds=timeout), dist.get_process_group_ranks(group)
    with on_hosts(group, hosts):
        made = dist.new_group(ranks, limit, BACKEND)
        yield made
    dist.barrier(group)
    dist.destroy_process_group(made)


def inputs(W: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor for each rank, with exact sums and products; all ranks draw the same ones."""
    values = torch.randint(0, 3, (W, *shape))
    return list((values.bool() if dtype is torch.bool else values.to(dtype)).unbind())


def total(values: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    stacked, dtype = torch.stack(values), values[0].dtype
    if op == Op.MAX:
        return stacked.amax(0)
    wide = stacked.to(torch.complex128)
    result = wide.prod(0) if op == Op.PRODUCT else wide.sum(0)
    if op == Op.AVG:
        result = result / len(values)
    if dtype is torch.bool:
        return result.real > 0
    return result.to(dtype) if dtype.is_complex else result.real.to(dtype)


def reductions(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    ops = [Op.SUM]
    if not dtype.is_complex:
        ops += [Op.PRODUCT, Op.MAX]
    return [*ops, Op.AVG] if dtype.is_floating_point else ops


def reduce(span: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rank, W = span.rank(), span.size()
    if not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool:
        with pytest.raises(NotImplementedError, match="avg of integers is not supported across"):
            dist.all_reduce(inputs(W, shape, dtype)[rank], Op.AVG, span)
    for op in reductions(dtype):
        xs = inputs(W, (W, *shape), dtype)
        mine = xs[rank].clone()
        dist.all_reduce(mine, op, span)
        torch.testing.assert_close(mine, total(xs, op))
        every = [torch.empty_like(mine) for _ in range(W)]
        dist.all_gather(every, mine, span)  # the same bits on all ranks
        assert all(torch.equal(one, mine) for one in every)

        root = W - 1
        mine = xs[rank].clone()
        dist.reduce(mine, dst=dist.get_global_rank(span, root), op=op, group=span)
        if rank == root:
            torch.testing.assert_close(mine, total(xs, op))
        out = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(out, [part.clone() for part in xs[rank]], op, span)
        torch.testing.assert_close(out, total([x[rank] for x in xs], op))
        strided = torch.empty((*shape[::-1], W), dtype=dtype).permute(2, 1, 0)
        strided.copy_(xs[rank])
        work = dist.all_reduce(strided, op, span, async_op=True)
        assert work is not None
        work.wait()
        torch.testing.assert_close(strided, total(xs, op))


def move(span: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rank, W = span.rank(), span.size()
    xs = inputs(W, shape, dtype)
    world_ranks = dist.get_process_group_ranks(span)
    for root in range(W):
        x = xs[rank].clone()
        dist.broadcast(x, src=world_ranks[root], group=span)
        assert torch.equal(x, xs[root])
        into = [torch.empty_like(x) for _ in range(W)] if rank == root else None
        dist.gather(xs[rank], into, dst=world_ranks[root], group=span)
        if into is not None:
            assert all(torch.equal(one, other) for one, other in zip(into, xs, strict=True))
        out = torch.empty_like(x)
        dist.scatter(out, xs if rank == root else None, src=world_ranks[root], group=span)
        assert torch.equal(out, xs[rank])
    gathered = torch.empty((W, *shape), dtype=dtype)
    work = dist.all_gather_into_tensor(gathered, xs[rank], span, async_op=True)
    assert work is not None
    work.get_future().wait()
    assert torch.equal(gathered, torch.stack(xs))
    sizes = [[(2 * one + other) % 3 for other in range(W)] for one in range(W)]
    parts = [inputs(W, (sizes[one][other], 2), dtype)[0] for one in range(W) for other in range(W)]
    sent = [parts[rank * W + other] for other in range(W)]
    received = torch.empty((sum(sizes[one][rank] for one in range(W)), 2), dtype=dtype)
    splits = [sizes[one][rank] for one in range(W)]
    dist.all_to_all_single(received, torch.cat(sent), splits, sizes[rank], span)
    assert torch.equal(received, torch.cat([parts[one * W + rank] for one in range(W)]))
    dist.barrier(span)


def sum_sparse(span: dist.ProcessGroup) -> None:
    """Ranks have different numbers of values, and some none."""
    rank, W = span.rank(), span.size()
    for later in (False, True):
        x = torch.sparse_coo_tensor(torch.arange(rank)[None], torch.ones(rank, 3), (W, 3))
        work = dist.all_reduce(x, group=span, async_op=later)
        if later:
            assert work is not None
            work.wait()
        expected = torch.arange(W - 1, -1, -1.0)[:, None].expand(W, 3)
        assert torch.equal(x.to_dense(), expected)


def sum_multiplied(span: dist.ProcessGroup) -> None:
    """Each rank multiplies by its own factor before the sum, as FSDP2 does with NCCL."""
    rank, W = span.rank(), span.size()
    op, factors = multiplied(0.5**rank), [0.5**each for each in range(W)]
    xs = [8.0 * x for x in inputs(W, (W, 3, 5), torch.float32)]
    expected = total([x * factor for x, factor in zip(xs, factors, strict=True)], Op.SUM)
    mine = xs[rank].clone()
    dist.all_reduce(mine, op, span)
    assert torch.equal(mine, expected)
    out = torch.empty(3, 5)
    dist.reduce_scatter(out, list(xs[rank]), op, span)
    assert torch.equal(out, expected[rank])
    several = [xs[rank].clone(), xs[rank][0].clone()]
    dist.all_reduce_coalesced(several, op, span)
    assert torch.equal(several[0], expected)
    assert torch.equal(several[1], expected[0])


def collectives(group: dist.ProcessGroup, hosts: str) -> None:
    with spanning(group, hosts) as span:
        assert span._get_backend(torch.device("cpu")).name() == BACKEND
        for dtype in DTYPES:
            for shape in ((3, 5), (0, 2), (200, 7)):
                reduce(span, shape, dtype)
                move(span, shape, dtype)
        reduce(span, (513, 400), torch.float32)  # in several messages and pieces
        move(span, (700, 1000), torch.float32)
        sum_sparse(span)
        sum_multiplied(span)


@SPREADS
@pytest.mark.exhaustive
def test_collectives(ranks: Ranks, hosts: str) -> None:
    ranks.run(len(hosts), collectives, hosts)


def many(group: dist.ProcessGroup, hosts: str) -> None:
    """Background calls in order, mixed with calls of another group and the package's ops."""
    with spanning(group, hosts) as span, spanning(group, hosts) as other:
        rank, W = span.rank(), span.size()
        tensors = [torch.full((100 + 50 * index,), float(rank)) for index in range(20)]
        works = [
            dist.all_reduce(tensor, group=(span, other)[index % 2], async_op=True)
            for index, tensor in enumerate(tensors)
        ]
        shard = torch.randn(W, 4, 6)
        gathered = symm_cp.all_gather_matmul(shard[rank], torch.eye(6), group=span)
        torch.testing.assert_close(gathered, shard.flatten(0, 1))
        for work, tensor in zip(works, tensors, strict=True):
            assert work is not None
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, W * (W - 1) / 2))
        after, before = (rank + 1) % W, (rank - 1) % W
        received = torch.empty(3)
        for request in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((3,), float(rank)), group=span, group_peer=after),
                dist.P2POp(dist.irecv, received, group=span, group_peer=before),
            ]
        ):
            request.wait()
        assert torch.equal(received, torch.full((3,), float(before)))


@SPREADS
def test_calls_in_flight(ranks: Ranks, hosts: str) -> None:
    ranks.run(len(hosts), many, hosts)


def compare_on_hosts(group: dist.ProcessGroup, hosts: str, program: Callable[[], Any]) -> None:
    with on_hosts(group, hosts):
        compare(group, program)


@exhaustive
@pytest.mark.parametrize(
    "name", [name for name in [*programs.SMALL, *sharded.ALL] if "compiled" not in name]
)
def test_programs(ranks: Ranks, name: str) -> None:
    program = (programs.SMALL | sharded.ALL)[name]
    ranks.run(4, compare_on_hosts, "0011", program)


def one_refuses(group: dist.ProcessGroup, hosts: str) -> None:
    """If one rank refuses a call, the others are told at once, and the group remains usable."""
    with spanning(group, hosts) as span:
        rank, W = span.rank(), span.size()

        def good() -> None:
            x = torch.ones(5)
            dist.all_reduce(x, group=span)
            assert torch.equal(x, torch.full((5,), float(W)))

        good()
        bad = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(bad, group=span),
            lambda: dist.reduce_scatter_tensor(
                torch.empty(2), torch.ones(2 * W + (rank == 1)), group=span
            ),
            lambda: dist.all_gather_into_tensor(
                torch.empty(W * 3 + (rank == 1)), torch.ones(3), group=span
            ),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises((ValueError, RuntimeError)) as error:
                call()
            assert time.monotonic() - began < 10
            assert rank == 1 or "rank 1" in str(error.value), str(error.value)
            good()
        with pytest.raises(RuntimeError, match="ranks disagree"):
            dist.all_reduce(torch.ones(4 if hosts[rank] == "0" else 6), group=span)
        good()


@SPREADS
def test_a_refused_call_ends_on_all_hosts(ranks: Ranks, hosts: str) -> None:
    ranks.run(len(hosts), one_refuses, hosts)


def unequal(group: dist.ProcessGroup) -> str:
    with spanning(group, "001") as span:
        x = torch.ones(3)
        dist.all_reduce(x, group=span)
        assert torch.equal(x, torch.full((3,), 3.0))
        return span._get_backend(torch.device("cpu")).name()


@exhaustive
def test_hosts_with_different_numbers_of_ranks_use_gloo(ranks: Ranks) -> None:
    with ranks.own(3, unequal) as running:
        outcomes = running.outcomes()
    assert [outcome.result for outcome in outcomes] == ["gloo"] * 3, outcomes
    assert "hold 2, 1" in outcomes[0].output


def until_one_dies(group: dist.ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    span = dist.new_group(ranks, datetime.timedelta(seconds=60), BACKEND)
    x = torch.ones(1000)
    dist.all_reduce(x, group=span)
    say(span._get_backend(torch.device("cpu")).name())
    try:
        while True:
            dist.all_reduce(x.fill_(1.0), group=span)
    except RuntimeError as error:
        say(str(error))


@pytest.mark.exhaustive
def test_a_rank_that_dies_is_named_on_all_hosts(ranks: Ranks) -> None:
    with fabric(2) as made:
        places = [made.place(rank // 2) for rank in range(4)]
        with ranks.own(4, until_one_dies, places=places) as running:
            assert running.hear_all() == [BACKEND] * 4
            running.kill(3)
            for rank in range(3):
                assert "rank 3" in running.hear(rank, timeout=20)


def gives_up_for_one_on_its_host(group: dist.ProcessGroup) -> None:
    """Rank 2 waits for rank 3 alone: only the end of its process shows on the other host."""
    ranks = dist.get_process_group_ranks(group)
    span = dist.new_group(ranks, datetime.timedelta(seconds=60), BACKEND)
    x = torch.ones(1000)
    dist.all_reduce(x, group=span)
    say("ready")
    if group.rank() == 3:
        time.sleep(60)
    try:
        dist.broadcast(x, src=0, group=span)  # the source, rank 0, waits for nobody
        dist.all_reduce(x, group=span)
    except RuntimeError as error:
        say(str(error))


@pytest.mark.exhaustive
def test_why_a_rank_gave_up_is_known_on_other_hosts(ranks: Ranks) -> None:
    places = [Place(environment={"SYMM_CP_HOST": f"host {rank // 2}"}) for rank in range(4)]
    with ranks.own(4, gives_up_for_one_on_its_host, places=places) as running:
        assert running.hear_all() == ["ready"] * 4
        running.kill(3)
        for rank in range(3):
            assert "rank 3" in running.hear(rank, timeout=20), rank
