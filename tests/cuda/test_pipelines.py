"""The CUDA runtime over a simulated driver: the tests of the ops, run as on CUDA.

Real ranks, schedules, launches, signals and copies; streams are threads with random delays.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import some
from tests.ops import test_attention, test_gradients, test_random

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
MODES = pytest.mark.parametrize("mode", [{}, {"graph": True}], ids=["eager", "graph"])


def random_ops(group: dist.ProcessGroup, mode: dict[str, Any], count: int) -> None:
    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        for index in range(count):
            test_random.gathers(group, index)
            test_random.scatters(group, index)
            test_random.all_reduces(group, index)


@MODES
@WORLD_SIZES
def test_random_matmuls(ranks: Ranks, world_size: int, mode: dict[str, Any]) -> None:
    ranks.run(world_size, random_ops, mode, 4)


def gradients(group: dist.ProcessGroup, mode: dict[str, Any]) -> None:
    with simulation(delays_us=0, **mode):
        test_gradients.gather_gradients(group)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_gradients_of_gathers(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gradients, {})


def attention(group: dist.ProcessGroup, mode: dict[str, Any], seed: int) -> None:
    """All masks on two layouts, forward and backward, in rank order and as a ring."""
    W = group.size()
    chosen = random.Random(seed)
    cases = [
        test_attention.Case(layout, rotate=rotate, dtype=dtype, **mask)
        for layout in chosen.sample(test_attention.layouts(W), 2)
        for mask in test_attention.masks(layout)[::2]
        for rotate, dtype in (("allgather", torch.float32), ("alltoall", torch.bfloat16))
    ]
    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        test_attention.run_all(group, cases, seed)


@pytest.mark.parametrize(
    ("world_size", "graph"),
    some(
        (1, False), (2, True), (3, False), (4, True),
        of=itertools.product([1, 2, 3, 4], [False, True]),
    ),
)  # fmt: skip
def test_attention_forward_and_backward(ranks: Ranks, world_size: int, graph: bool) -> None:
    ranks.run(world_size, attention, {"graph": graph}, random.randrange(1 << 30))
