"""Ranks with random delays between any two steps: the results are the same, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from symm_cp.testing.delays import probing
from tests.exhaustive import some
from tests.faults.ops import ALL, results

#: World sizes and numbers of random sequences of ops; 600 with --all.
FEW = ((2, 40), (3, 30), (4, 20))
SEQUENCES = some(*FEW, of=[*FEW, (2, 140), (3, 160), (4, 120)])
_OPS = 4
_DELAY_US = 200


def fuzz(group: dist.ProcessGroup, count: int) -> int:
    steps = 0
    for _ in range(count):
        names = random.choices(list(ALL), k=_OPS)
        seed = random.randrange(1 << 30)
        expected = results(group, names, seed)
        with probing(seed=seed + group.rank(), delay_us=_DELAY_US) as probe:
            found = results(group, names, seed)
        steps += probe.count
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), (names, seed, number)
    return steps


@pytest.mark.parametrize(("world_size", "count"), SEQUENCES)
def test_delays_change_nothing(ranks: Ranks, world_size: int, count: int) -> None:
    for steps in ranks.run(world_size, fuzz, count, timeout=240):
        assert steps > 10 * count  # the probe was active
