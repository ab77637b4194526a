"""Waits of streams acquire: no op reads ahead of a wait, which these tests would notice if it did.

A driver whose waits only wait is what a schedule without the acquire amounts to. The proof notices
it for each wait (`test_every_wait_acquires` in tests/schedule), the self-test for the driver
(`test_selftest.py`), and here wrong results do for each op: so tests on the simulated driver notice
copies that are handed out before a wait.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.commands.first_run.checks import Check, cpu_checks
from symm_cp.cuda.workspaces import workspaces_of
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some

#: It gathers the same bytes in each call.
SAME_BYTES = "all-gather-matmul of a symmetric tensor"
PATIENCE = 20


def beside_a_late_rank(
    group: dist.ProcessGroup, made: SimulatedDevice, check: Check, key: str, limit: float
) -> tuple[bool, str]:
    """Whether copies ran ahead of waits on this rank, and what is wrong with the results.

    Rank 0 begins when copies have run ahead on all others, or after so many seconds.
    """
    store, ahead = memory.resolve(group).store(), made.library.simulated_copies_ahead
    seen = []

    def watch() -> None:
        end = time.monotonic() + limit
        while not ahead() and time.monotonic() < end:
            time.sleep(1e-3)
        seen.append(time.monotonic() < end)
        store.set(f"{key}/{group.rank()}", "")

    ahead()
    watcher = threading.Thread(target=watch)
    if group.rank() == 0:
        for peer in range(1, group.size()):
            store.get(f"{key}/{peer}")
    else:
        watcher.start()
    result = check.run()
    made.synchronize()
    if group.rank() > 0:
        watcher.join()
    return any(seen), check.wrong(result)


def all_ops(group: dist.ProcessGroup, fault: str, limit: float) -> dict[str, tuple[bool, str]]:
    own, found = memory.resolve(group), {}
    with simulation(delays_us=0) as made:
        cuda.reserve_on(own, made, 1 << 20)
        for number, check in enumerate(list(cpu_checks(group))[2:]):  # those of ops
            # What ranks do together at a first call is not to wait for the late one.
            assert not check.wrong(check.run())
            made.synchronize()
            dist.barrier(group)
            # What is read too early must not be the same bytes of the call before.
            for workspace in workspaces_of(own).all():
                workspace.memory[workspace.header_bytes :].zero_()
            dist.barrier(group)
            made.machine.set(wait=fault)
            key = f"late/{fault}/{number}"
            found[check.name] = beside_a_late_rank(group, made, check, key, limit)
            made.machine.set(wait="")
            dist.barrier(group)
    return found


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_each_op_is_wrong_where_waits_do_not_acquire(ranks: Ranks, world_size: int) -> None:
    for found in ranks.run(world_size, all_ops, "reorder", PATIENCE)[1:]:
        assert {name for name, (ahead, _) in found.items() if not ahead} == set()
        assert {name for name, (_, wrong) in found.items() if not wrong} == {SAME_BYTES}


def test_each_op_is_right_beside_a_late_rank(ranks: Ranks) -> None:
    for found in ranks.run(2, all_ops, "", 0.01):
        assert set(found.values()) == {(False, "")}
