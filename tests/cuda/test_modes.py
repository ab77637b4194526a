"""Ops of all kinds on simulated machines of all kinds, and graphs that are replayed many times."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.graphs import graphed
from tests.cuda.simulated import random_mode, simulation
from tests.cuda.test_runtime import mixes
from tests.exhaustive import exhaustive, some


def described(mode: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in mode.items())


@pytest.mark.parametrize("turn", some(0, of=range(6)))
@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
def test_mixes_on_any_machine(ranks: Ranks, world_size: int, turn: int) -> None:
    mode = random_mode(random.Random(random.randrange(1 << 30)))
    print(described(mode))
    ranks.run(world_size, mixes, 20, random.randrange(1 << 30), mode)


@exhaustive
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("world_size", [5, 8])
def test_mixes_of_more_ranks(ranks: Ranks, world_size: int, turn: int) -> None:
    mode = random_mode(random.Random(random.randrange(1 << 30)))
    with ranks.own(world_size, mixes, 20, random.randrange(1 << 30), mode) as running:
        failures = [outcome.failure for outcome in running.outcomes(120)]
    assert failures == [""] * world_size, described(mode)


def replays(group: dist.ProcessGroup, seed: int) -> None:
    """Graphs of three ops, replayed in any order and on any stream, the same on all ranks."""
    rank, W, choose = group.rank(), group.size(), random.Random(seed)
    shard, full, weight = torch.zeros(3, 8), torch.zeros(2 * W, 8), torch.zeros(8, 5)
    q, k, v = torch.zeros(3, 1, 2, 8, 16)
    with simulation() as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 16, graphs=3)
        ops = [
            lambda: symm_cp.all_gather_matmul(shard, weight, gather_dim=0, group=group),
            lambda: symm_cp.matmul_reduce_scatter(full, weight, scatter_dim=0, group=group),
            lambda: symm_cp.all_gather_attention(q, k, v, group=group),
        ]
        captured = [graphed(made, op) for op in ops]
        streams = [0, made.machine.stream(0), made.machine.stream(0)]
        for _ in range(8):
            shards, fulls = torch.randn(W, 3, 8), torch.randn(W, 2 * W, 8)
            heads = torch.randn(W, 3, 1, 2, 8, 16)
            weight.copy_(torch.randn(8, 5))
            shard.copy_(shards[rank])
            full.copy_(fulls[rank])
            for target, value in zip((q, k, v), heads[rank], strict=True):
                target.copy_(value)
            expected = [
                shards.flatten(0, 1) @ weight,
                (fulls @ weight).sum(0).chunk(W)[rank],
                torch.nn.functional.scaled_dot_product_attention(
                    q, torch.cat(list(heads[:, 1]), 2), torch.cat(list(heads[:, 2]), 2)
                ),
            ]
            for i in choose.sample(range(3), 3):
                graph, out = captured[i]
                with made.stream(choose.choice(streams)):
                    graph.replay()
                torch.testing.assert_close(out, expected[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 4]))
def test_graphs_are_replayed_in_any_order(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, replays, random.randrange(1 << 30))


@exhaustive
def test_graphs_of_more_ranks_are_replayed_in_any_order(ranks: Ranks) -> None:
    world_size = random.randint(5, 8)
    with ranks.own(world_size, replays, random.randrange(1 << 30)) as running:
        failures = [outcome.failure for outcome in running.outcomes(120)]
    assert failures == [""] * world_size


def replays_at_once(group: dist.ProcessGroup) -> None:
    """Two graphs on two streams, which the host starts in the same order on all ranks."""
    rank, W = group.rank(), group.size()
    with simulation(delays_us=300, deferred=True) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 16, graphs=2)
        shards, weight = torch.zeros(2, 3, 8), torch.randn(8, 5)
        captured = [
            graphed(made, partial(symm_cp.all_gather_matmul, shard, weight, group=group))
            for shard in shards
        ]
        streams = [made.machine.stream(0), made.machine.stream(0)]
        for _ in range(60):
            values = torch.randn(2, W, 3, 8)
            shards.copy_(values[:, rank])
            for (graph, _), stream in zip(captured, streams, strict=True):
                with made.stream(stream):
                    graph.replay()
            made.synchronize()
            for (_, out), value in zip(captured, values, strict=True):
                torch.testing.assert_close(out, value.flatten(0, 1) @ weight, rtol=1e-4, atol=1e-4)


@exhaustive
def test_graphs_are_replayed_at_once(ranks: Ranks) -> None:
    ranks.run(2, replays_at_once)
