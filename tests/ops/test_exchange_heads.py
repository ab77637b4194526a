"""`sequence_to_heads` and `heads_to_sequence` against the whole tensors of all ranks."""

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

Ranges = list[tuple[int, int]]


def ranges_of(split: Split) -> Ranges:
    begins = [split.start(rank) for rank in range(len(split.sizes))]
    return [(begin, begin + size) for begin, size in zip(begins, split.sizes, strict=True)]


def balancers(W: int) -> list[symm_cp.LoadBalancer | None]:
    return [
        None,
        symm_cp.HeadTail(8 * W, W),
        symm_cp.HeadTail(4 * W + 3, W),
        symm_cp.PerDocumentHeadTail([5, 1, 7 * W], W),
    ]


def heads_of(W: int) -> list[tuple[int, Any, Ranges]]:
    """The number of heads, the caller's argument, and the heads that each rank gets."""
    uneven = Split.nearly_equal(2 * W - 1, W)
    fewer = Split((1,) + (0,) * (W - 1))
    replicated = [(rank // 2, rank // 2 + 1) for rank in range(W)]
    return [
        (2 * W, None, ranges_of(Split.equal(2, W))),
        (2 * W - 1, uneven, ranges_of(uneven)),
        (1, fewer, ranges_of(fewer)),
        ((W + 1) // 2, replicated, replicated),
    ]


def strided(x: torch.Tensor, how: int) -> torch.Tensor:
    """The same numbers, with the strides of a projection's result, of a batch of one, and so on."""
    if how == 0:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == 1:
        return x.mT.contiguous().mT
    return x.contiguous()


def exchanges_one(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    balancer: symm_cp.LoadBalancer | None,
    heads: tuple[int, Any, Ranges],
    how: int,
) -> None:
    W, rank = group.size(), group.rank()
    H, given, ranges = heads
    layout = balancer or symm_cp.Sequential(6 * W, W)
    whole = torch.randn(2, H, layout.seq_length, 5).to(dtype)
    (begin, end), rows = ranges[rank], layout.positions(rank)
    x = strided(whole[:, :, rows], how).requires_grad_()
    y = symm_cp.sequence_to_heads(x, group=group, load_balancer=balancer, heads=given)
    assert torch.equal(y, whole[:, begin:end])
    assert y.is_contiguous()
    parts = [torch.zeros_like(whole) for _ in range(W)]
    for part, (first, last) in zip(parts, ranges, strict=True):
        part[:, first:last] = torch.randn(2, last - first, *whole.shape[2:]).to(dtype)
    grad = strided(parts[rank][:, begin:end], how).requires_grad_()
    back = symm_cp.heads_to_sequence(grad, group=group, load_balancer=balancer, heads=given)
    reduce([part[:, :, rows] for part in parts]).check(back)
    assert back.transpose(1, 2).is_contiguous()
    (found,) = torch.autograd.grad(y, x, grad.detach())
    assert torch.equal(found, back)
    (again,) = torch.autograd.grad(back, grad, x.detach())
    assert torch.equal(again, whole[:, begin:end])


def exchanges(group: dist.ProcessGroup) -> None:
    W = group.size()
    for turn, heads in enumerate(heads_of(W)):
        for dtype, balancer in zip(
            (torch.float32, torch.bfloat16, torch.float64, torch.float16), balancers(W), strict=True
        ):
            exchanges_one(group, dtype, balancer, heads, turn % 3)


@pytest.mark.parametrize("world_size", some(1, 2, 3, of=[1, 2, 3, 4]))
def test_exchanges_and_gradients(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, exchanges)


@pytest.mark.ranks(3)
def test_several_tensors_travel_together(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    q, k, v = (
        torch.randn(1, 2 * W, 4 * W, 8),
        torch.randn(1, 1, 4 * W, 8),
        torch.randn(1, 1, 4 * W, 3),
    )
    rows = slice(4 * rank, 4 * rank + 4)
    heads = [Split.equal(2, W), [(0, 1)] * W, [(0, 1)] * W]
    local = [t[:, :, rows].clone().requires_grad_() for t in (q, k, v)]
    got = symm_cp.sequence_to_heads(local, group=group, heads=heads)
    assert torch.equal(got[0], q[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(got[1], k)
    assert torch.equal(got[2], v)
    # Only one of them gets a gradient.
    got[1].sum().backward()
    assert torch.equal(local[1].grad, torch.full_like(local[1], W))
    assert torch.equal(local[0].grad, torch.zeros_like(local[0]))


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_many_pieces(group: dist.ProcessGroup, world_size: int) -> None:
    """Tensors that need several pieces of the slot, some with rows larger than a piece."""
    W, rank = group.size(), group.rank()
    for shape in ((1, 2 * W, 700 * W, 64), (3, W, 8 * W, 40000), (70, W, 20 * W, 8)):
        whole = torch.randn(shape)
        layout = symm_cp.HeadTail(shape[2], W)
        each = shape[1] // W
        x = strided(whole[:, :, layout.positions(rank)], 0)
        y = symm_cp.sequence_to_heads(x, group=group, load_balancer=layout)
        assert torch.equal(y, whole[:, rank * each : (rank + 1) * each])
        back = symm_cp.heads_to_sequence(y, group=group, load_balancer=layout)
        assert torch.equal(back, x)


@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    x = torch.zeros(1, 4, 3, 2)
    one: dict[str, Any] = {"group": group}
    with pytest.raises(ValueError, match="must have 4 dimensions"):
        symm_cp.sequence_to_heads(x[0], **one)
    with pytest.raises(ValueError, match="3 heads, which is not divisible by world size 2"):
        symm_cp.sequence_to_heads(x[:, :3], **one)
    with pytest.raises(ValueError, match="3 positions, which is not divisible by world size 2"):
        symm_cp.heads_to_sequence(x, **one)
    with pytest.raises(ValueError, match="each head is held by at least one rank"):
        symm_cp.sequence_to_heads(x, heads=[(0, 1), (2, 4)], **one)
    with pytest.raises(ValueError, match="has 4 heads, must have 3"):
        symm_cp.sequence_to_heads(x, heads=Split((1, 2)), **one)
    with pytest.raises(ValueError, match="has 2 numbers, must have 2 for each of 2 ranks"):
        symm_cp.sequence_to_heads(x, heads=[(0, 4)], **one)
    with pytest.raises(ValueError, match="3 positions, must have 4"):
        symm_cp.sequence_to_heads(x, load_balancer=symm_cp.HeadTail(8, 2), **one)
    with pytest.raises(TypeError, match=r"x\[1\] is torch.float64"):
        symm_cp.sequence_to_heads([x, x.double()], **one)
    with pytest.raises(ValueError, match="heads has 1 entries for 2 tensors"):
        symm_cp.sequence_to_heads([x, x], heads=[Split((2, 2))], **one)
    symm_cp.sequence_to_heads(x, **one)


@device.devices("cpu")
@pytest.mark.ranks(2)
def test_notices_ranks_that_disagree(group: dist.ProcessGroup) -> None:
    x = torch.zeros(1, 4, 3 + group.rank(), 2)
    with pytest.raises(RuntimeError, match="disagree"):
        symm_cp.sequence_to_heads(x, group=group)
    symm_cp.sequence_to_heads(x[:, :, :3], group=group)


@device.devices("cpu")
@pytest.mark.ranks(2)
def test_a_rank_that_refuses_tells_the_others(group: dist.ProcessGroup) -> None:
    x, w = torch.zeros(1, 4, 3, 2), torch.zeros(3, 8)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"sequence_to_heads: .*must have 4 dimensions"
    ):
        symm_cp.sequence_to_heads(x if group.rank() else x[0], group=group)
    weight = w if group.rank() else w.double()
    with pytest.raises((TypeError, RuntimeError), match=r"ulysses_projection: .*they must agree"):
        symm_cp.ulysses_projection(torch.zeros(1, 3, 3), weight, features=2, group=group)
    symm_cp.sequence_to_heads(x, group=group)
