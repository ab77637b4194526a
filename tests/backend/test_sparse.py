"""All-reduces of sparse tensors: sums of coordinates and values that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.backend.common import FLOATING, INTEGERS, settle, shared
from tests.backend.faulty import told
from tests.exhaustive import some

HOWS = ("sync", "async", "future", "poll")
#: Sizes, how many of the dimensions are sparse, and the number of values on a rank.
SHAPES = (
    ((5,), 1, lambda rank: 2 * rank),
    ((4, 3), 2, lambda rank: 7),
    ((6, 3), 1, lambda rank: rank),  # odd numbers of bytes
    ((3, 4, 2, 2), 2, lambda rank: 5),
    ((5, 2), 1, lambda rank: 0),
    ((0, 2), 1, lambda rank: 0),
    ((3, 0), 1, lambda rank: 2),
    ((1000, 64), 1, lambda rank: 3000 * (rank % 2)),  # several pieces, repeated coordinates
)


def cases(rank: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(99 + rank)
    for sizes, sparse, count in SHAPES:
        number = count(rank) if min(sizes[:sparse]) > 0 else 0
        indices = torch.stack(
            [torch.randint(0, max(1, n), (number,), generator=generator) for n in sizes[:sparse]]
        )
        values = torch.randint(0, 3, (number, *sizes[sparse:]), generator=generator).to(dtype)
        yield torch.sparse_coo_tensor(indices, values, sizes, check_invariants=True)


@pytest.mark.parametrize(
    ("world_size", "how"), some((1, "async"), (3, "sync"), (2, "future"), of=[
        (size, how) for size in (1, 2, 3, 4) for how in HOWS
    ])
)  # fmt: skip
@pytest.mark.ranks
def test_sums(group: dist.ProcessGroup, world_size: int, how: str) -> None:
    ours, size, rank = shared(group), group.size(), group.rank()
    # Not complex dtypes: torch passes a backend a copy of them (as pairs), which it then drops.
    for dtype in (*FLOATING, *INTEGERS):
        parts = zip(*[list(cases(peer, dtype)) for peer in range(size)], strict=True)
        for place, inputs in enumerate(parts):
            x = inputs[rank].clone()
            if place % 2:
                x = x.coalesce()
            settle(how, dist.all_reduce, x, group=ours)
            # The numbers are small: sums of up to 256 are exact in any dtype.
            total = torch.stack([each.to_dense().double() for each in inputs]).sum(0)
            exact = total.abs() <= 256
            assert x.is_sparse
            assert x.is_coalesced() or x._values().numel() == 0
            assert x.dtype == dtype
            assert torch.equal(x.to_dense()[exact], total.to(dtype)[exact]), (dtype, place)
    # Several at once in the background, mixed with dense calls.
    x, y, dense = *[next(cases(rank, torch.float32)) for _ in range(2)], torch.ones(10)
    works = [
        dist.all_reduce(each, group=ours, async_op=True) for each in (x, dense, y, dense.clone())
    ]
    for work in reversed(works):
        work.wait()
    expected = sum(next(cases(peer, torch.float32)).to_dense() for peer in range(size))
    assert torch.equal(x.to_dense(), expected)
    assert torch.equal(y.to_dense(), expected)
    assert (dense == size).all()


@pytest.mark.ranks(2)
def test_refused_or_different_on_ranks(group: dist.ProcessGroup) -> None:
    ours, rank = shared(group), group.rank()

    def x() -> torch.Tensor:
        return torch.sparse_coo_tensor([[rank]], [1.0], (4,))

    for later in (False, True):

        def call(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> str:
            def made() -> None:
                work = dist.all_reduce(tensor, op, group=ours, async_op=later)  # noqa: B023
                if work is not None:
                    work.wait()

            return told(made)

        assert "max of sparse tensors is not supported" in call(x(), dist.ReduceOp.MAX)
        if not later:  # in the background a sparse sum is two calls, a dense one is one
            message = call(x() if rank else torch.ones(4))
            assert "ranks disagree" in message, message
            dist.all_reduce(torch.ones(2), group=ours)
        message = call(torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,)))
        assert "ranks disagree" in message, message
        message = call(x(), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
        assert "max of sparse tensors is not supported" in message, message
        message = told(lambda: dist.broadcast(x(), group=ours, group_src=0))
        assert message != "no error"
        total = x()
        dist.all_reduce(total, group=ours)
        assert total.to_dense().sum() == group.size()
