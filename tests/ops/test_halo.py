"""`exchange_halo`: rows of all neighbours, any dimension and dtype, gradients that go back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive
from tests.ops.refusals import Wrong, check_disagreements, check_refusals

pytestmark = device.devices(*device.NAMES)

OPS = torch.ops.symm_mem


def padded_parts(
    whole: torch.Tensor, sizes: list[int], left: int, right: int, dim: int
) -> list[torch.Tensor]:
    """The expected result of each rank, computed in one process."""
    dim %= whole.dim()
    zeros = [
        whole.new_zeros([*whole.shape[:dim], n, *whole.shape[dim + 1 :]]) for n in (left, right)
    ]
    padded = torch.cat([zeros[0], whole, zeros[1]], dim)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        padded.narrow(dim, start, left + size + right)
        for start, size in zip(starts, sizes, strict=True)
    ]


def exchanges(group: dist.ProcessGroup, sizes: list[int], dtypes: list[torch.dtype]) -> None:
    W, rank = group.size(), group.rank()
    generator = torch.Generator(device.name()).manual_seed(7 + sum(sizes))
    for dtype in dtypes:
        for left, right, dim in (
            (3, 0, -1),
            (0, 2, 0),
            (7, 5, 1),
            (0, 0, 1),
            (sum(sizes) + 2, 1, -2),
        ):
            shape = [2, 3, 4]
            shape[dim] = sum(sizes)
            whole = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            wanted = padded_parts(whole, sizes, left, right, dim)
            parts = whole.detach().split(sizes, dim)
            # Strides in another order, as a transposed projection has them.
            mine = parts[rank].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
            found = symm_cp.exchange_halo(mine, left, right, dim, group=group, sizes=sizes)
            assert found.is_contiguous()
            assert torch.equal(found, wanted[rank])
            grads = [torch.randn(part.shape, generator=generator).to(dtype) for part in wanted]
            (grad,) = torch.autograd.grad(found, mine, grads[rank])
            exact = whole.detach().to(torch.complex128 if dtype.is_complex else torch.float64)
            exact.requires_grad_()
            wide = [grad.to(exact.dtype) for grad in grads]
            (want,) = torch.autograd.grad(padded_parts(exact, sizes, left, right, dim), exact, wide)
            # Sums of at most W terms, computed in float32 and rounded once to the dtype.
            torch.testing.assert_close(
                grad.to(exact.dtype),
                want.split(sizes, dim)[rank],
                rtol=torch.finfo(dtype).eps,
                atol=8 * W * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps),
            )


@pytest.mark.parametrize("sizes", [[5], [4, 4], [5, 2], [3, 1, 6], [1, 4, 0, 2]])
def test_every_rank_gets_its_neighbours_rows(ranks: Ranks, sizes: list[int]) -> None:
    ranks.run(len(sizes), exchanges, sizes, [torch.float32])


@exhaustive
@pytest.mark.parametrize("sizes", [[4, 4], [5, 0, 2]])
def test_every_dtype(ranks: Ranks, sizes: list[int]) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    ranks.run(len(sizes), exchanges, sizes, dtypes)


@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    x = torch.zeros(2, 3, 4)

    def exchange(x: torch.Tensor = x, left: int = 1, **options: Any) -> torch.Tensor:
        return symm_cp.exchange_halo(x, left, **options, group=group)

    wrong: list[Wrong] = [
        (ValueError, "dim=3 is out of range for a 3-D tensor", {"dim": 3}),
        (ValueError, "left=-1 must not be negative", {"left": -1}),
        (ValueError, r"sizes=\[4, 5\] give rank", {"x": x[..., :3], "sizes": [4, 5]}),
    ]
    check_refusals(group, exchange, wrong, "exchange_halo")
    check_disagreements(exchange, [{"left": 1 + group.rank()}])
