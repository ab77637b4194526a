"""An exception in the middle of a call: streams come to their ends, and memory stays until then."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import resource
import signal
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda, set_rotate_method, tuning
from symm_cp.group import memory
from symm_cp.ops.matmul.products import Terms
from symm_cp.testing import Ranks
from tests.cuda.op_cases import BACKGROUND, cases, check, refill, zeros
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some

#: Calls an op, and compares its result with the expected one.
Op = Callable[[dist.ProcessGroup], None]


def stacked(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    return torch.randn(group.size(), *shape)


def case(name: str) -> Op:
    """An op of op_cases.py."""

    def op(group: dist.ProcessGroup) -> None:
        made = cases(group, refill(zeros(group.size())))[name]
        check(name, made, made[0]())

    return op


gather_rows, scatter = case("gather"), case("scatter")


def gather_columns(group: dist.ProcessGroup) -> None:
    columns, weight = stacked(group, 3, 8), torch.randn(8 * group.size(), 5)
    out = symm_cp.all_gather_matmul(columns[group.rank()], weight, gather_dim=1, group=group)
    expected = torch.cat(columns.unbind(), dim=1) @ weight
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def attention(group: dist.ProcessGroup, rotate_method: str = "alltoall") -> None:
    """Attention forward and backward; the backward pass is a ring by default."""
    q, k, v = (stacked(group, 1, 2, 4, 8).unbind() for _ in range(3))
    own = [t[group.rank()].clone().requires_grad_() for t in (q, k, v)]
    out = symm_cp.all_gather_attention(*own, group=group)
    full = [torch.cat(t, dim=2).requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*full)
    at = slice(4 * group.rank(), 4 * group.rank() + 4)
    torch.testing.assert_close(out, expected[:, :, at], rtol=1e-4, atol=1e-4)
    set_rotate_method(rotate_method)
    try:
        out.sum().backward()
    finally:
        set_rotate_method("allgather")
    expected.sum().backward()
    for mine, whole in zip(own, full, strict=True):
        torch.testing.assert_close(mine.grad, whole.grad[:, :, at], rtol=1e-4, atol=1e-4)


def attention_together(group: dist.ProcessGroup) -> None:
    """Attention to the keys of all peers at once; backward gets all their gradients at once."""
    with tuning.forced("together"):
        attention(group, "allgather")


def gather_in_lanes(group: dist.ProcessGroup) -> None:
    """On two compute streams."""
    with tuning.forced("lanes"):
        gather_rows(group)


def scatter_in_lanes(group: dist.ProcessGroup) -> None:
    """On two compute streams."""
    with tuning.forced("lanes"):
        scatter(group)


def background(group: dist.ProcessGroup) -> None:
    made = cases(group, refill(zeros(group.size())))
    pending = [(name, made[name][0]()) for name in BACKGROUND]
    for name, out in pending:
        check(name, made[name], out)


OPS: dict[str, Op] = {
    "gather_rows": gather_rows,
    "gather_columns": gather_columns,
    "gather_in_lanes": gather_in_lanes,
    "scatter": scatter,
    "scatter_in_lanes": scatter_in_lanes,
    "attention": attention,
    "attention_together": attention_together,
    "background": background,
}


@contextlib.contextmanager
def no_memory(at: int) -> Iterator[list[int]]:
    """Makes launch number `at` and all later ones fail; yields a list with an item per launch."""
    original, launches = SimulatedDevice.launch, []

    def launch(device: SimulatedDevice, lane: str, user: str, kernel: Any) -> None:
        launches.append(len(launches))
        if len(launches) > at:
            raise MemoryError(f"launch {at}")
        original(device, lane, user, kernel)

    with unittest.mock.patch.object(SimulatedDevice, "launch", launch):
        yield launches


def fails_everywhere(group: dist.ProcessGroup, name: str, apart: bool) -> int:
    """All ranks fail in a call, each at its own step (`apart`), and go on after that."""
    op = OPS[name]
    with simulation(delays_us=1000, poison=True, plan_at=-1) as made:
        for _ in range(3):
            op(group)
        with no_memory(10**9) as launches:
            op(group)
        steps = len(launches)
        for step in range(steps):
            at = (step + group.rank()) % steps if apart else step
            with no_memory(at), contextlib.suppress(MemoryError):
                op(group)
                raise AssertionError(f"launch {at} of {steps} did not fail")
            gc.collect()
            made.synchronize()
            dist.barrier(group)
            made.machine.errors.clear()
            op(group)
            dist.barrier(group)
            assert not cuda.workspaces._holding or made.capturing()
    return steps


@pytest.mark.ranks(3)
def test_the_caller_s_stream_waits_for_kernels_beside_it(group: dist.ProcessGroup) -> None:
    """The third launch fails while the second kernel still runs, beside the caller's stream."""
    add_up, may_end, kernels, later = (
        Terms.add_up,
        threading.Event(),
        itertools.count(),
        list[int](),
    )

    def slow(terms: Terms, *args: Any) -> None:
        if next(kernels) > 0:
            made.call(made.current_stream(), lambda: may_end.wait(20))
        add_up(terms, *args)

    with (
        unittest.mock.patch.object(Terms, "add_up", slow),
        simulation(delays_us=0, plan_at=-1) as made,
    ):
        with tuning.forced("lanes"), no_memory(2), pytest.raises(MemoryError):
            scatter(group)
        # Memory that the kernel uses has been freed, and the next call takes it again.
        made.call(made.current_stream(), lambda: later.append(1))
        time.sleep(0.3)
        assert not later
        may_end.set()
        made.synchronize()
        assert later
        dist.barrier(group)
        made.machine.errors.clear()


