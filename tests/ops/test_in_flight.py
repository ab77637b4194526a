"""Several ops under way at once: asynchronous ones, two groups, two threads, random mixes."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor as wait

import symm_cp

OPS = torch.ops.symm_mem
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


@pytest.mark.parametrize("elements", [10, 100_000])
@pytest.mark.ranks(2)
def test_low_contention_returns_at_once(group: dist.ProcessGroup, elements: int) -> None:
    name, rank, W = group.group_name, group.rank(), group.size()
    wait(OPS._low_contention_all_gather(torch.zeros(elements), name))  # makes the workspace
    dist.barrier(group)
    if rank == 1:
        dist.barrier(group)  # until the calls of rank 0 have returned
    pending = [
        OPS._low_contention_all_gather(torch.full((elements,), float(rank + i)), name)
        for i in range(4)
    ]
    if rank == 0:
        dist.barrier(group)
    for i, gathered in enumerate(pending):
        expected = torch.arange(W, dtype=torch.float32).repeat_interleave(elements) + i
        assert torch.equal(wait(gathered), expected)


def inputs(group: dist.ProcessGroup, elements: int) -> list[torch.Tensor]:
    """Ones, plain and in symmetric memory."""
    symmetric = symm_mem.empty(elements, device="cpu").fill_(1)
    symm_mem.rendezvous(symmetric, group)
    return [torch.ones(elements), symmetric]


@WORLD_SIZES
@pytest.mark.ranks
def test_outputs_that_nobody_waits_for(group: dist.ProcessGroup, world_size: int) -> None:
    name, W = group.group_name, group.size()
    for elements in (4, 50_000):
        for shard in inputs(group, elements):
            for number in range(6):
                gathered = OPS._low_contention_all_gather(shard, name)
                if group.rank() == number % W:
                    assert torch.equal(wait(gathered), torch.ones(W * elements))
            assert torch.equal(wait(gathered), torch.ones(W * elements))


@WORLD_SIZES
@pytest.mark.ranks
def test_ranks_may_wait_at_different_times(group: dist.ProcessGroup, world_size: int) -> None:
    """Each rank may wait at its own time, while its peers are in another op."""
    name, W = group.group_name, group.size()
    for elements in (4 * W, 50_000 * W):
        for shard in inputs(group, elements):
            for early in range(W):
                pending = OPS._low_contention_reduce_scatter(shard, "sum", name)
                if group.rank() == early:
                    wait(pending)
                symm_cp.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group=group)
                assert torch.equal(wait(pending), torch.full((elements // W,), float(W)))


def mix(group: dist.ProcessGroup, count: int, seed: int) -> list[float]:
    """Random ops of random sizes, the same on all ranks; returns the sum of each result."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed * 100 + group.rank())
    name, W = group.group_name, group.size()
    sums, pending = [], []
    for _ in range(count):
        m, k, n = (choose.choice([1, 3, 16, 65]) for _ in range(3))
        x = torch.randn(m * W, k, generator=generator)
        w = torch.randn(k, n, generator=generator)
        kind = choose.randrange(8)
        if kind == 0:
            result = symm_cp.all_gather_matmul(x, w, group=group)
        elif kind == 1:
            result = symm_cp.matmul_reduce_scatter(x, w, group=group)
        elif kind == 2:
            pending.append(OPS._low_contention_all_gather(x, name))
            continue
        elif kind == 3:
            pending.append(OPS._low_contention_reduce_scatter(x, "sum", name))
            continue
        elif kind == 4:
            result = OPS.one_shot_all_reduce(x, "sum", name)
        elif kind == 5:
            result = OPS.two_shot_all_reduce_(x, "sum", name)
        else:
            x8, w8, one = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.ones(())
            if kind == 6:
                rows = torch.ones(m * W, 1)
                _, result = symm_cp.scaled_all_gather_matmul(
                    x8, w8, rows, one, group=group, out_dtype=torch.float32
                )
            else:
                result = symm_cp.scaled_matmul_reduce_scatter(
                    x8, w8, one, one, group=group, out_dtype=torch.float32
                )
        sums.append(result.double().sum().item())
        if pending and choose.random() < 0.5:
            sums.append(wait(pending.pop(choose.randrange(len(pending)))).double().sum().item())
    sums += [wait(tensor).double().sum().item() for tensor in pending]
    return sums


@WORLD_SIZES
@pytest.mark.ranks
def test_mixes_are_deterministic(group: dist.ProcessGroup, world_size: int) -> None:
    seed = random.randrange(1000)
    assert mix(group, 150, seed) == mix(group, 150, seed)  # to the last bit


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_two_groups_and_two_threads(group: dist.ProcessGroup, world_size: int) -> None:
    """Ops on overlapping groups in turn, then in two threads started in different orders."""
    ranks = list(range(group.size()))
    groups = [dist.new_group(ranks) for _ in range(2)]
    for seed in range(3):
        for own in groups:
            mix(own, 20, seed)
    expected = [mix(own, 60, 7) for own in groups]
    results: dict[int, list[float]] = {}

    def use(index: int) -> None:
        results[index] = mix(groups[index], 60, 7)

    threads = [threading.Thread(target=use, args=(index,)) for index in (0, 1)]
    for thread in threads if group.rank() == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[0], results[1]] == expected
    for own in groups:
        dist.destroy_process_group(own)
