"""`ulysses_projection` and `ulysses_output_projection` against projections of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.tensors.shards import Split
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import some
from tests.reference import reduce

pytestmark = device.devices(*device.NAMES)
D, E = 10, 4


def heads_of(W: int, uneven: bool) -> tuple[list[int], Any, list[list[tuple[int, int]]]]:
    """Numbers of query and key heads, the caller's argument, and the heads that each rank gets."""
    if not uneven:
        each = [(2 * r, 2 * r + 2) for r in range(W)]
        return [2 * W, 2 * W], None, [each, each]
    split = Split.nearly_equal(2 * W + 1, W)
    queries = [(split.start(r), split.start(r) + split.sizes[r]) for r in range(W)]
    keys = [(r // 2, r // 2 + 1) for r in range(W)]
    return [2 * W + 1, (W + 1) // 2], [split, keys], [queries, keys]


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight
    return (y if bias is None else y + bias).unflatten(2, (-1, E)).transpose(1, 2)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def projects(group: dist.ProcessGroup, uneven: bool, dtype: torch.dtype) -> None:
    W, rank = group.size(), group.rank()
    counts, given, ranges = heads_of(W, uneven)
    balancer = symm_cp.HeadTail(4 * W + 3, W) if uneven else None
    layout = balancer or symm_cp.Sequential(3 * W, W)
    rows = layout.positions(rank)
    x, *weights = leaves((2, layout.seq_length, D), *((D, H * E) for H in counts))
    biases = leaves(*((H * E,) for H in counts)) if uneven else None
    grads = [torch.randn(2, H, layout.seq_length, E, dtype=torch.float64) for H in counts]
    local = [t.detach().to(dtype).requires_grad_() for t in (x[:, rows], *weights, *(biases or []))]
    mine, matrices, added = local[0], local[1:3], local[3:] or None
    got = symm_cp.ulysses_projection(
        mine, matrices, features=E, group=group, biases=added, load_balancer=balancer, heads=given
    )
    loss = x.new_zeros(())
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 0.2}
    )
    for index, (weight, held, grad) in enumerate(zip(weights, ranges, grads, strict=True)):
        whole = dense(x, weight, None if biases is None else biases[index])
        begin, end = held[rank]
        torch.testing.assert_close(got[index].double(), whole[:, begin:end], **tolerance)
        for first, last in held:  # the loss of all ranks
            loss = loss + (whole[:, first:last] * grad[:, first:last]).sum()
    sum(
        (y * grad[:, slice(*held[rank])].to(dtype)).sum()
        for y, held, grad in zip(got, ranges, grads, strict=True)
    ).backward()
    leaf = [x, *weights, *(biases or [])]
    wanted = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(mine.grad.double(), wanted[0][:, rows], **tolerance)
    for parameter, want in zip(local[1:], wanted[1:], strict=True):
        parts = [torch.empty_like(parameter) for _ in range(W)]
        dist.all_gather(parts, parameter.grad, group=group)
        reduce_wide = reduce(parts).value
        torch.testing.assert_close(reduce_wide, want, **tolerance)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
def test_projection(ranks: Ranks, world_size: int, dtype: torch.dtype, uneven: bool) -> None:
    ranks.run(world_size, projects, uneven, dtype)


def collects(group: dist.ProcessGroup, uneven: bool, dtype: torch.dtype) -> None:
    W, rank = group.size(), group.rank()
    (H, _), given, (held, _) = heads_of(W, uneven)
    balancer = symm_cp.HeadTail(4 * W + 3, W) if uneven else None
    layout = balancer or symm_cp.Sequential(3 * W, W)
    rows, (begin, end) = layout.positions(rank), held[rank]
    x, weight = leaves((2, H, layout.seq_length, E), (H * E, D))
    (bias,) = leaves((D,))
    grad = torch.randn(2, layout.seq_length, D, dtype=torch.float64)
    want = x.transpose(1, 2).flatten(2) @ weight + bias
    local = [t.detach().to(dtype).requires_grad_() for t in (x[:, begin:end], weight, bias)]
    heads = None if given is None else given[0]
    got = symm_cp.ulysses_output_projection(
        local[0], local[1], group=group, bias=local[2], load_balancer=balancer, heads=heads
    )
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 0.2}
    )
    torch.testing.assert_close(got.double(), want[:, rows], **tolerance)
    got.backward(grad[:, rows].to(dtype))
    of_x, of_weight, _ = torch.autograd.grad(want, (x, weight, bias), grad)
    torch.testing.assert_close(local[0].grad.double(), of_x[:, begin:end], **tolerance)
    parts = [torch.empty_like(weight, dtype=dtype) for _ in range(W)]
    dist.all_gather(parts, local[1].grad, group=group)
    torch.testing.assert_close(reduce(parts).value, of_weight, **tolerance)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
def test_output_projection(ranks: Ranks, world_size: int, dtype: torch.dtype, uneven: bool) -> None:
    ranks.run(world_size, collects, uneven, dtype)


@device.devices("cpu")
@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    x, w = torch.zeros(1, 3, 4), torch.zeros(4, 8)

    def project(x: Any, w: Any, **options: Any) -> None:
        symm_cp.ulysses_projection(x, w, **{"features": 2, "group": group, **options})

    with pytest.raises(ValueError, match="must have 3 dimensions"):
        project(x[0], w)
    with pytest.raises(ValueError, match="8 columns, which is not divisible by 3 features"):
        project(x, w, features=3)
    with pytest.raises(ValueError, match="must have one number for each of"):
        project(x, w, biases=torch.zeros(3))
    with pytest.raises(TypeError, match="they must agree"):
        project(x, w.double())
    y = torch.zeros(1, 2, 6, 2)
    with pytest.raises(ValueError, match="weight has 7 rows, must have 8"):
        symm_cp.ulysses_output_projection(y, torch.zeros(7, 3), group=group)
    with pytest.raises(TypeError, match=r"weight is torch.float64"):
        symm_cp.ulysses_output_projection(y, w.double(), group=group)
    project(x, w)
