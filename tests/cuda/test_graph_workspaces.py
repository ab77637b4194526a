"""Which graphs share a workspace, and when it comes back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.graphs import graphed
from tests.cuda.simulated import simulation
from tests.exhaustive import some


def two_graphs(group: dist.ProcessGroup, replays: int) -> None:
    own = dist.new_group(list(range(group.size())))
    rank, weight = group.rank(), torch.randn(8, 5)
    inputs = [torch.empty(3, 8) for _ in range(3)]

    def step(index: int) -> Callable[[], torch.Tensor]:
        return lambda: symm_cp.all_gather_matmul(inputs[index], weight, gather_dim=0, group=own)

    with simulation(delays_us=300, deferred=True) as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=2)
        captured = [graphed(made, step(index)) for index in range(2)]
        with pytest.raises(RuntimeError, match=r"to graphs of 2 other memory pools.*graphs=n\)"):
            graphed(made, step(2))
        streams = [made.machine.stream(made.index) for _ in captured]
        for _ in range(replays):
            rows = [torch.randn(group.size(), 3, 8) for _ in captured]
            for index, (graph, _) in enumerate(captured):
                inputs[index].copy_(rows[index][rank])
                with made.stream(streams[index]):
                    graph.replay()
            for index, (_, out) in enumerate(captured):
                made.library.simulated_drain(streams[index])
                torch.testing.assert_close(out, rows[index].flatten(0, 1) @ weight)
        cuda.reserve_on(memory.resolve(own), made, 1 << 10)
        graphed(made, step(2))
        kinds = cuda.workspaces_of(memory.resolve(own)).graphs.values()
        assert sorted(len(kind.by_pool) for kind in kinds) == [0, 3]
    dist.destroy_process_group(own)


def in_one_pool(group: dist.ProcessGroup) -> None:
    """A server captures a graph for each batch size, the largest first."""
    own, rank, weight = dist.new_group(list(range(group.size()))), group.rank(), torch.randn(8, 5)
    with simulation() as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 11, graphs=1)
        inputs, graphs, pool = [torch.empty(size, 8) for size in range(67, 0, -6)], [], object()
        for x in inputs:
            step = partial(symm_cp.all_gather_matmul, x, weight, gather_dim=0, group=own)
            graphs.append(graphed(made, step, pool))
        for index in [*range(len(graphs)), *range(len(graphs))[::-2]]:
            rows = torch.randn(group.size(), *inputs[index].shape)
            inputs[index].copy_(rows[rank])
            graph, out = graphs[index]
            graph.replay()
            torch.testing.assert_close(out, rows.flatten(0, 1) @ weight)
    dist.destroy_process_group(own)


def test_graphs_of_one_pool_share_a_workspace(ranks: Ranks) -> None:
    ranks.run(2, in_one_pool)


def test_the_pool_of_a_capture_is_the_one_that_it_allocates_from() -> None:
    device, memory_ = CudaDevice(torch.device("cuda", 0)), torch.empty(64, dtype=torch.uint8)
    begin = memory_.data_ptr()
    segments = [
        {"address": begin - 64, "total_size": 64, "segment_pool_id": (1, 0)},
        {"address": begin, "total_size": 64, "segment_pool_id": (0, 7)},
    ]
    with (
        mock.patch.object(device, "capture_id", side_effect=[1, 1, 2, 3]),
        mock.patch.object(device, "guard", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "get_allocator_backend") as backend,
        mock.patch.object(torch, "empty", return_value=memory_),
        mock.patch.object(torch.cuda, "memory_snapshot", return_value=segments),
    ):
        backend.return_value = "native"
        assert [device.graph_pool() for _ in range(2)] == [(0, 7)] * 2
        assert device.graph_pools() == {(1, 0), (0, 7)}
        segments[1]["segment_pool_id"] = (0, 0)
        with pytest.raises(NotImplementedError, match=r"only by torch\.cuda\.CUDAGraph"):
            device.graph_pool()
        backend.return_value = "cudaMallocAsync"
        assert device.graph_pool() == 3
        assert device.graph_pools() == {3}


def captured_again(group: dist.ProcessGroup) -> None:
    """Graphs die on one rank first; their workspace comes back when they have died on all."""
    own, rank, weight = dist.new_group(list(range(group.size()))), group.rank(), torch.randn(8, 5)
    x, kept = torch.empty(3, 8), []
    with simulation() as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=2)

        def step() -> torch.Tensor:
            return symm_cp.all_gather_matmul(x, weight, gather_dim=0, group=own)

        for turn in range(6):
            graph, out = graphed(made, step)
            for _ in range(turn + 1):
                rows = torch.randn(group.size(), 3, 8)
                x.copy_(rows[rank])
                graph.replay()
                torch.testing.assert_close(out, rows.flatten(0, 1) @ weight)
            if turn == 0 and rank == 0:
                kept.append(graph)
            elif turn == 3:
                kept.clear()
            del graph, out
            gc.collect()
        kept += [graphed(made, step)[0] for _ in range(2)]
        with pytest.raises(RuntimeError, match="to graphs of 2 other memory pools"):
            graphed(made, step)
    dist.destroy_process_group(own)


def test_the_workspace_of_a_graph_that_died_comes_back(ranks: Ranks) -> None:
    ranks.run(2, captured_again)


def beside_a_capture(group: dist.ProcessGroup) -> None:
    """While a thread captures a call, another one makes calls."""
    rank, W = group.rank(), group.size()
    own = dist.new_group(list(range(W)))
    rows, weight = torch.zeros(W, 3, 8), torch.randn(8, 5)

    def step() -> torch.Tensor:
        return symm_cp.all_gather_matmul(rows[rank], weight, gather_dim=0, group=own)

    with simulation() as made, ThreadPoolExecutor(1) as thread:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=1)
        eager: list[torch.Tensor] = []

        def on_a_stream() -> None:
            with made.stream():
                eager.append(step())

        def captured() -> torch.Tensor:
            result = step()
            for _ in range(4):  # by Python, and by a plan
                thread.submit(on_a_stream).result()
            return result

        rows.fill_(1)
        graph, found = graphed(made, captured)
        for out in eager:
            torch.testing.assert_close(out, rows.flatten(0, 1) @ weight)
        rows.copy_(torch.arange(W).view(W, 1, 1))
        graph.replay()
        torch.testing.assert_close(found, rows.flatten(0, 1) @ weight)
    dist.destroy_process_group(own)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_calls_are_made_beside_a_capture(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, beside_a_capture)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_graphs_are_replayed_on_two_streams(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, two_graphs, 20)