#: Those that end where each rank fails at a step of its own.
ENDING = ["gather_rows", "gather_columns", "gather_in_lanes", "scatter", "scatter_in_lanes"]


@pytest.mark.parametrize(
    ("world_size", "op", "apart"),
    some(
        (3, "scatter", False), (3, "scatter_in_lanes", False),
        (2, "gather_rows", True), (2, "gather_in_lanes", True),
        of=[
            *itertools.product((2, 3), OPS, [False]),
            *itertools.product((2, 3), ENDING, [True]),
        ],
    ),
)  # fmt: skip
def test_ranks_fail_at_any_step(ranks: Ranks, world_size: int, op: str, apart: bool) -> None:
    """If `apart`, some waits of the call are for signals that never come."""
    steps = ranks.run(world_size, fails_everywhere, op, apart)
    assert len(set(steps)) == 1
    assert steps[0] > 0


def one_dies_one_fails(group: dist.ProcessGroup, name: str, launch: int) -> str:
    """The last rank dies; rank 0 fails in a call but survives; the others wait for both."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    op = OPS[name]
    with simulation(patience_ms=20_000, plan_at=-1) as made:
        op(group)
        dist.barrier(group)
        if group.rank() == group.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank() > 0:
            op(group)
            return "it did not wait"
        with no_memory(launch), contextlib.suppress(MemoryError):
            op(group)
        made.synchronize()
        kept = cuda.workspaces_of(memory.resolve(group)).current.values()
        assert all(space.ended() for space in kept)
    return "ended"


@pytest.mark.parametrize(
    ("op", "launch"), some(("scatter", 3), of=[("scatter", 3), ("attention_together", 1)])
)
def test_streams_of_a_rank_that_failed_end_when_no_peer_is_left(
    ranks: Ranks, op: str, launch: int
) -> None:
    with ranks.own(3, one_dies_one_fails, op, launch) as running:
        first, second, _ = running.outcomes()
    assert first.result == "ended", first
    assert second.signal == signal.SIGABRT, second
    assert "rank 2 died" in second.output or "rank 0 aborted the call" in second.output, second


@pytest.mark.ranks(2)
def test_workspaces_are_not_freed_while_that_would_wait_or_abort(group: dist.ProcessGroup) -> None:
    """Workspaces are freed when the streams have ended and the device is well, and not before."""
    own = dist.new_group(list(range(group.size())))
    retired = cuda.workspaces._retired
    with simulation() as made:
        state = memory.resolve(own)
        cuda.workspace(state, made, "sync", 1 << 12)
        with unittest.mock.patch.object(made, "failed", return_value=True):
            cuda.workspaces_of(state).clear()
            cuda.workspaces._free_retired()
            assert len(retired) == 1
        with unittest.mock.patch.object(made, "capturing", return_value=True):
            cuda.workspaces._free_retired()
            assert len(retired) == 1
        with unittest.mock.patch.object(cuda.DeviceWorkspace, "ended", return_value=False):
            cuda.workspaces._free_retired()
            assert len(retired) == 1
        cuda.workspaces._free_retired()
        assert not retired
        assert not made.failed()
    dist.destroy_process_group(own)


@pytest.mark.ranks(2)
def test_a_first_call_behind_work_that_hangs_ends(group: dist.ProcessGroup) -> None:
    """The first call waits for hung work of the caller until the group's time-out, then raises."""
    limit = datetime.timedelta(seconds=2)
    own = memory.resolve(dist.new_group(list(range(group.size())), timeout=limit))
    ends = threading.Event()
    with simulation() as made:
        made.call(made.current_stream(), ends.wait)
        try:
            with pytest.raises(RuntimeError, match="has not come to an end within 2 s"):
                cuda.reserve_on(own, made, 64)
        finally:
            ends.set()
        cuda.reserve_on(own, made, 64)
