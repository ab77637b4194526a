"""Shapes that hypothesis chooses, and shrinks when one fails."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import symm_cp
from symm_cp.testing import Ranks
from tests import reference

DTYPES = ["float64", "float32", "bfloat16", "float16"]
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = st.lists(st.integers(0, 9), min_size=2, max_size=4)


def gathers(group: dist.ProcessGroup, shape: list[int], dim: int, n: list[int], name: str) -> None:
    dtype = getattr(torch, name)
    shards = [torch.randn(shape).to(dtype) for _ in range(group.size())]
    inner = shape[-1] * (group.size() if dim % len(shape) == len(shape) - 1 else 1)
    weights = [torch.randn(inner, size).to(dtype) for size in n]
    full, expected = reference.all_gather_matmul(shards, weights, dim)
    gathered, outputs = symm_cp.all_gather_matmul(
        shards[group.rank()], weights, gather_dim=dim, group=group, return_gathered=True
    )
    assert torch.equal(gathered, full)
    for output, exact in zip(outputs, expected, strict=True):
        exact.check(output)


@SETTINGS
@given(
    world_size=st.integers(1, 4),
    shape=shapes,
    dim=st.integers(-4, 3),
    n=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_gathers(
    ranks: Ranks, world_size: int, shape: list[int], dim: int, n: list[int], dtype: str
) -> None:
    dim = dim % (2 * len(shape)) - len(shape)
    ranks.run(world_size, gathers, shape, dim, n, dtype)


def scatters(
    group: dist.ProcessGroup, shape: list[int], dim: int, n: int, name: str, reduce_op: str
) -> None:
    W, rank, dtype = group.size(), group.rank(), getattr(torch, name)
    size = list(shape)
    if dim % len(shape) == len(shape) - 1:
        n *= W
    else:
        size[dim] *= W
    a = [torch.randn(size).to(dtype) for _ in range(W)]
    b = [torch.randn(size[-1], n).to(dtype) for _ in range(W)]
    output = symm_cp.matmul_reduce_scatter(
        a[rank], b[rank], scatter_dim=dim, reduce_op=reduce_op, group=group
    )
    reference.matmul_reduce_scatter(a, b, dim, reduce_op)[rank].check(output)


@SETTINGS
@given(
    world_size=st.integers(1, 4),
    shape=shapes,
    dim=st.integers(-4, 3),
    n=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    reduce_op=st.sampled_from(["sum", "avg"]),
)
def test_scatters(
    ranks: Ranks,
    world_size: int,
    shape: list[int],
    dim: int,
    n: int,
    dtype: str,
    reduce_op: str,
) -> None:
    dim = dim % (2 * len(shape)) - len(shape)
    ranks.run(world_size, scatters, shape, dim, n, dtype, reduce_op)
