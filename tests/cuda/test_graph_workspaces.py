"""Which graphs share a workspace, and when it comes back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from tests.cuda.graphs import graphed
from tests.cuda.op_cases import Case, cases, check, refill, zeros
from tests.cuda.simulated import simulation
from tests.exhaustive import some


@contextlib.contextmanager
def new_group(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """A group without workspaces."""
    own = dist.new_group(list(range(group.size())))
    assert isinstance(own, dist.ProcessGroup)
    yield own
    dist.destroy_process_group(own)


def gather(group: dist.ProcessGroup, rows: int = 3) -> tuple[dict[str, torch.Tensor], Case]:
    """A call, and its inputs."""
    values = refill(zeros(group.size(), rows))
    return values, cases(group, values)["gather"]


@pytest.mark.ranks(2)
def test_each_graph_takes_a_workspace(group: dist.ProcessGroup) -> None:
    """Replays at the same time: graph_programs.py."""
    with new_group(group) as own, simulation() as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=2)
        step = gather(own)[1][0]
        graphs = [graphed(made, step) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"to graphs of 2 other memory pools.*graphs=n\)"):
            graphed(made, step)
        cuda.reserve_on(memory.resolve(own), made, 1 << 10)
        graphs.append(graphed(made, step))
        kinds = cuda.workspaces_of(memory.resolve(own)).graphs.values()
        assert sorted(len(kind.by_pool) for kind in kinds) == [0, 3]


@pytest.mark.ranks(2)
def test_graphs_of_one_pool_share_a_workspace(group: dist.ProcessGroup) -> None:
    """A server captures a graph for each batch size, the largest first."""
    with new_group(group) as own, simulation() as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 11, graphs=1)
        graphs, pool = [], object()
        for rows in range(67, 0, -6):
            values, case = gather(own, rows)
            graphs.append((values, case, *graphed(made, case[0], pool)))
        for values, case, graph, out in [*graphs, *graphs[::-2]]:
            refill(values)
            graph.replay()
            check("gather", case, out)


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


@pytest.mark.ranks(2)
def test_the_workspace_of_a_graph_that_died_comes_back(group: dist.ProcessGroup) -> None:
    """Graphs die on one rank first; their workspace comes back when they have died on all."""
    kept = []
    with new_group(group) as own, simulation() as made:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=2)
        values, case = gather(own)
        for turn in range(6):
            graph, out = graphed(made, case[0])
            for _ in range(turn + 1):
                refill(values)
                graph.replay()
                check("gather", case, out)
            if turn == 0 and group.rank() == 0:
                kept.append(graph)
            elif turn == 3:
                kept.clear()
            del graph, out
            gc.collect()
        kept += [graphed(made, case[0])[0] for _ in range(2)]
        with pytest.raises(RuntimeError, match="to graphs of 2 other memory pools"):
            graphed(made, case[0])


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_calls_are_made_beside_a_capture(group: dist.ProcessGroup, world_size: int) -> None:
    """While a thread captures a call, another one makes calls."""
    with new_group(group) as own, simulation() as made, ThreadPoolExecutor(1) as thread:
        cuda.reserve_on(memory.resolve(own), made, 1 << 10, graphs=1)
        values, case = gather(own)
        eager: list[torch.Tensor] = []

        def on_a_stream() -> None:
            with made.stream():
                eager.append(case[0]())

        def captured() -> torch.Tensor:
            result = case[0]()
            for _ in range(4):  # by Python, and by a plan
                thread.submit(on_a_stream).result()
            return result

        graph, found = graphed(made, captured)
        made.synchronize()  # the stream of the eager calls
        for out in eager:
            check("gather", case, out)
        refill(values)
        graph.replay()
        check("gather", case, found)
