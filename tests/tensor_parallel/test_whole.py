"""Parts that are joined to a whole tensor, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.tensor_parallel.whole import Seat, gather
from symm_cp.testing import Ranks
from tests.exhaustive import some

#: A shape, a dimension of it, and each rank's size in this dimension.
CASES = (
    ((1, 1, 8), -1, (5, 5, 5)),
    ((2, 8, 7), 1, (3, 0, 2)),
    ((8, 4), 0, (1, 5, 2)),
    ((3, 2, 8), -1, (4, 4, 3)),
    ((8,), 0, (4, 1, 2)),
    ((1, 1, 8), -1, (6_000_000, 6_000_000, 6_000_000)),  # more than fits into one transfer
)


def gathers(
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    dim: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator, parts = torch.Generator().manual_seed(seed), []
    for size in sizes:
        own = [*shape]
        own[dim] = size
        parts.append(torch.randn(own, generator=generator).to(dtype))
    seat, weight = Seat(group.group_name, group.rank(), len(sizes)), torch.cat(parts, dim)
    strided = parts[seat.rank].transpose(0, -1).contiguous().transpose(0, -1)
    for part in (parts[seat.rank].requires_grad_(), strided.requires_grad_()):
        whole = gather(part, dim, seat, sizes)
        assert whole.is_contiguous()
        assert torch.equal(whole, torch.cat(parts, dim))
        # All ranks have the whole gradient; each takes its own part.
        (grad,) = torch.autograd.grad(whole, part, weight)
        assert torch.equal(grad, parts[seat.rank])


@pytest.mark.parametrize(
    ("case", "dtype"),
    some(
        (CASES[1], torch.float32),
        (CASES[3], torch.bfloat16),
        of=[
            (case, dtype)
            for case in CASES
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        ],
    ),
)
def test_parts_are_joined(ranks: Ranks, case: tuple[Any, ...], dtype: torch.dtype) -> None:
    ranks.run(3, gathers, *case, dtype, torch.initial_seed() % 1000)
