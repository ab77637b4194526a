"""The NVSHMEM runtime over a stand-in of nvshmem4py: heaps, order of calls, all pipelines."""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.cuda import nvshmem
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some
from tests.nvshmem.double import Double
from tests.ops import test_attention, test_random

#: Which memory is mapped: none, all, or within the pairs (0, 1) and (2, 3).
MAPPED = {
    "none": lambda rank, pe: False,
    "all": lambda rank, pe: True,
    "pairs": lambda rank, pe: rank // 2 == pe // 2,
}


class _Both(SimulatedDevice):
    """Streams of the simulation, workspaces of NVSHMEM."""

    captures = False

    def __init__(self, heap: nvshmem.Heap) -> None:
        super().__init__()
        self._heap = heap

    def workspace(
        self,
        group: memory.Group,
        channel: str,
        slot_bytes: int,
        *,
        graph: bool,
        verdict: cuda.Verdict,
    ) -> nvshmem.NvshmemWorkspace:
        return nvshmem.NvshmemWorkspace(
            group, self, channel, slot_bytes, graph=graph, verdict=verdict, heap=self._heap
        )

    def is_symmetric(self, tensor: torch.Tensor, group: memory.Group) -> bool:
        return False


@contextmanager
def running(
    group: dist.ProcessGroup, mapped: str, heap_bytes: int = 1 << 22, driver_version: int = 13010
) -> Iterator[Double]:
    """Inside, ops on CPU tensors use NVSHMEM. Collective over all ranks of the world."""
    cpu, state = torch.device("cpu"), memory.resolve(group)
    with simulation(driver_version=driver_version) as streams:
        double = Double(streams, MAPPED[mapped])
        with (
            mock.patch.object(nvshmem, "library", return_value=(double, double)),
            mock.patch.object(nvshmem, "bind_gpu", lambda device: device),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            nvshmem.init(heap_bytes, device=cpu)
            heap = nvshmem.heap()
            assert heap is not None
            both = _Both(heap)
            cuda.workspaces_of(state).current.clear()
            with cuda.replaced(cpu, both):
                yield double
                both.synchronize()
            dist.barrier()
            cuda.workspaces_of(state).current.clear()
            nvshmem.finalize()
        assert double.calls[-2:] == [("free",), ("finalize",)]


def pipelines(group: dist.ProcessGroup, mapped: str, seed: int) -> list[tuple[Any, ...]]:
    with running(group, mapped) as double:
        for index in range(8):
            test_random.gathers(group, index)
            test_random.scatters(group, index)
        cases = [
            test_attention.Case(layout, dtype=torch.float64, rotate=rotate, **mask)
            for layout in random.Random(seed).sample(test_attention.layouts(group.size()), 2)
            for mask in test_attention.masks(layout)[:3]
            for rotate in ("allgather", "alltoall")
        ]
        test_attention.run_all(group, cases, seed)
        return [call for call in double.calls if call[0] in ("get", "signal", "wait")]


@pytest.mark.parametrize("mapped", some("pairs", of=MAPPED))
def test_all_pipelines(ranks: Ranks, mapped: str) -> None:
    for calls in ranks.run(4, pipelines, mapped, random.randrange(1 << 30)):
        # Where all memory is mapped, everything goes as on CUDA.
        assert bool(calls) is (mapped != "all")


def one_gather(
    group: dist.ProcessGroup, mapped: str = "none", driver_version: int = 13010
) -> list[tuple[Any, ...]]:
    with running(group, mapped, driver_version=driver_version) as double:
        x = torch.randn(4, 8)
        symm_cp.all_gather_matmul(x, x.t().contiguous(), group=group)
        return [call for call in double.calls if call[0] in ("get", "signal", "wait")]


def test_order_and_arguments_of_the_calls(ranks: Ranks) -> None:
    for rank, calls in enumerate(ranks.run(4, one_gather)):
        others = [(rank + turn) % 4 for turn in (1, 2, 3)]
        # Signals that the own shard is there, then a wait and a pull for each peer's shard.
        expected = [("signal", peer, 1, "side") for peer in others]
        for peer in others:
            expected += [("wait", 1, "side"), ("get", peer, 4 * 8 * 4, "side")]
        assert calls == expected


def test_on_old_drivers_signals_are_nvshmems(ranks: Ranks) -> None:
    """On such drivers streams cannot wait in mapped memory."""
    for calls in ranks.run(4, one_gather, "all", 12040):
        assert [call[0] for call in calls] == ["signal"] * 3 + ["wait", "get"] * 3
    for calls in ranks.run(4, one_gather, "all", 12050):
        assert not calls


@pytest.mark.ranks(4)
def test_groups_that_overlap(group: dist.ProcessGroup) -> None:
    """Ranks of a group have their workspaces at different places of the heap."""
    pair, three = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    mine = [g for g in (pair, three) if g != dist.GroupMember.NON_GROUP_MEMBER]
    with running(group, "none"):
        for turn in range(4):
            for sub in mine:
                x = torch.full((2, 3), float(dist.get_rank() + 10 * turn))
                full = torch.cat(
                    [
                        torch.full((2, 3), float(r + 10 * turn))
                        for r in dist.get_process_group_ranks(sub)
                    ]
                )
                out = symm_cp.all_gather_matmul(x, torch.eye(3), group=sub)
                assert torch.equal(out, full)


@pytest.mark.ranks(4)
def test_a_heap_that_is_full_on_one_rank_is_an_error_on_all(group: dist.ProcessGroup) -> None:
    """Heaps fill unequally when ranks are members of different groups."""
    with running(group, "none", heap_bytes=1 << 16):
        heap = nvshmem.heap()
        assert heap is not None
        taken = heap.cut(1 << 15) if group.rank() == 1 else None
        tensor = torch.randn(64, 64)
        where = "a workspace needs" if taken is not None else r"rank 1 of group .* failed: Runtime"
        with pytest.raises(RuntimeError, match=where):
            symm_cp.all_gather_matmul(tensor, tensor, group=group)
        if taken is not None:
            heap.give_back(taken)
        symm_cp.all_gather_matmul(tensor, tensor, group=group)


@pytest.mark.ranks(4)
def test_a_device_without_an_index_is_the_current_one(group: dist.ProcessGroup) -> None:
    """Each rank binds its current GPU, whatever form of its device it was given."""
    rank, gpus = group.rank(), mock.MagicMock()
    bindings = {"cuda": mock.MagicMock(core=gpus), "cuda.core": gpus}
    own, other = torch.device("cuda", rank), torch.device("cuda", rank + 1)
    core = mock.MagicMock()
    core.get_unique_id.return_value = {"id": 42}
    core.bytetensor.return_value = mock.MagicMock(device=own)
    for given in (None, "cuda", torch.device("cuda"), own):
        with (
            mock.patch.object(nvshmem, "library", return_value=(core, None)),
            pytest.MonkeyPatch.context() as patch,
            mock.patch.object(torch.cuda, "current_device", return_value=rank),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            for name, module in bindings.items():
                patch.setitem(sys.modules, name, module)
            nvshmem.init(device=given)
            gpus.Device.assert_called_with(rank)
            nvshmem.enable(group, device=given)
            served = cuda.device_for(memory.resolve(group), torch.device("cuda"))
            assert served.torch_device == own
            with pytest.raises(ValueError, match=rf"on {other}, but init\(\) was for {own}"):
                nvshmem.enable(group, device=other)
            nvshmem.finalize()


@pytest.mark.ranks(4)
def test_a_full_heap_is_an_error_that_says_what_to_do(group: dist.ProcessGroup) -> None:
    with running(group, "none", heap_bytes=1 << 16):
        small, large = torch.randn(16, 16), torch.randn(1 << 8, 1 << 8)
        symm_cp.all_gather_matmul(small, small, group=group)
        with pytest.raises(RuntimeError, match=r"heap of 65536 bytes: .*heap_bytes"):
            symm_cp.all_gather_matmul(large, large, group=group)
        symm_cp.all_gather_matmul(small, small, group=group)


def test_the_heap_is_cut_and_given_back() -> None:
    heap = nvshmem.Heap(None, None, torch.empty(10 * 4096, dtype=torch.uint8))
    first, second, third = heap.cut(4096), heap.cut(5000), heap.cut(1)
    assert (first, second, third) == (0, 4096, 3 * 4096)
    heap.give_back(second)
    assert heap.cut(3 * 4096) == 4 * 4096  # does not fit between
    assert heap.cut(4096) == 4096
    with pytest.raises(RuntimeError, match="needs 16384 bytes in a row, more than are free"):
        heap.cut(4 * 4096)


#: The arguments of nvshmem4py's bindings, as its documentation strings give them.
BINDINGS = {
    "ptr": ["dest", "pe"],
    "getmem_on_stream": ["dest", "source", "bytes", "pe", "cstrm"],
    "signal_op_on_stream": ["sig_addr", "signal", "sig_op", "pe", "cstrm"],
    "signal_wait_until_on_stream": ["sig_addr", "cmp", "cmp_value", "cstream"],
}


def test_nvshmem4py_has_these_calls_or_the_error_says_what_to_install() -> None:
    if importlib.util.find_spec("nvshmem") is None:
        with pytest.raises(RuntimeError, match=r"pip install 'symm_cp\[nvshmem\]'"):
            nvshmem.library()
        return
    core, bindings = nvshmem.library()
    given = inspect.signature(core.init).parameters
    assert {"device", "uid", "rank", "nranks", "initializer_method"} <= given.keys()
    for name in ("get_unique_id", "bytetensor", "free_tensor", "finalize"):
        assert callable(getattr(core, name))
    for name, arguments in BINDINGS.items():
        text = getattr(bindings, name).__doc__.split(")")[0].split("(")[1]
        assert [argument.split()[-1] for argument in text.split(",")] == arguments
    assert (int(core.SignalOp.SIGNAL_SET), int(core.ComparisonType.CMP_GE)) == (9, 5)


def test_enable_needs_init() -> None:
    with pytest.raises(RuntimeError, match=r"enable\(\) needs init\(\) before"):
        nvshmem.enable("some group")
