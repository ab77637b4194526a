"""Fused matmuls of CPU tensors that are exchanged at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.testing import Ranks
from tests.exhaustive import pairs, some

OPS = torch.ops.symm_mem
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A product of float32 numbers near 1, of inner lengths up to 40, and of sums of them.
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def gathered(group: dist.ProcessGroup, shard: torch.Tensor, dim: int) -> torch.Tensor:
    """The concatenated tensors of all ranks, whose shapes differ along `dim` only."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, shard, group=group)
    return torch.cat(parts, dim)


def summed(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tensor.double(), group=group)
    return torch.stack(parts).sum(0)


def lengths(group: dist.ProcessGroup, uneven: bool) -> list[int]:
    return [2 + (r * 2) % 3 if uneven else 3 for r in range(group.size())]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    near = NEAR[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=near, atol=near)


def same_as_dense(
    group: dist.ProcessGroup, dtype: torch.dtype, dim: int, uneven: bool, seed: int
) -> None:
    """Each op at once, by shards and whole."""
    torch.manual_seed(seed)
    sizes = lengths(group, uneven)
    own, total, last = sizes[group.rank()], sum(sizes), dim == 2
    shape = [2, 3, 5]
    shape[dim] = own
    inner = total if last else 5
    weights = [torch.randn(inner, n).to(dtype) for n in (4, 1)]
    torch.manual_seed(seed + 1 + group.rank())
    shard = torch.randn(shape).to(dtype)
    given = sizes if uneven else None

    whole = gathered(group, shard, dim).double()
    for algorithm in (None, "shards", "whole"):
        with tuning.forced(algorithm):
            got, products = symm_cp.all_gather_matmul(
                shard, weights, gather_dim=dim, group=group, return_gathered=True, sizes=given
            )
        assert torch.equal(got.double(), whole), algorithm
        for product, weight in zip(products, weights, strict=True):
            assert_near(product, whole @ weight.double())

    # A whole tensor that is scattered along `dim` of the product.
    shape = [2, 3, 5]
    columns = total if last else 4
    if not last:
        shape[dim] = total
    a, b = torch.randn(shape).to(dtype), torch.randn(5, columns).to(dtype)
    product = summed(group, a.double() @ b.double())
    begin = sum(sizes[: group.rank()])
    part = product.narrow(dim, begin, own)
    for algorithm in (None, "shards"):
        for reduce_op in ("sum", "avg"):
            with tuning.forced(algorithm):
                scattered = symm_cp.matmul_reduce_scatter(
                    a, b, scatter_dim=dim, reduce_op=reduce_op, group=group, sizes=given
                )
            assert scattered.is_contiguous()
            # Partial sums of 16 bits are rounded once more on each rank.
            near = NEAR[dtype] * 2 * group.size()
            expected = part / (group.size() if reduce_op == "avg" else 1)
            torch.testing.assert_close(scattered, expected.to(dtype), rtol=near, atol=near)


CASES = [
    (2, torch.float32, 0, False),
    (2, torch.bfloat16, 1, True),
    (3, torch.float32, 2, True),
]


@pytest.mark.parametrize(
    ("world_size", "dtype", "dim", "uneven"),
    some(*CASES, of=pairs((1, 2, 3, 4), DTYPES, (0, 1, 2), (False, True), also=CASES)),
)
def test_results(ranks: Ranks, world_size: int, dtype: torch.dtype, dim: int, uneven: bool) -> None:
    ranks.run(world_size, same_as_dense, dtype, dim, uneven, random.randrange(1 << 30))


def other_columns(group: dist.ProcessGroup) -> None:
    """Weight columns and inner dimensions that differ between ranks do not affect decisions."""
    rank, size = group.rank(), group.size()
    x = torch.ones(2, 8)
    large = 4096 if rank == 0 else 1  # by itself this product would be worth a pipeline
    y = symm_cp.all_gather_matmul(x, torch.ones(8, large), group=group)
    assert torch.equal(y, torch.full((2 * size, large), 8.0))
    inner = 4096 if rank == 0 else 1
    z = symm_cp.matmul_reduce_scatter(
        torch.ones(2 * size, inner), torch.ones(inner, 3), group=group
    )
    assert torch.equal(z, torch.full((2, 3), 4096.0 + size - 1))


def test_what_differs_by_rank_decides_nothing(ranks: Ranks) -> None:
    ranks.run(3, other_columns)


def one_refuses(group: dist.ProcessGroup) -> None:
    x, w = torch.ones(2, 4), torch.ones(4, 3)
    wrong = torch.ones(5, 3) if group.rank() == 1 else w
    for call in (
        lambda: symm_cp.all_gather_matmul(x, wrong, group=group),
        lambda: symm_cp.matmul_reduce_scatter(torch.ones(2 * group.size(), 4), wrong, group=group),
    ):
        with pytest.raises((ValueError, RuntimeError), match="needs 4 rows"):
            call()
        expected = torch.full((2 * group.size(), 3), 4.0)
        assert torch.equal(symm_cp.all_gather_matmul(x, w, group=group), expected)


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
def test_a_rank_that_refuses(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, one_refuses)


def views(group: dist.ProcessGroup) -> None:
    """Results depend neither on where operands lie nor on their strides, and may be modified."""
    size = group.size()
    base, w = torch.randn(9, 7), torch.randn(5, 4, requires_grad=True)
    strided = base[1::2, 1:6]
    y = symm_cp.all_gather_matmul(strided, w, group=group)
    assert torch.equal(y, symm_cp.all_gather_matmul(strided.clone(), w, group=group))
    y += 1
    a = torch.randn(5, 2 * size).t()
    z = symm_cp.matmul_reduce_scatter(a, w, group=group)
    assert torch.equal(z, symm_cp.matmul_reduce_scatter(a.contiguous(), w, group=group))
    z.mul_(2).sum().backward()
    with torch.inference_mode():
        assert symm_cp.all_gather_matmul(strided, w, group=group).is_inference()


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
def test_views_and_modes(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, views)
