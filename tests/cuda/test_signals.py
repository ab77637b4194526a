"""How ranks signal each other on devices with streams: what the driver allows, copies, threads."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.testing import Ranks
from tests.cuda.op_cases import cases, check, refill, zeros
from tests.cuda.simulated import simulated_device, simulation


def a_call(group: dist.ProcessGroup) -> None:
    """Calls an op on each of the two channels, and checks the results."""
    made, names = cases(group, refill(zeros(group.size()))), ("background gather", "scatter")
    for name, out in [(name, made[name][0]()) for name in names]:
        check(name, made[name], out)


@pytest.mark.parametrize(("version", "works"), [(12040, False), (12050, True), (13010, True)])
def test_streams_wait_in_symmetric_memory_from_cuda_12_5(
    monkeypatch: pytest.MonkeyPatch, version: int, works: bool
) -> None:
    with simulation(driver_version=version) as made:
        assert made.streams_can_wait() is works


def test_a_driver_without_a_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulated_device()
    monkeypatch.setattr(made, "driver", "libthere_is_none.so")
    with pytest.raises(RuntimeError, match=r"driver library libthere_is_none\.so does not load"):
        made.streams_can_wait()


def copied(group: dist.ProcessGroup) -> dict[str, int]:
    with simulation() as made:
        a_call(group)
        made.synchronize()
        time.sleep(0.3)  # until the driver reads the memory map again
        made.copied()
        a_call(group)
        made.synchronize()
        return made.copied()


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_copies_between_devices_ask_for_copy_engines(ranks: Ranks, world_size: int) -> None:
    peers = world_size - 1
    for copies in ranks.run(world_size, copied):
        # In the background: from the input to the output, and from there to the slot.
        assert copies["local"] == 2
        assert copies["local, overlapping"] == 0
        # Pulls of both ops; signals that shards are there, and that sums are there.
        assert copies["peer, overlapping"] + copies["peer"] == (2 + 1 + 1) * peers
        # None goes to the null stream, which takes no batches: the caller's lane signals no peer.
        assert copies["peer"] == 0


def refused(group: dist.ProcessGroup) -> list[str]:
    errors = []
    with simulation() as made:
        a_call(group)
        dist.barrier(group)
        for fault in ("write", "wait", "peer_copy"):
            made.machine.set(**{fault: "refuse"})
            with pytest.raises(RuntimeError, match="symm_cp: cu") as raised:
                symm_cp.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group=group)
            made.machine.set(**{fault: ""})
            made.synchronize()
            errors.append(" | ".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))
            dist.barrier(group)
    return errors


def test_what_the_driver_refuses_is_raised(ranks: Ranks) -> None:
    """If the peers cannot be notified either, the error says so."""
    not_told = "symm_cp: the peers cannot be notified: cuMemcpyAsync"
    refusal = "failed: CUDA_ERROR_NOT_SUPPORTED"
    expected = [
        f"symm_cp: cuStreamBatchMemOp {refusal}",
        f"symm_cp: cuStreamBatchMemOp {refusal}",
        f"symm_cp: cuMemcpyBatchAsync {refusal} | {not_told} {refusal}",
    ]
    for errors in ranks.run(2, refused):
        # The first error of each names the op.
        assert [re.sub(r"^\w+: (?=symm_cp: )", "", error) for error in errors] == expected, errors


@pytest.mark.ranks(2)
def test_threads_need_no_current_context(group: dist.ProcessGroup) -> None:
    """Calls ops in threads without a current context, as threads of autograd do."""
    with simulation(contexts=True) as made:
        # Where a workspace is made, torch has just allocated its memory: there is a context.
        a_call(group)
        symm_cp.all_gather_kv(torch.ones(4, 6), torch.ones(4, 6), seq_dim=0, group=group)
        raised: list[BaseException] = []

        def alone(call: Callable[[], object]) -> None:
            def run() -> None:
                try:
                    call()
                except BaseException as error:
                    raised.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()

        context = ctypes.c_void_p(1)

        def calls() -> None:
            for _ in range(2):
                rows = torch.randn(group.size(), 4, 6)
                key, _ = symm_cp.all_gather_kv(
                    rows[group.rank()], rows[group.rank()], seq_dim=0, group=group
                )
                assert torch.equal(key, rows.flatten(0, 1))
            # The thread still has no current context.
            made.library.cuCtxGetCurrent(ctypes.byref(context))

        alone(calls)
        assert raised == []
        assert context.value is None
        alone(lambda: a_call(group))
        assert raised == []


def test_the_device_is_current_when_torch_is_asked_about_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture on the current stream of another GPU makes no difference."""
    current = [0]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *_: Any) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    assert CudaDevice(torch.device("cuda", 1)).capturing()
    assert not CudaDevice(torch.device("cuda", 0)).capturing()
    assert current == [0]
