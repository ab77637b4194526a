"""Fused matmuls of CPU tensors that are exchanged at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import symm_cp
from tests.exhaustive import some

OPS = torch.ops.symm_mem
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A product of float32 numbers near 1, of inner lengths up to 40, and of sums of them.
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def lengths(group: dist.ProcessGroup, uneven: bool) -> list[int]:
    return [(2, 0, 3, 1)[r] if uneven else 3 for r in range(group.size())]


@pytest.mark.ranks(3)
def test_what_differs_by_rank_decides_nothing(group: dist.ProcessGroup) -> None:
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


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_a_rank_that_refuses(group: dist.ProcessGroup, world_size: int) -> None:
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


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_views_and_modes(group: dist.ProcessGroup, world_size: int) -> None:
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
