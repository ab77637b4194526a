"""`torch.compile(mode="reduce-overhead")`: what it does around our ops, on the simulated device.

Torch first calls a compiled function with all its allocations in the pool of the future graph
(warm-up), refuses surviving memory other than results, captures the next call, and replays.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.group import memory
from symm_cp.ops.attention.tiles import _band
from symm_cp.testing import Ranks
from tests.cuda.graphs import graphed
from tests.cuda.op_cases import CAPTURED, cases, check, refill, zeros
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some


def warm_up(made: SimulatedDevice, call: Callable[[], Any]) -> Any:
    """Makes a first call, and checks that it leaves only its results in the graph's pool."""
    before = made.machine.pooled()
    with made.warming_up():
        result = call()
    made.synchronize()
    gc.collect()
    left = made.machine.pooled() - before
    assert left == len({t.untyped_storage().data_ptr() for t in result}), left
    return result


def trees(group: dist.ProcessGroup) -> None:
    own = dist.new_group(list(range(group.size())))  # without workspaces
    values = refill(zeros(group.size()))
    with simulation(poison=True, delays_us=50) as made:
        graphs = []
        for name in CAPTURED:
            case = cases(own, values)[name]
            (found,) = warm_up(made, lambda case=case: [case[0]()])
            check(name, case, found)
            made.tree = True
            graphs.append((name, case, *graphed(made, case[0])))
            made.tree = False
        for _ in range(3):
            refill(values)
            # In any order, one after the other, with eager calls in between.
            for name, case, graph, out in random.sample(graphs, len(graphs)):
                graph.replay()
                check(name, case, out)
        for kind in cuda.workspaces_of(memory.resolve(own)).graphs.values():
            assert kind.free == []
            (shared,) = kind.by_pool.values()
            assert 1 <= len(shared) <= len(graphs)
    dist.destroy_process_group(own)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_all_ops_are_captured_without_reserve(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, trees)


def test_masks_are_kept_out_of_the_pool() -> None:
    device = torch.device("cpu")
    _band.forget()
    with simulation(poison=True) as made:
        band = warm_up(made, lambda: kept_band(device))
        assert band == []
        assert _band(device, *BAND)[0] is _band(device, *BAND)[0]
    _band.forget()


BAND = (40, 60, -3, 5, torch.float32)


def kept_band(device: torch.device) -> list[torch.Tensor]:
    offset = torch.arange(60) - torch.arange(40).unsqueeze(1)
    band, _ = _band(device, *BAND)
    assert torch.equal(band == 0, (offset >= -3) & (offset <= 5))
    return []


@pytest.mark.ranks(2)
def test_a_larger_call_takes_a_larger_workspace(group: dist.ProcessGroup) -> None:
    """A larger call gets a larger workspace; the graphs before it keep theirs."""
    own = dist.new_group(list(range(group.size())))
    captured = []
    with simulation(delays_us=50, poison=True) as made:
        for rows in (2, 4096, 3):
            case = cases(own, refill(zeros(group.size(), rows)))["gather"]
            warm_up(made, lambda case=case: [case[0]()])
            made.tree = True
            captured.append((case, *graphed(made, case[0])))
            made.tree = False
        (kind,) = cuda.workspaces_of(memory.resolve(own)).graphs.values()
        (shared,) = kind.by_pool.values()
        assert len(shared) == 2
        for case, graph, out in captured:
            graph.replay()
            check("gather", case, out)
        # Graphs captured by users may be replayed at the same time, so each needs a workspace.
        with pytest.raises(RuntimeError, match="there is none; none can be made while a graph"):
            graphed(made, case[0])
    dist.destroy_process_group(own)


def test_a_gpu_asks_torchs_graph_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cudagraph_trees as trees

    manager = trees.CUDAGraphTreeManager
    assert isinstance(manager.in_warmup, property)
    assert isinstance(manager.in_recording, property)
    assert "self.stream = torch.cuda.Stream()" in inspect.getsource(manager.__init__)
    device = CudaDevice(torch.device("cuda", 0))
    monkeypatch.setattr(device, "guard", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "its stream")
    found: Any = None
    monkeypatch.setattr(trees, "get_manager", lambda index, create_if_none_exists: found)
    assert not device.in_graph_tree()
    for warm_up, recording, stream, expected in [
        (True, False, "its stream", True), (False, True, "its stream", True),
        (False, False, "its stream", False), (True, False, "another", False),
    ]:  # fmt: skip
        found = SimpleNamespace(in_warmup=warm_up, in_recording=recording, stream=stream)
        assert device.in_graph_tree() is expected
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees")
    assert not device.in_graph_tree()
