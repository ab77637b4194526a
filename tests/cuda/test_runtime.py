"""Behaviour specific to the CUDA runtime, over a simulated driver."""

from __future__ import annotations

import contextlib
import random
import time
import unittest.mock
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.cuda import workspaces
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from symm_cp.native import wire
from symm_cp.ops.common import device_kernels
from symm_cp.testing import Ranks
from tests.cuda.simulated import by_python, simulated_device, simulation

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
MODES = pytest.mark.parametrize("mode", [{}, {"graph": True}], ids=["eager", "graph"])
all_gather = device_kernels["_low_contention_all_gather"]
reduce_scatter = device_kernels["_low_contention_reduce_scatter"]
wait = torch.ops._c10d_functional.wait_tensor


def symmetric(like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = symm_mem.empty(*like.shape, dtype=like.dtype, device="cpu")
    symm_cp.read_in_place(tensor, group)
    return tensor.copy_(like)


def stacked(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    """The same tensor on all ranks, with a row for each."""
    return torch.randn(group.size(), *shape)


DTYPES = [torch.float32, torch.complex64, torch.complex128, torch.int32, torch.uint8, torch.float16]


@MODES
@WORLD_SIZES
@pytest.mark.ranks
def test_low_contention(group: dist.ProcessGroup, world_size: int, mode: dict[str, Any]) -> None:
    rank, W = group.rank(), group.size()
    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 16)
        for turn, dtype in enumerate(2 * DTYPES):
            numbers = (8 * stacked(group, W * 2, 3)).to(dtype)
            rows = numbers * (1 - 2j) if dtype.is_complex else numbers
            given = rows[rank].clone()
            in_place = turn % 2 == 1
            if in_place:
                given = symmetric(given, group)
            fractions = dtype.is_complex or dtype.is_floating_point
            op = random.choice(["sum", "avg"] if fractions else ["sum"])
            gathered = all_gather(given, group.group_name)
            scattered = reduce_scatter(given, op, group.group_name)
            if not in_place:  # the caller may have its input back at once
                given.zero_()
            assert torch.equal(wait(gathered), rows.flatten(0, 1))
            total = rows.sum(0, dtype=dtype) if op == "sum" else rows.mean(0)
            torch.testing.assert_close(wait(scattered), total.chunk(W)[rank])


def begun_before_the_peers(group: dist.ProcessGroup, mode: dict[str, Any]) -> None:
    """Rank 0's stream finishes its part of eight ops before the other ranks begin the first."""
    rank, W, store = group.rank(), group.size(), dist.distributed_c10d._get_default_store()
    key = f"rank 0 went on {mode}"
    with simulation(**mode) as made:
        for _ in range(2):  # makes the workspaces, then uses both slots
            wait(all_gather(torch.ones(2, 2), group.group_name))
            wait(reduce_scatter(torch.ones(W, 2), "sum", group.group_name))
        rows, full = stacked(group, 4, 3, 5), stacked(group, 4, W * 2, 3)
        if rank != 0:
            store.wait([key], timedelta(seconds=20))
        begun = []
        for turn in range(4):  # more calls than there are slots
            shard, whole = rows[rank, turn].clone(), full[rank, turn].clone()
            gathered = all_gather(shard, group.group_name)
            begun.append((gathered, reduce_scatter(whole, "sum", group.group_name)))
            made.library.simulated_drain(made.current_stream())
            shard.fill_(torch.nan)
            whole.fill_(torch.nan)
        if rank == 0:
            store.set(key, "")
        for turn, (gathered, scattered) in enumerate(begun):
            assert torch.equal(wait(gathered), rows[:, turn].flatten(0, 1))
            torch.testing.assert_close(wait(scattered), full[:, turn].sum(0).chunk(W)[rank])


def test_background_ops_of_late_peers_do_not_hold_up_the_caller(ranks: Ranks) -> None:
    mode = {"one_queue": False, "lazy_loading": False}
    ranks.run(3, begun_before_the_peers, mode)


@pytest.mark.ranks(2)
def test_a_workspace_is_freed_when_no_call_waits(group: dist.ProcessGroup) -> None:
    """Freeing waits for the device, and so for peers, which may wait for this rank.

    A group's workspace is replaced while rank 0 waits for its peers' call of another group.
    """
    W, rank, store = group.size(), group.rank(), dist.distributed_c10d._get_default_store()
    own, rows = dist.new_group(list(range(W))), stacked(group, 3, 5)
    with simulation(one_queue=False, lazy_loading=False) as made:

        def call(height: int) -> None:
            x = torch.ones(height, 4)
            out = symm_cp.all_gather_matmul(x, torch.eye(4), gather_dim=0, group=own)
            assert torch.equal(out, torch.ones(W * height, 4))

        wait(all_gather(rows[rank], group.group_name))  # makes the workspaces
        call(2)
        gathered = all_gather(rows[rank], group.group_name) if rank == 0 else None
        call(4096)
        if rank == 0:
            assert workspaces._retired
            store.set("rank 0 went on, with more memory", "")
        else:
            store.wait(["rank 0 went on, with more memory"], timedelta(seconds=20))
            gathered = all_gather(rows[rank], group.group_name)
        assert gathered is not None
        assert torch.equal(wait(gathered), rows.flatten(0, 1))
        made.synchronize()
        with by_python():
            call(2)
        assert not workspaces._retired
    dist.destroy_process_group(own)


@pytest.mark.ranks(2)
def test_no_call_begins_while_a_workspace_is_freed(group: dist.ProcessGroup) -> None:
    """The peer makes its part of that call later than it needs the freeing rank.

    Rank 0's other thread tries to begin a call just before the old workspace is freed.
    """
    W, rank = group.size(), group.rank()
    own, other = dist.new_group(list(range(W))), dist.new_group(list(range(W)))
    with simulation(patience_ms=5000) as made, ThreadPoolExecutor(1) as pool:

        def call(over: dist.ProcessGroup, height: int) -> None:
            with made.stream():
                x = torch.ones(height, 4)
                out = symm_cp.all_gather_matmul(x, torch.eye(4), gather_dim=0, group=over)
                assert torch.equal(out, torch.ones(W * height, 4))

        call(own, 2), call(other, 2)  # makes the workspaces
        found, begun = workspaces._waits, []

        def waits(device: cuda.Device) -> bool:
            waiting = found(device)
            if not waiting and not begun:
                begun.append(pool.submit(call, other, 2))
                time.sleep(0.3)
            return waiting

        with unittest.mock.patch.object(workspaces, "_waits", waits if rank == 0 else found):
            call(own, 4096)
        assert not workspaces._retired
        begun = begun or [pool.submit(call, other, 2)]
        begun[0].result()
    dist.destroy_process_group(own)
    dist.destroy_process_group(other)


@pytest.mark.parametrize("plan_at", [-1, 0])
@pytest.mark.ranks(2)
def test_a_result_that_is_dropped_stays_until_its_transfer_has_ended(
    group: dist.ProcessGroup, plan_at: int
) -> None:
    """Rank 0 drops a result before its peers begin the transfer."""
    rank, store = group.rank(), dist.distributed_c10d._get_default_store()
    key = f"rank 0 has dropped it {plan_at}"

    def begin() -> torch.Tensor:
        return torch.ops.symm_mem._low_contention_all_gather(torch.ones(40, 3), group.group_name)

    with simulation(poison=True, plan_at=plan_at) as made:
        for _ in range(2):  # makes the workspace, and is recorded
            wait(begin())
        if rank != 0:
            store.wait([key], timedelta(seconds=20))
        result = weakref.ref(begin())
        if rank == 0:
            assert result() is not None
            store.set(key, "")
        made.synchronize()
        wait(begin())
        assert result() is None


def batches(group: dist.ProcessGroup) -> dict[str, int]:
    with simulation(driver_version=13010) as made:
        shard = symmetric(torch.randn(64, 4), group)
        wait(all_gather(shard, group.group_name))
        made.synchronize()
        made.count()
        wait(all_gather(shard, group.group_name))
        return made.count()


def test_an_all_gather_is_one_batch_of_copies_and_two_of_signals(ranks: Ranks) -> None:
    """Signals and waits come before the copies; in place, signals of their end come after them.

    A lane writes the number that it copies to the peers' flags once for the whole call.
    """
    for counted in ranks.run(4, batches):
        assert counted == {
            "copies": 1,
            "batches": 1 + 2,
            "2d": 0,
            "mem_op_calls": 3,
            "mem_ops": 1 + 3 + 3,
        }


def in_place(group: dist.ProcessGroup) -> list[dict[str, int]]:
    rank, counted = group.rank(), []
    with simulation(driver_version=13010) as made:
        for _ in range(3):
            rows, weight = stacked(group, 8, 4), torch.randn(4, 3)
            shard = symmetric(rows[rank], group)
            made.count()
            with tuning.forced("shards"):
                product = symm_cp.all_gather_matmul(shard, weight, gather_dim=0, group=group)
            counted.append(made.count())
            torch.testing.assert_close(product, rows.flatten(0, 1) @ weight)
            shard.fill_(torch.nan)  # nobody reads it any more
    return counted


@WORLD_SIZES
def test_symmetric_tensors_are_read_in_place(ranks: Ranks, world_size: int) -> None:
    for counts in ranks.run(world_size, in_place):
        for count in counts:
            # One for all "ready" signals; for each peer, one for its shard and one for "done".
            assert count["batches"] == (1 + 2 * (world_size - 1) if world_size > 1 else 0)
            assert count["copies"] == 0


@pytest.mark.ranks(3)
def test_a_workspace_is_replaced_before_its_epochs_end(group: dist.ProcessGroup) -> None:
    with simulation() as made:
        state = memory.resolve(group)
        space = cuda.workspace(state, made, "sync", 1 << 12)
        dist.barrier(group)
        space.epoch = wire.LAST_EPOCH - 4
        for _ in range(8):
            rows = stacked(group, 4, 4)
            out = symm_cp.all_gather_matmul(
                rows[group.rank()], torch.eye(4), gather_dim=0, group=group
            )
            assert torch.equal(out, rows.flatten(0, 1))
        assert cuda.workspace(state, made, "sync", 1 << 12).epoch == 4


@pytest.mark.ranks(2)
def test_a_capture_does_not_grow_a_workspace(group: dist.ProcessGroup) -> None:
    rows = stacked(group, 4, 4)
    weight = torch.eye(4)

    own = dist.new_group(list(range(group.size())))  # tests may have reserved some of `group`

    def call() -> torch.Tensor:
        return symm_cp.all_gather_matmul(rows[group.rank()], weight, gather_dim=0, group=own)

    with simulation() as made:
        expected = call()
        made.in_capture = True
        with pytest.raises(RuntimeError, match=r"of 64 bytes.*reserve\(group, 64"):
            call()
        made.in_capture = False
        cuda.reserve_on(memory.resolve(own), made, 64)
        made.in_capture = True
        assert torch.equal(call(), expected)


@pytest.mark.ranks(2)
def test_workspaces_of_graphs_outlive_growth(group: dist.ProcessGroup) -> None:
    """A later, larger reserve must not free a workspace that a captured graph uses."""
    own = dist.new_group(list(range(group.size())))
    with simulation() as made:
        state = memory.resolve(own)
        cuda.reserve_on(state, made, 1 << 12)
        made.in_capture = True
        first = cuda.workspace(state, made, "sync", 64)
        made.in_capture = False
        cuda.reserve_on(state, made, 1 << 22)
        made_here = cuda.workspaces_of(state)
        assert any(kept is first for kept in made_here.all())
        state.close()
        assert not list(made_here.all())
    dist.destroy_process_group(own)


def test_a_driver_that_is_not_there_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"override_cuda_ops: the driver library libcuda\.so\.1 does not load"
    ):
        symm_cp.override_cuda_ops()


