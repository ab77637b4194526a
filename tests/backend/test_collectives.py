"""Each collective of the backend, every dtype and way to call it, against dense results."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.backend.common import (
    COMPLEX,
    FLOATING,
    INTEGERS,
    MOVED,
    REDUCED,
    all_gather_single,
    reduce_scatter_single,
    settle,
    shared,
    small_integers,
    strided,
)
from tests.exhaustive import pairs, some

HOWS = ("sync", "async", "future", "poll")
#: The last ones are sent in several pieces, and in two shots if there are more than two ranks.
SHAPES = ((), (0, 3), (5,), (3, 2, 4), (40_000,), (300_000,))
WORLD_SIZES = (1, 2, 3, 4)

Dtypes = tuple[torch.dtype, ...]
Op = dist.ReduceOp


def dense(op: Op.RedOpType, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The expected result of a reduction of all ranks' inputs; exact for small integers."""
    dtype = inputs[0].dtype
    stacked = torch.stack(inputs)
    if dtype is torch.bool:
        return stacked.all(0) if op in (Op.PRODUCT, Op.MIN, Op.BAND) else stacked.any(0)
    if op == Op.SUM:
        return stacked.to(torch.complex128 if dtype.is_complex else torch.float64).sum(0).to(dtype)
    if op == Op.AVG:
        if dtype.is_complex:
            return torch.view_as_complex(dense(op, [torch.view_as_real(x) for x in inputs]))
        if not dtype.is_floating_point:  # rounded toward zero; sums wrap
            return stacked.sum(0, dtype=dtype).div(len(inputs), rounding_mode="trunc")
        wide = dtype if dtype is torch.float64 else torch.float32
        return (stacked.to(wide).sum(0) / len(inputs)).to(dtype)
    result = inputs[0].clone()
    combine: dict[Op.RedOpType, Callable[..., torch.Tensor]] = {
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }
    for other in inputs[1:]:
        result = combine[op](result, other)
    return result


def reductions() -> list[tuple[Op.RedOpType, Dtypes]]:
    bitwise: Dtypes = (*INTEGERS, torch.bool)
    return [
        (Op.SUM, REDUCED),
        (Op.AVG, (*FLOATING, *INTEGERS, *COMPLEX)),
        (Op.PRODUCT, (*FLOATING, *INTEGERS, torch.bool)),
        (Op.MIN, (*FLOATING, *INTEGERS, torch.bool)),
        (Op.MAX, (*FLOATING, *INTEGERS, torch.bool)),
        (Op.BAND, bitwise),
        (Op.BOR, bitwise),
        *([(Op.BXOR, INTEGERS)]),
    ]


