"""Stream waits acquire: no op reads ahead of a wait, and these tests notice if one does.

A driver whose waits do not acquire acts like a schedule that lacks the acquire. The proof finds
this for each wait (`test_every_wait_acquires` in tests/schedule), the self-test for the driver
(`test_selftest.py`), and wrong results show it here for each op: so tests on the simulated driver
notice copies that are handed out before a wait.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.commands.first_run.checks import Check, cpu_checks
from symm_cp.cuda import workspaces_of
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.graphs import graphed
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some

#: Gathers the same bytes in each call, so reading early is harmless; graphs use slots instead.
SAME_BYTES = "all-gather-matmul of a symmetric tensor"
#: Waits only for neighbours.
HALO = "exchange of halos, gradients"
#: Pass states from rank to rank: rank 2 may find the state that rank 1 read too early.
RELAYS = {"scan of states, gradients", "gated delta rule, gradients"}
PATIENCE = 20
#: A replay's lanes run on threads in any order: rank 0 may begin before all lanes have reached
#: their waits, and then an op is right by chance.
ATTEMPTS = 10


class Replayed(Check):
    """A check whose calls replay one graph, and return before that ends."""


def captured(made: SimulatedDevice, check: Check) -> Replayed:
    graph, results = graphed(made, check.run)

    def run() -> list[torch.Tensor]:
        graph.start()
        return results  # type: ignore[no-any-return]

    return Replayed(check.name, run, check.expected, check.tolerance)


def beside_a_late_rank(
    group: dist.ProcessGroup, made: SimulatedDevice, check: Check, key: str, limit: float
) -> tuple[bool, str]:
    """Returns whether copies ran ahead of waits on this rank, and the error of wrong results.

    Rank 0 begins when all others only wait: after copies ran ahead, or after `limit` seconds.
    """
    store, ahead = memory.resolve(group).store(), made.library.simulated_copies_ahead
    seen = []

    def watch() -> None:
        end = time.monotonic() + limit
        while not ahead() and time.monotonic() < end:
            time.sleep(1e-3)
        seen.append(time.monotonic() < end)
        quiet = 0
        while quiet < 5:  # a graph's lanes get there in any order
            time.sleep(0.01)
            quiet = 0 if ahead() or not made.library.simulated_all_wait() else quiet + 1
        store.set(f"{key}/{group.rank()}", "")

    ahead()
    if group.rank() == 0:
        for peer in range(1, group.size()):
            store.get(f"{key}/{peer}")
        result = check.run()
    elif isinstance(check, Replayed):
        result = check.run()  # returns before the graph ends
        watch()
    else:
        watcher = threading.Thread(target=watch)
        watcher.start()
        result = check.run()
        watcher.join()
    made.synchronize()
    return any(seen), check.wrong(result)


def all_ops(
    group: dist.ProcessGroup, fault: str, limit: float, graphs: bool
) -> dict[str, tuple[bool, str]]:
    own, found = memory.resolve(group), {}
    with simulation(delays_us=0) as made:
        checks = list(cpu_checks(group))[2:]  # the checks of ops
        cuda.reserve_on(own, made, 1 << 20, graphs=len(checks) if graphs else 0)
        for number, check in enumerate(checks):
            # A first call, whose collective setup must not wait for the late rank.
            assert not check.wrong(check.run())
            if graphs:
                check = captured(made, check)
                results = check.run()
                made.synchronize()
                assert not check.wrong(results)
            made.synchronize()
            for attempt in range(ATTEMPTS if graphs and fault else 1):
                # An early read must not find the same bytes, left by the previous call.
                dist.barrier(group)
                for workspace in workspaces_of(own).all():
                    workspace.memory[workspace.header_bytes :].zero_()
                dist.barrier(group)
                made.machine.set(wait=fault)
                key = f"late/{fault}/{graphs}/{number}/{attempt}"
                result = beside_a_late_rank(group, made, check, key, limit)
                found[check.name] = result
                made.machine.set(wait="")
                store = own.store()
                if group.rank() == 1:
                    store.set(f"{key}/wrong", result[1])
                if store.get(f"{key}/wrong"):
                    break
            dist.barrier(group)
    return found


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_each_op_is_wrong_where_waits_do_not_acquire(ranks: Ranks, world_size: int) -> None:
    for rank, found in enumerate(ranks.run(world_size, all_ops, "reorder", PATIENCE, False)):
        if rank == 0:
            continue
        if rank == 2:  # whose neighbour is not late
            del found[HALO]
        in_order = {name for name, (ahead, _) in found.items() if not ahead}
        assert in_order <= (RELAYS if rank == 2 else set())
        assert {name for name, (_, wrong) in found.items() if not wrong} == {SAME_BYTES}


def test_the_graph_of_each_op_is_wrong_where_waits_do_not_acquire(ranks: Ranks) -> None:
    found = ranks.run(2, all_ops, "reorder", PATIENCE, True)[1]
    assert {name for name, (_, wrong) in found.items() if not wrong} == set()


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
def test_each_op_is_right_beside_a_late_rank(ranks: Ranks, graphs: bool) -> None:
    for found in ranks.run(2, all_ops, "", 0.01, graphs):
        assert set(found.values()) == {(False, "")}
