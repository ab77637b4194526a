"""Random numbers by position: the native masks, torch's numbers, and how often they fall."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from symm_cp.ops import position_noise
from symm_cp.ops.attention import philox
from symm_cp.ops.position_noise import Place, without_sequence

CPU = torch.device("cpu")
ROWS = torch.tensor([[5, 0, 131, 70_000], [7, 1, 2, 3]])


@pytest.mark.parametrize("features", [1, 127, 128, 300])
def test_native_masks_are_those_of_the_definition(features: int) -> None:
    seed, p = int(torch.randint(2**62, ())), 0.3
    place = Place(4, features, ROWS, whole=80_000, part=3)
    mask = position_noise.dropout_mask((4, 4, features), CPU, p, seed, place)
    for sample in range(4):
        expected = philox.kept(
            torch.tensor([sample]),
            torch.tensor([3]),
            ROWS[sample // 2],
            torch.arange(features),
            p=p,
            seed=seed,
        )
        assert torch.equal(mask[sample], expected[0, 0])
    assert torch.equal(position_noise._mask_by_torch(ROWS, p, seed, place), mask)


@pytest.mark.parametrize("halves", [16384.5, 16385.5])
def test_halves_are_rounded_to_even(halves: float) -> None:
    """Otherwise one kernel drops a few of a million numbers that another one keeps."""
    seed, p, rows = int(torch.randint(2**62, ())), halves / 65536, torch.arange(1024)[None]
    place = Place(1, 1024, rows, whole=1024)
    mask = position_noise.dropout_mask((1, 1024, 1024), CPU, p, seed, place)
    assert torch.equal(mask, position_noise._mask_by_torch(rows, p, seed, place))


def test_masks_keep_as_many_as_they_should() -> None:
    number = 1 << 20
    for p in (0.1, 0.5, 0.9):
        place = Place(2, 512, torch.arange(1024)[None], whole=1024)
        mask = position_noise.dropout_mask((2, 1024, 512), CPU, p, 7, place)
        # Six standard deviations, and the rounding of p.
        allowed = 6 * math.sqrt(p * (1 - p) / number) + 2**-16
        assert abs(float(mask.double().mean()) - (1 - p)) < allowed
        for dim in (0, 1, 2):  # neighbours have nothing to do with each other
            one, other = mask.narrow(dim, 0, 1), mask.narrow(dim, 1, 1)
            both = float((one & other).double().mean())
            few = one.numel()
            assert abs(both - (1 - p) ** 2) < 6 * math.sqrt(0.25 / few) + 2**-15


def test_seeds_parts_and_places_draw_other_numbers() -> None:
    place = without_sequence((64, 64))
    drawn = [
        position_noise.dropout_mask((64, 64), CPU, 0.5, seed, each)
        for seed, each in (
            (1, place),
            (2, place),
            (1, dataclasses.replace(place, part=1)),
            (1, place.of_part(1)),
            (position_noise.mixed(1, 1), place),
        )
    ]
    for index, mask in enumerate(drawn):
        for other in drawn[:index]:
            assert 0.4 < float((mask == other).double().mean()) < 0.6


@pytest.mark.parametrize(
    ("method", "args", "dtype"),
    [
        ("uniform_", (0.9, 1.1), torch.float32),
        ("normal_", (0.0, 1.0), torch.float64),
        ("exponential_", (1.0,), torch.bfloat16),
        ("random_", (3, 9), torch.int64),
        ("bernoulli_", (0.4,), torch.float32),
    ],
)
def test_noise_is_the_rows_of_the_whole(method: str, args: tuple, dtype: torch.dtype) -> None:
    whole = Place(4, 6, torch.arange(9)[None], whole=9)
    full = position_noise.noise((4, 9, 6), dtype, CPU, method, args, 5, whole)
    rows = torch.tensor([[0, 8, 3]])
    part = position_noise.noise((4, 3, 6), dtype, CPU, method, args, 5, Place(4, 6, rows, 9))
    assert torch.equal(part, full[:, rows[0]])
    each = torch.tensor([[0, 8], [2, 1]])  # of the first and last two samples
    part = position_noise.noise((4, 2, 6), dtype, CPU, method, args, 5, Place(4, 6, each, 9))
    assert torch.equal(part[1], full[1, each[0]])
    assert torch.equal(part[2], full[2, each[1]])
