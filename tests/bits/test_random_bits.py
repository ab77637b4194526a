"""The random tests of the matmuls, over products whose last bit depends on addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.group import memory
from tests.bits.products import watched
from tests.cuda.simulated import simulation
from tests.ops import test_random


@pytest.mark.parametrize("mode", [None, {}, {"graph": True}], ids=["cpu", "streams", "graph"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_random_gathers(
    group: dist.ProcessGroup, world_size: int, mode: dict[str, Any] | None
) -> None:
    count = 30
    with watched(ulps=1):
        if mode is None:
            test_random.repeat(group, test_random.gathers, count)
            return
        with simulation(delays_us=0, **mode) as made:
            cuda.reserve_on(memory.resolve(group), made, 1 << 20)
            test_random.repeat(group, test_random.gathers, count)
