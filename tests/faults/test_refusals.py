"""Refused calls leave the ranks in step, whoever refused them and whatever comes next."""

from __future__ import annotations

import pytest

from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.faults import refusals

#: World sizes and numbers of random programs.
FEW = ((3, 4),)
PROGRAMS = some(*FEW, of=[*FEW, (2, 20), (3, 20), (4, 20)])


@pytest.mark.parametrize(("world_size", "count"), PROGRAMS)
def test_random_refusals(ranks: Ranks, world_size: int, count: int) -> None:
    ranks.run(world_size, refusals.run, refusals.drawn(world_size, count), timeout=300)
