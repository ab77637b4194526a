"""Ranks that share memory but cannot signal each other: treated as if on different hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.group import hosts, memory
from symm_cp.ops.common import device_kernels
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import some
from tests.ops import test_random

CPU = torch.device("cpu")


def exchanges(group: dist.ProcessGroup) -> list[str]:
    own = dist.new_group(list(range(group.size())))
    with simulation(passes=False):
        for index in range(4):
            test_random.gathers(own, index)
            test_random.scatters(own, index)
        gathered = device_kernels["_low_contention_all_gather"](torch.ones(3), own.group_name)
        torch.ops._c10d_functional.wait_tensor(gathered)
        assert gathered.tolist() == [1.0] * 3 * group.size()
        state = memory.resolve(own)
        spread = hosts.hosts_of(state, CPU)
        assert spread is not None
        assert spread.ranks == tuple((rank,) for rank in range(group.size()))
        assert spread.local.world_size == 1
        assert not cuda.workspaces_of(state).current, "ranks waited for each other's signals"
    dist.destroy_process_group(own)
    return spread.reason


@pytest.mark.parametrize("world_size", some((2,), of=[(2,), (3,), (4,)]))
def test_ranks_without_signals_exchange_through_the_process_group(
    ranks: Ranks, world_size: int
) -> None:
    assert ranks.run(world_size, exchanges) == ["streams cannot signal"] * world_size