def test_override_puts_kernels_over_torchs_and_takes_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaDevice, "driver", simulated_device().driver)

    def registered(key: str) -> str:
        lines = torch._C._dispatch_dump("symm_mem::fused_all_gather_matmul").splitlines()
        return next((line for line in lines if line.startswith(f"{key}:")), "")

    keys = ("CUDA", "AutocastCUDA")  # autocast of torch's op comes with our kernel
    assert not any("symm_cp" in registered(key) for key in keys)
    with symm_cp.override_cuda_ops() as override:
        assert "plan/plans.cpp" in registered("CUDA")
        assert "symm_cp/ops/override.py" in registered("AutocastCUDA")
        assert symm_cp.override_cuda_ops() is override
    assert not any("symm_cp" in registered(key) for key in keys)
    override.undo()  # a second call does nothing


@pytest.mark.ranks(2)
def test_transfers_are_waited_for_on_their_device(group: dist.ProcessGroup) -> None:
    """The waiting stream is the current one of the op's device, not of the thread's device."""
    x, inside = torch.randn(4, 4), []

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    with simulation() as made:
        gathered = all_gather(x, group.group_name)
        waiting = type(made.copies_ended("async"))
        waits = waiting.wait
        with (
            unittest.mock.patch.object(made, "guard", guard),
            unittest.mock.patch.object(
                waiting,
                "wait",
                autospec=True,
                side_effect=lambda e: seen.append(bool(inside)) or waits(e),
            ),
        ):
            seen: list[bool] = []
            wait(gathered)
        assert seen == [True]
