"""Replayed graphs on a driver that starts their steps in any order that the edges allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp import cuda
from symm_cp.group import memory
from symm_cp.runtime import lowering
from symm_cp.schedule import GraphOrder
from symm_cp.schedule.graphs import Ordered
from symm_cp.testing import Ranks
from tests.cuda.graphs import graphed
from tests.cuda.simulated import simulation
from tests.exhaustive import some

#: A call, and a function that computes the expected result from values known to all ranks.
Case = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def cases(group: dist.ProcessGroup, values: dict[str, torch.Tensor]) -> dict[str, Case]:
    """Returns cases by op name; the ops' inputs are this rank's parts of `values`."""
    W, rank = group.size(), group.rank()
    weight, rows, full = values["weight"], values["rows"], values["full"]
    heads = values["heads"]

    def dense(which: int) -> torch.Tensor:
        return torch.cat(list(heads[:, which]), 2)

    def attend(method: str) -> torch.Tensor:
        q, k, v = heads[rank]
        out = symm_cp.all_gather_attention(q, k, v, group=group, method=method)
        assert isinstance(out, torch.Tensor)
        return out

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(heads[rank, 0], dense(1), dense(2))

    def gradient() -> torch.Tensor:
        q, k, v = (t.detach().requires_grad_() for t in heads[rank])
        out = symm_cp.all_gather_attention(q, k, v, group=group)
        assert isinstance(out, torch.Tensor)
        (found,) = torch.autograd.grad(out.sum(), [k])
        return found

    def dense_gradient() -> torch.Tensor:
        k = heads[rank, 1].detach().requires_grad_()
        keys = torch.cat([k if r == rank else heads[r, 1] for r in range(W)], 2)
        out = F.scaled_dot_product_attention(dense(0), keys, dense(2))
        (found,) = torch.autograd.grad(out.sum(), [k])
        return found

    return {
        "gather": (
            lambda: symm_cp.all_gather_matmul(rows[rank], weight, gather_dim=0, group=group),
            lambda: rows.flatten(0, 1) @ weight,
        ),
        "scatter": (
            lambda: symm_cp.matmul_reduce_scatter(full[rank], weight, scatter_dim=0, group=group),
            lambda: (full @ weight).sum(0).chunk(W)[rank],
        ),
        "all-reduce": (
            lambda: symm_cp.matmul_all_reduce(full[rank], weight, group=group),
            lambda: (full @ weight).sum(0),
        ),
        "attention": (lambda: attend("allgather"), attention),
        "ulysses": (lambda: attend("ulysses"), attention),
        "gradient": (gradient, dense_gradient),
    }


def replays(group: dist.ProcessGroup, names: list[str], turns: int, seed: int) -> None:
    """One graph of several ops, on a machine with one queue for all streams."""
    W = group.size()
    values = {
        "weight": torch.zeros(8, 5), "rows": torch.zeros(W, 3, 8),
        "full": torch.zeros(W, 2 * W, 8), "heads": torch.zeros(W, 3, 1, 2 * W, 8, 16),
    }  # fmt: skip
    chosen = [cases(group, values)[name] for name in names]
    with simulation(one_queue=True, delays_us=50, patience_ms=10_000) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        graph, found = graphed(made, lambda: [call() for call, _ in chosen])
        for turn in range(turns):
            generator = torch.Generator().manual_seed(seed + turn)
            for value in values.values():
                value.copy_(torch.randn(value.shape, generator=generator))
            graph.replay()
            for (_, expected), out in zip(chosen, found, strict=True):
                torch.testing.assert_close(out, expected(), rtol=1e-4, atol=1e-4)


ALL = ["gather", "scatter", "all-reduce", "attention", "ulysses", "gradient"]


@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
def test_graphs_finish_in_any_order(ranks: Ranks, world_size: int) -> None:
    names = random.choices(ALL, k=4)
    print(names)
    ranks.run(world_size, replays, names, 15, random.randrange(1 << 30))


@pytest.mark.parametrize("name", some("scatter", of=ALL))
def test_graphs_of_one_op_finish_in_any_order(ranks: Ranks, name: str) -> None:
    ranks.run(some_world(), replays, [name], 20, random.randrange(1 << 30))


def some_world() -> int:
    return random.randint(2, 4)


def in_any_order(order: Any, rank: int) -> GraphOrder:
    """An order without added edges: only lanes and a rank's own flags order its steps."""
    return GraphOrder(tuple(Ordered(lane, step) for lane, step in order))


def without_edges(group: dist.ProcessGroup, seed: int) -> None:
    with mock.patch.object(lowering, "graph_order", in_any_order):
        replays(group, ["scatter", "all-reduce", "ulysses"], 60, seed)


@pytest.mark.exhaustive
def test_without_the_edges_they_hang(ranks: Ranks) -> None:
    with ranks.own(2, without_edges, random.randrange(1 << 30)) as running:
        failures = [outcome.failure + outcome.output for outcome in running.outcomes(60)]
    assert any("was not there after 10000 ms" in failure for failure in failures), failures
