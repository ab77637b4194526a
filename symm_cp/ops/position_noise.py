"""Random numbers by position in the whole sequence: the same on any number of ranks.

Within a context-parallel region a tensor holds this rank's positions of a sequence. Numbers drawn
from each rank's generator would repeat at other positions on other ranks. Here they are functions
of a seed, which all ranks draw identically, and of the number's sample, position and feature:

    dropout masks   Philox by counter (csrc/attention/dropout_mask.cpp; attention/philox.py where
                    that is not available): costs in proportion to this rank's part
    other numbers   drawn for the whole sequence; this rank takes its rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from symm_cp.ops.attention import philox

# The most mask elements to make at once in Python; each takes some 100 bytes of temporary memory.
_ELEMENTS_AT_ONCE = 1 << 22
_SEEDS = 2**62  # the number of seeds, for torch's generators and the key of Philox
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Place:
    """Where the numbers of a tensor, seen as (samples, rows, features), lie in the whole sequence.

    `positions` holds the rows' positions, int64 on CPU: (1, rows), (samples, rows) or (a divisor of
    samples, rows); None for a tensor without a sequence, which then has one sample and one row.
    `whole` is the length of the sequence. Tensors with another `part` get other numbers.
    """

    samples: int
    features: int
    positions: torch.Tensor | None = None
    whole: int = 1
    part: int = 0

    def at_positions(self) -> torch.Tensor:
        """The positions of rows; 0 for the only row without a sequence."""
        return torch.zeros(1, 1, dtype=torch.int64) if self.positions is None else self.positions

    def of_part(self, part: int) -> Place:
        """The place of part `part` of a split tensor; part 0 has the place of the whole."""
        return replace(self, part=self.part + (part << 16)) if part else self


def dropout_mask(
    shape: Sequence[int], device: torch.device, p: float, seed: int, place: Place
) -> torch.Tensor:
    """Returns a mask of bool, true where a number is kept: each with probability 1 - p."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.bool, device=device)
    positions = place.at_positions()
    if device.type == "cpu":
        mask = torch.ops.symm_cp.dropout_mask(
            positions, place.samples, place.features, p, seed, place.part
        )
    else:
        mask = _mask_by_torch(positions.to(device), p, seed, place)
    return mask.view(shape)  # type: ignore[no-any-return]


def _mask_by_torch(positions: torch.Tensor, p: float, seed: int, place: Place) -> torch.Tensor:
    device = positions.device
    samples = torch.arange(place.samples, device=device)
    repeats = max(1, place.samples // len(positions))
    features = torch.arange(place.features, device=device)
    part = torch.tensor([place.part], device=device)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, place.features))
    drawn = [
        philox.kept(each, part, some, features, p=p, seed=seed)[:, 0]
        for each, own in zip(samples.split(1), positions.repeat_interleave(repeats, 0), strict=True)
        for some in own.split(rows)
    ]
    shape = (place.samples, positions.shape[1], place.features)
    return torch.cat([mask.flatten() for mask in drawn]).view(shape)


def noise(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    method: str,
    args: Sequence[float],
    seed: int,
    place: Place,
) -> torch.Tensor:
    """Returns the numbers that a tensor's in-place method, such as `uniform_`, draws with `args`.

    Each rank draws the numbers of the whole sequence.
    """
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed((seed + place.part * _ODD) % _SEEDS)
    whole = torch.empty(place.samples, place.whole, place.features, dtype=dtype, device=device)
    if place.positions is None:
        whole = whole.view(1, 1, -1)
    given = [int(arg) for arg in args] if method == "random_" else list(args)
    getattr(whole, method)(*given, generator=generator)
    if place.positions is None:
        return whole.view(shape)
    positions = place.positions.to(device)
    if len(positions) == 1:
        return whole.index_select(1, positions[0]).view(shape)
    each = positions.repeat_interleave(place.samples // len(positions), 0)
    rows = each.unsqueeze(-1).expand(-1, -1, place.features)
    return whole.gather(1, rows).view(shape)


def without_sequence(shape: Sequence[int], part: int = 0) -> Place:
    """The place of a tensor that holds no sequence."""
    return Place(1, math.prod(shape), part=part)


def mixed(seed: int, number: int) -> int:
    """Returns the seed of the n-th of several draws that share one."""
    return (seed ^ (number + 1) * _ODD) % _SEEDS
