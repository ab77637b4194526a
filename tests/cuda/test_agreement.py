"""`SYMM_CP_DEBUG=1`: ranks compare their calls on a device before they make them."""

from __future__ import annotations

import os
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _get_process_group_store

import symm_cp
from symm_cp.ops.common import device_kernels
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation

GATHER = device_kernels["_low_contention_all_gather"]
SCATTER = device_kernels["_low_contention_reduce_scatter"]


def debugging(**more: str) -> Any:
    return unittest.mock.patch.dict(os.environ, {"SYMM_CP_DEBUG": "1", **more})


def good(group: dist.ProcessGroup) -> None:
    x = torch.full((4, 3), 1.0 + group.rank())
    out = symm_cp.all_gather_matmul(x, torch.ones(3, 2), group=group)
    assert out[:, 0].tolist() == [3.0 * (1 + r) for r in range(group.size()) for _ in range(4)]


def differs(group: dist.ProcessGroup) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    odd = rank == W - 1
    x, w = torch.ones(4 * W, 6), torch.ones(6, 2)
    q = torch.ones(1, 2, 4, 8)
    calls = [
        (lambda: symm_cp.all_gather_matmul(x[:, : 3 if odd else 6], w[: 3 if odd else 6],
                                           group=group),
         "all_gather_matmul"),
        (lambda: symm_cp.all_gather_matmul(x, w, group=group) if odd
         else symm_cp.matmul_reduce_scatter(x, w, group=group),
         "matmul_reduce_scatter"),
        (lambda: SCATTER(x, "avg" if odd else "sum", name),
         "_low_contention_reduce_scatter"),
        (lambda: GATHER(x if odd else x.double(), name),
         "_low_contention_all_gather"),
        (lambda: symm_cp.all_gather_attention(q, q, q, group=group, is_causal=odd),
         "all_gather_attention"),
    ]  # fmt: skip
    with simulation(delays_us=0), debugging():
        for call, what in calls:
            told = rf"ranks disagree: rank 0 calls (fused_)?{what}.*rank"
            with pytest.raises(RuntimeError, match=told):
                call()
            good(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_are_told_what_each_calls(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, differs)


@pytest.mark.ranks(2)
def test_ranks_with_inputs_of_other_kinds(group: dist.ProcessGroup) -> None:
    symmetric = symm_mem.empty(4, 3, device="cpu").fill_(1.0)
    other = symm_mem.empty(4, 3, device="cpu").fill_(2.0)
    w = torch.ones(3, 2)
    with simulation(delays_us=0), debugging():
        symm_cp.read_in_place(symmetric, group)
        symm_cp.read_in_place(other, group)
        x = symmetric if group.rank() else torch.ones(4, 3)
        with pytest.raises(RuntimeError, match=r"a slot, rank 1 calls .* of symmetric tensor"):
            symm_cp.all_gather_matmul(x, w, group=group)
        x = symmetric if group.rank() else other
        with pytest.raises(RuntimeError, match=r"tensor number \d+, rank 1 calls .* tensor number"):
            symm_cp.all_gather_matmul(x, w, group=group)
        good(group)


def misses(group: dist.ProcessGroup) -> None:
    with simulation(delays_us=0):
        good(group)  # a group keeps the time-out that it is made with, and outlives this test
    missing = r"(?s)has not made its call .* 0\.3 s|gave up"
    with simulation(delays_us=0), debugging():
        good(group)
        if group.rank() > 0:
            short = debugging(SYMM_CP_TIMEOUT_MS="300")
            with short, pytest.raises(RuntimeError, match=missing):
                good(group)
        dist.barrier(group=group)
        for _ in range(2):  # the call that one rank missed does not shift later calls
            good(group)


def test_a_rank_that_makes_no_call_is_named(ranks: Ranks) -> None:
    ranks.run(3, misses)
    ranks.run(3, differs)


@pytest.mark.ranks(2)
def test_the_store_does_not_fill_up(group: dist.ProcessGroup) -> None:
    store = _get_process_group_store(group)
    with simulation(delays_us=0), debugging():
        good(group)
        dist.barrier(group=group)
        before = store.num_keys()
        for _ in range(20):
            good(group)
        dist.barrier(group=group)
        assert store.num_keys() <= before + 2 * group.size()  # barriers leave theirs


@pytest.mark.ranks(2)
def test_nothing_is_compared_without_it(group: dist.ProcessGroup) -> None:
    store = _get_process_group_store(group)
    with simulation(delays_us=0):
        good(group)  # a group's first call has its ranks agree on what they tuned
        with unittest.mock.patch.object(type(store), "set") as used:
            good(group)
            good(group)
    assert not used.called


def test_other_values_are_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    from symm_cp import env

    monkeypatch.setenv("SYMM_CP_DEBUG", "yes")
    with pytest.raises(ValueError, match="SYMM_CP_DEBUG='yes' must be 0 or 1"):
        env.debug()
