"""Compiled calls whose results one rank does not use: the rank makes them, since its peers wait.

A call may be dropped as dead code, or because kernels of empty tensors, which read nothing, are all
that use its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.utils import fresh_cache

import symm_cp
from symm_cp.inductor.options import Options
from tests.exhaustive import exhaustive
from tests.inductor.graphs import close, compare, draw, run, through_passes, without_kernels


def compares(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], backend: str) -> None:
    want, grads = run(fn, inputs)
    torch._dynamo.reset()
    got, got_grads = run(torch.compile(fn, backend=backend, fullgraph=True), inputs)
    close([*got, *got_grads], [*want, *grads])


@exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_empty_parts(group: dist.ProcessGroup, world_size: int) -> None:
    """A rank without rows takes part in the gather and in its gradient."""
    sizes = [3] + [0] * (group.size() - 1)
    inputs = draw(group, 0, *[(1, 2, sizes[group.rank()], 4)] * 2)

    def gather(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return symm_cp.all_gather_kv(k * 2, v * 2, group=group, sizes=sizes)

    with fresh_cache():
        compares(gather, inputs, "inductor")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.ranks(2)
def test_used_by_one_rank(group: dist.ProcessGroup, grad: bool) -> None:
    """Only rank 0 returns what it gathered first, as a rank does that logs."""
    inputs = draw(group, 0, (4, 6), (6, 6), requires_grad=grad)

    def multiply(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log, _ = symm_cp.all_gather_kv(x[None, None], x[None, None], group=group)
        out = symm_cp.all_gather_matmul(x, w, gather_dim=0, group=group)
        return (out * 2, log.detach() * 2) if group.rank() == 0 else (out * 2,)

    with without_kernels():
        compares(multiply, inputs, "inductor")
    compares(multiply, inputs, "aot_eager")
    # The backward pass does not make it again, though it has the inputs; rank 0 needs no more ops.
    ops = through_passes(multiply, inputs, Options()).ops
    assert ops.count("symm_mem.all_gather_kv.default") == 1, ops
    assert ops.count("symm_cp.keep.default") == (group.rank() > 0), ops


@pytest.mark.ranks(2)
def test_reduced_for_one_rank(group: dist.ProcessGroup) -> None:
    """The passes replace an all-reduce, which torch keeps, and a matmul before it."""
    inputs = draw(group, 0, (4, 6), (6, 6), requires_grad=False)

    def multiply(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        sums = [funcol.all_reduce(each, "sum", group) * 2 for each in (x, x @ w)]
        return [x + 1, *(sums if group.rank() == 0 else [])]

    compare(multiply, inputs)
