"""The reference of the pipeline against dense attention, and the op against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from symm_cp.ops.attention.reference import all_gather_attention
from symm_cp.schedule import CAUSAL, NO_MASK, Mask, SequenceLayout, head_tail, sequential

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def masks(length: int) -> list[Mask]:
    return [
        NO_MASK,
        CAUSAL,
        Mask(left=4, right=0),
        Mask(left=2, right=3, documents=(0, length // 3, length // 2, length)),
        Mask(right=0, keys=((1, length // 3), (length // 2, length - 1))),
        Mask(right=0, prefix=9),
        Mask(left=3, right=0, prefix=length // 2 + 1),
    ]


def layouts(world_size: int) -> list[SequenceLayout]:
    order = random.sample(range(3 * world_size), 3 * world_size)
    lengths = tuple(random.choice([0, 5, 9]) for _ in order[1:])
    uneven = SequenceLayout(world_size, tuple(order), (*lengths, 12))
    return [sequential(12 * world_size + 7, world_size), head_tail(40, world_size), uneven]


def tensors(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, length, 4)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3)]


def positions(layout: SequenceLayout, rank: int) -> torch.Tensor:
    return torch.tensor(list(layout.positions(rank)), dtype=torch.int64)


def shards(whole: torch.Tensor, layout: SequenceLayout) -> list[torch.Tensor]:
    return [whole[:, :, positions(layout, rank)] for rank in range(layout.world_size)]


def visible(mask: Mask, length: int) -> torch.Tensor:
    """(S, S), written out."""
    position = torch.arange(length)
    q, k = position.unsqueeze(1), position
    seen = torch.ones(length, length, dtype=torch.bool)
    if mask.left is not None:
        seen &= k - q >= -mask.left
    if mask.right is not None:
        seen &= k - q <= mask.right
    if mask.prefix is not None:
        seen |= k < mask.prefix
    if mask.documents is not None:
        number = torch.bucketize(position, torch.tensor(mask.documents), right=True)
        seen &= number.unsqueeze(1) == number
    if mask.keys is not None:
        seen &= torch.stack([(k >= first) & (k < end) for first, end in mask.keys]).any(0)
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_pipeline_is_dense_attention(world_size: int) -> None:
    for layout in layouts(world_size):
        q, k, v = tensors(layout.length, int(torch.randint(1 << 30, ())))
        for mask in masks(layout.length):
            score = (q @ k.mT / 2).masked_fill(~visible(mask, layout.length), -torch.inf)
            lse = score.logsumexp(-1)
            out = score.softmax(-1).nan_to_num(0.0) @ v
            found = all_gather_attention(*(shards(t, layout) for t in (q, k, v)), layout, mask)
            expected = zip(shards(out, layout), shards(lse, layout), strict=True)
            torch.testing.assert_close(found, list(expected), **CLOSE)