def all_inputs(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> list:
    return [small_integers(shape, dtype, rank) for rank in range(group.size())]


def cases(dtypes: Dtypes) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Every shape for two dtypes, small ones for all."""
    for dtype, shape in itertools.product(dtypes, SHAPES):
        if dtype in (torch.float32, torch.bfloat16) or math.prod(shape) < 10_000:
            yield dtype, shape


@pytest.mark.parametrize(
    ("world_size", "how"),
    some(
        (2, "async"),
        of=[*itertools.product((1, 3), ["sync"]), *itertools.product((2, 4), HOWS)],
    ),
)
@pytest.mark.ranks
def test_all_reduce(group: dist.ProcessGroup, world_size: int, how: str) -> None:
    ours = shared(group)
    for op, dtypes in reductions():
        for dtype, shape in cases(dtypes):
            inputs = all_inputs(group, shape, dtype)
            expected = dense(op, inputs)
            for x in (inputs[group.rank()].clone(), strided(inputs[group.rank()])):
                settle(how, dist.all_reduce, x, op, group=ours)
                assert torch.equal(x, expected), (op, dtype, shape)


def check_reduce(group: dist.ProcessGroup, how: str) -> None:
    ours = shared(group)
    for root, (dtype, shape) in itertools.product(range(group.size()), cases(FLOATING)):
        inputs = all_inputs(group, shape, dtype)
        x = strided(inputs[group.rank()])
        settle(how, dist.reduce, x, group=ours, group_dst=root)
        if group.rank() == root:
            assert torch.equal(x, dense(Op.SUM, inputs)), (root, dtype, shape)


def check_broadcast(group: dist.ProcessGroup, how: str) -> None:
    ours = shared(group)
    for root, (dtype, shape) in itertools.product(range(group.size()), cases(MOVED)):
        source = small_integers(shape, torch.int64, root).to(dtype)
        for make in (torch.clone, strided):
            x = make(source if group.rank() == root else torch.zeros_like(source))
            settle(how, dist.broadcast, x, group=ours, group_src=root)
            assert same(x, source), (root, dtype, shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality for dtypes that torch cannot compare."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    kind = bits[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def check_all_gather(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    for dtype, shape in cases(MOVED):
        inputs = [small_integers(shape, torch.int64, peer).to(dtype) for peer in range(size)]
        outputs = [
            strided(torch.zeros_like(x)) if i % 2 else torch.zeros_like(x)
            for i, x in enumerate(inputs)
        ]
        settle(how, dist.all_gather, outputs, inputs[rank], group=ours)
        assert all(map(same, outputs, inputs)), (dtype, shape)
        if shape == ():
            continue
        whole = torch.zeros(size * shape[0], *shape[1:], dtype=dtype)
        settle(how, all_gather_single, whole, strided(inputs[rank]), group=ours)
        assert same(whole, torch.cat(inputs))
        # In place, as FSDP does.
        whole = torch.zeros(size * shape[0], *shape[1:], dtype=dtype)
        own = whole.chunk(size)[rank] if shape[0] else whole
        own.copy_(inputs[rank])
        settle(how, all_gather_single, whole, own, group=ours)
        assert same(whole, torch.cat(inputs))


def check_uneven_all_gather(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    inputs = [small_integers((3 * peer, 2), torch.float32, peer) for peer in range(size)]
    outputs = [torch.zeros_like(x) for x in inputs]
    settle(how, dist.all_gather, outputs, inputs[rank], group=ours)
    assert all(map(torch.equal, outputs, inputs))


def check_gather_and_scatter(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    for root, dtype, shape in itertools.product(range(size), (torch.float32, torch.bool), SHAPES):
        inputs = all_inputs(group, shape, dtype)
        outputs = [strided(torch.zeros_like(x)) for x in inputs] if rank == root else None
        settle(how, dist.gather, inputs[rank], outputs, group=ours, group_dst=root)
        assert rank != root or all(map(torch.equal, outputs or [], inputs))
        x = strided(torch.zeros_like(inputs[0]))
        given = [strided(each) for each in inputs] if rank == root else None
        settle(how, dist.scatter, x, given, group=ours, group_src=root)
        assert torch.equal(x, inputs[rank])


def check_reduce_scatter(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    for op, dtypes in reductions():
        for dtype, shape in cases(dtypes):
            parts = [
                [small_integers(shape, dtype, size * peer + part) for part in range(size)]
                for peer in range(size)
            ]
            expected = dense(op, [row[rank] for row in parts])
            output = strided(torch.zeros_like(expected))
            settle(how, dist.reduce_scatter, output, parts[rank], op, group=ours)
            assert torch.equal(output, expected), (op, dtype, shape)
            if shape == ():
                continue
            output, whole = torch.zeros_like(expected), torch.cat(parts[rank])
            settle(how, reduce_scatter_single, output, whole, op, group=ours)
            assert torch.equal(output, expected), (op, dtype, shape)
            own = whole.chunk(size)[rank] if shape[0] else whole  # in place
            settle(how, reduce_scatter_single, own, whole, op, group=ours)
            assert torch.equal(own, expected), (op, dtype, shape)


def check_all_to_all(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    for dtype, columns in itertools.product(
        (torch.float32, torch.uint8, torch.complex64), ((), (3,), (20_000,))
    ):
        rows = [[(3 * giver + taker) % 4 for taker in range(size)] for giver in range(size)]
        sent = [
            [
                small_integers((rows[giver][taker], *columns), dtype, size * giver + taker)
                for taker in range(size)
            ]
            for giver in range(size)
        ]
        expected = [sent[giver][rank] for giver in range(size)]
        outputs = [strided(torch.zeros_like(x)) for x in expected]
        settle(how, dist.all_to_all, outputs, sent[rank], group=ours)
        assert all(map(torch.equal, outputs, expected))
        output = torch.zeros_like(torch.cat(expected))
        taken = [rows[giver][rank] for giver in range(size)]
        settle(
            how,
            dist.all_to_all_single,
            output,
            strided(torch.cat(sent[rank])),
            taken,
            rows[rank],
            group=ours,
        )
        assert torch.equal(output, torch.cat(expected))
        x = small_integers((2 * size, *columns), dtype, rank)
        even, theirs = torch.zeros_like(x), torch.zeros_like(x)
        settle(how, dist.all_to_all_single, even, x, group=ours)
        dist.all_to_all_single(theirs, x, group=group)
        assert torch.equal(even, theirs)
        settle(how, dist.all_to_all_single, x, x, group=ours)
        assert torch.equal(x, theirs)


def multiplied(factor: Any) -> Any:
    """The op that multiplies before it sums, which FSDP2 uses with NCCL; torch 2.15 renamed it."""
    make = getattr(dist, "_make_nccl_premul_sum", None) or Op.PREMUL_SUM
    return make(factor)


def check_multiplied(group: dist.ProcessGroup, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    factors = [2.0 ** -(1 + each) for each in range(size)]
    for as_tensor, (dtype, shape) in itertools.product((False, True), cases(FLOATING)):
        op = multiplied(torch.tensor([factors[rank]]) if as_tensor else factors[rank])
        inputs = [(x * 64).to(dtype) for x in all_inputs(group, (size, *shape), torch.float32)]
        scaled = [x * factor for x, factor in zip(inputs, factors, strict=True)]
        expected, own = dense(Op.SUM, scaled), inputs[rank]
        for x in (own.clone(), strided(own)):
            settle(how, dist.all_reduce, x, op, group=ours)
            assert torch.equal(x, expected), (dtype, shape)
        x = strided(own)
        settle(how, dist.reduce, x, op=op, group=ours, group_dst=size - 1)
        assert torch.equal(x, expected if rank == size - 1 else own), (dtype, shape)
        for scatter, given in (
            (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, own),
            (dist.reduce_scatter, list(own.clone())),
        ):
            output = torch.zeros_like(own[0])
            settle(how, scatter, output, given, op, group=ours)
            assert torch.equal(output, expected[rank]), (dtype, shape)
        assert torch.equal(own, inputs[rank])
    with pytest.raises(TypeError, match=r"PREMUL_SUM takes floating-point tensors, not int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), multiplied(0.5), group=ours)
    with pytest.raises(NotImplementedError, match="premul_sum of sparse tensors"):
        dist.all_reduce(torch.eye(2).to_sparse(), multiplied(0.5), group=ours)


CHECKS = {
    "reduce": check_reduce,
    "multiplied": check_multiplied,
    "broadcast": check_broadcast,
    "all_gather": check_all_gather,
    "uneven all_gather": check_uneven_all_gather,
    "gather, scatter": check_gather_and_scatter,
    "reduce_scatter": check_reduce_scatter,
    "all_to_all": check_all_to_all,
}


FEW = [(check, 3, "sync") for check in CHECKS]


@pytest.mark.parametrize(
    ("check", "world_size", "how"), some(*FEW, of=pairs(CHECKS, WORLD_SIZES, HOWS, also=FEW))
)
def test_collective(ranks: Ranks, check: str, world_size: int, how: str) -> None:
    ranks.run(world_size, CHECKS[check], how)


@pytest.mark.parametrize("world_size", some(2, of=WORLD_SIZES))
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.ranks
def test_coalesced(group: dist.ProcessGroup, world_size: int) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    for later in (False, True):
        inputs = [all_inputs(group, shape, torch.float32) for shape in SHAPES]
        own = [x[rank].clone() for x in inputs]
        with dist._coalescing_manager(ours, async_ops=later) as manager:
            for x in own:
                dist.all_reduce(x, group=ours)
        if later:
            manager.wait()
        for x, each in zip(own, inputs, strict=True):
            assert torch.equal(x, dense(Op.SUM, each))
        outputs = [torch.zeros(size, *shape) for shape in SHAPES]
        with dist._coalescing_manager(ours, async_ops=later) as manager:
            for whole, each in zip(outputs, inputs, strict=True):
                all_gather_single(whole, each[rank], ours)
        if later:
            manager.wait()
        for whole, each in zip(outputs, inputs, strict=True):
            assert torch.equal(whole, torch.stack(each))
        parts = [torch.zeros(shape) for shape in SHAPES]
        with dist._coalescing_manager(ours, async_ops=later) as manager:
            for part, whole in zip(parts, outputs, strict=True):
                reduce_scatter_single(part, whole, group=ours)
        if later:
            manager.wait()
        for part, each in zip(parts, inputs, strict=True):
            assert torch.equal(part, size * each[rank])
    lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
    dist.all_gather_coalesced(
        lists, [torch.full((3,), float(rank)), torch.full((2, 2), float(rank))], ours
    )
    for peer, (one, other) in enumerate(lists):
        assert (one == peer).all()
        assert (other == peer).all()


@pytest.mark.parametrize("world_size", some(1, 3, of=WORLD_SIZES))
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.ranks
def test_tensors_that_share_memory(group: dist.ProcessGroup, world_size: int) -> None:
    """Tensors that occur twice in a list, or share memory, give the results that gloo gives."""
    ours, size, rank = shared(group), group.size(), group.rank()

    def of(peer: int, count: int, step: float = 1.0) -> torch.Tensor:
        return torch.arange(count) * step + 10.0 * peer

    def check(found: torch.Tensor, expected: Callable[[int], torch.Tensor], name: str) -> None:
        assert torch.equal(found, expected(size - 1)), (name, found)

    total = sum(of(peer, 6) for peer in range(size))
    t = of(rank, 6)
    dist.all_reduce_coalesced([t, t], group=ours)
    assert torch.equal(t, total), t
    t = of(rank, 6)
    dist.all_reduce_coalesced([t[:4], t[2:]], group=ours)
    assert torch.equal(t, total), t
    t = of(rank, 6).view(2, 3)
    dist.all_reduce_coalesced([t[:, 1], t, t.t()], group=ours)
    assert torch.equal(t, total.view(2, 3)), t
    t = of(rank, 6)
    with dist._coalescing_manager(ours, async_ops=True) as manager:
        dist.all_reduce(t, group=ours)
        dist.all_reduce(t, group=ours)
    manager.wait()
    assert torch.equal(t, total), t

    # Outputs that share memory hold the last one's values, the same on all ranks.
    t = torch.zeros(2)
    dist.all_gather([t] * size, of(rank, 2), group=ours)
    check(t, lambda last: of(last, 2), "all_gather")
    t = torch.zeros(2)
    dist.gather(of(rank, 2), [t] * size if rank == 0 else None, group=ours, group_dst=0)
    if rank == 0:
        check(t, lambda last: of(last, 2), "gather")
    t = torch.zeros(2)
    given = [of(rank, 2, step=peer + 2.0) for peer in range(size)]
    dist.all_to_all([t] * size, given, group=ours)
    check(t, lambda last: of(last, 2, step=rank + 2.0), "all_to_all")
    t = torch.zeros(2)
    pair = [of(rank, 2), of(rank, 2, step=3.0)]
    dist.all_gather_coalesced([[t, t] for _ in range(size)], pair, ours)
    check(t, lambda last: of(last, 2, step=3.0), "all_gather_coalesced")
    # If one exchange writes memory that another one reads, the read comes first.
    one, other = torch.zeros(2 * size), torch.zeros(2 * size)
    one[:2] = of(rank, 2, step=5.0)
    with dist._coalescing_manager(ours):
        all_gather_single(one, of(rank, 2), ours)
        all_gather_single(other, one[:2], ours)
    assert torch.equal(one, torch.cat([of(peer, 2) for peer in range(size)])), one
    assert torch.equal(other, torch.cat([of(peer, 2, step=5.0) for peer in range(size)])), other
    whole, part = of(rank, 2 * size), torch.zeros(2)
    with dist._coalescing_manager(ours):
        reduce_scatter_single(whole[:2], whole + 1, group=ours)
        reduce_scatter_single(part, whole, group=ours)
    summed = sum(of(peer, 2 * size) for peer in range(size))[2 * rank : 2 * rank + 2]
    assert torch.equal(whole[:2], summed + size), whole
    assert torch.equal(part, summed), part


@pytest.mark.parametrize("world_size", some(3, of=WORLD_SIZES))
@pytest.mark.ranks
def test_objects_and_barriers(group: dist.ProcessGroup, world_size: int) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    values = [None] * size
    dist.all_gather_object(values, {"rank": rank, "text": "x" * 1000 * rank}, ours)
    assert values == [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(size)]
    listed = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(listed, group=ours, group_src=0)
    assert listed == [0, "first"]
    taken = [None]
    dist.scatter_object_list(
        taken, list(range(size)) if rank == 0 else None, group=ours, group_src=0
    )
    assert taken == [rank]
    gathered = [None] * size if rank == size - 1 else None
    dist.gather_object(rank, gathered, group=ours, group_dst=size - 1)
    assert gathered is None or gathered == list(range(size))
    dist.barrier(ours)
    dist.barrier(ours, async_op=True).wait()
    ours.monitored_barrier()


@pytest.mark.parametrize("world_size", some(3, of=(2, 3, 4)))
@pytest.mark.ranks
def test_messages(group: dist.ProcessGroup, world_size: int) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    for elements in (0, 5, 1_000_000):
        outgoing = small_integers((elements,), torch.float32, rank)
        for make in (torch.clone, lambda x: strided(x.view(-1, 1))):
            incoming = make(torch.zeros_like(outgoing))
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, make(outgoing), group=ours, group_peer=after, tag=7),
                    dist.P2POp(dist.irecv, incoming, group=ours, group_peer=before, tag=7),
                ]
            )
            for work in works:
                work.wait()
            assert torch.equal(
                incoming.flatten(), small_integers((elements,), torch.float32, before)
            )
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            x = torch.zeros(2)
            source = dist.recv(x, group=ours)
            seen.add(dist.get_group_rank(ours, source))
            assert (x == dist.get_group_rank(ours, source)).all()
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), group=ours, group_dst=0)
    # Messages are matched by tag, not by order; here they are waited for through a future.
    if rank == 0:
        dist.isend(torch.tensor([1.0]), group=ours, group_dst=1, tag=1)
        dist.isend(torch.tensor([2.0]), group=ours, group_dst=1, tag=2)
    if rank == 1:
        x = torch.zeros(1)
        for tag in (2, 1):
            work = dist.irecv(x, group=ours, group_src=0, tag=tag)
            assert work.get_future().wait()[0] is not None
            assert x.item() == tag


@pytest.mark.parametrize("world_size", some(2, of=WORLD_SIZES))
@pytest.mark.ranks
def test_works_in_flight(group: dist.ProcessGroup, world_size: int) -> None:
    """Works in flight are waited for in any order or dropped, and mix with blocking calls."""
    ours, size, rank = shared(group), group.size(), group.rank()
    tensors = [small_integers((1 + 50_000 * (i % 3),), torch.float32, rank) for i in range(12)]
    expected = [
        dense(Op.SUM, [small_integers(tuple(x.shape), torch.float32, peer) for peer in range(size)])
        for x in tensors
    ]
    works = [dist.all_reduce(x, group=ours, async_op=True) for x in tensors]
    if rank == 0:  # this rank waits first, the others make another call first
        works[5].wait()
    x = torch.ones(10)
    dist.all_reduce(x, group=ours)
    assert (x == size).all()
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(rank)).tolist()
    for index in order[:-3]:
        works[index].wait()
        works[index].wait()
    del works  # some were not waited for
    last = dist.all_reduce(torch.ones(1), group=ours, async_op=True)
    last.wait()
    assert all(map(torch.equal, tensors, expected))
    chained = dist.all_reduce(torch.ones(3), group=ours, async_op=True).get_future()
    assert (chained.then(lambda future: future.value()[0] * 2).wait() == 2 * size).all()


def sub_groups(group: dist.ProcessGroup) -> None:
    """Groups of different ranks in different orders, used by several threads at once."""
    world = dist.get_process_group_ranks(group)
    members = [world, world[:2], world[1:], world[::-1]]
    made = [dist.new_group(each, backend="symm_cp") for each in members]
    failures: list[BaseException] = []

    def use(ours: dist.ProcessGroup) -> None:
        try:
            for i in range(30):
                x = torch.full((1000 * i,), float(ours.rank()))
                dist.all_reduce(x, group=ours)
                assert (x == sum(range(ours.size()))).all()
        except BaseException as error:
            failures.append(error)

    made = [each for each in made if isinstance(each, dist.ProcessGroup)]
    threads = [threading.Thread(target=use, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for each in made:
        dist.destroy_process_group(each)


def test_sub_groups_and_threads(ranks: Ranks) -> None:
    with ranks.own(3, sub_groups) as running:
        for outcome in running.outcomes():
            assert not outcome.failure, outcome
