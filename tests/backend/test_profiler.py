"""Calls of the backend are events of torch's profiler until they have been waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import symm_cp
from tests.backend.common import all_gather_single, reduce_scatter_single, shared
from tests.ops.calls import calls as ops_with_gradients
from tests.ops.calls import leaves

Shapes = list[list[int]]


def calls(group: dist.ProcessGroup) -> dict[str, tuple[Callable[..., dist.Work | None], Shapes]]:
    """Calls and the shapes of their inputs, by the names of their events."""
    size = group.size()
    x, whole = torch.ones(3, 2), torch.ones(3 * size, 2)
    parts = [torch.ones(3, 2) for _ in range(size)]
    root = {"group_src": 0}
    mine = parts if group.rank() == 0 else None
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    return {
        "all_reduce": (lambda **how: dist.all_reduce(x, **how), [[3, 2]]),
        "broadcast": (lambda **how: dist.broadcast(x, **root, **how), [[3, 2]]),
        "reduce": (lambda **how: dist.reduce(x, group_dst=0, **how), [[3, 2]]),
        "all_gather": (lambda **how: dist.all_gather(parts, x, **how), [[3, 2]]),
        "all_gather_into_tensor": (lambda **how: all_gather_single(whole, x, **how), [[3, 2]]),
        "gather": (lambda **how: dist.gather(x, mine, group_dst=0, **how), [[3, 2]]),
        "scatter": (
            lambda **how: dist.scatter(x, mine, **root, **how),
            [[3, 2]] * (size if mine else 0),
        ),
        "reduce_scatter": (lambda **how: dist.reduce_scatter(x, parts, **how), [[3, 2]] * size),
        "reduce_scatter_tensor": (
            lambda **how: reduce_scatter_single(x, whole, **how),
            [[3 * size, 2]],
        ),
        "all_to_all": (lambda **how: dist.all_to_all(parts, parts, **how), [[3, 2]] * size),
        "all_to_all_single": (
            lambda **how: dist.all_to_all_single(whole, whole.clone(), **how),
            [[3 * size, 2]],
        ),
        "barrier": (lambda **how: dist.barrier(**how), []),
        "all_reduce of sparse": (lambda **how: dist.all_reduce(sparse, **how), [[3]]),
    }


def events(
    profile: torch.profiler.profile, name: str
) -> list[torch.autograd.profiler.FunctionEvent]:
    return [event for event in profile.events() if event.name == f"symm_cp:{name}"]


@pytest.mark.ranks(3)
def test_events(group: dist.ProcessGroup) -> None:
    ours, rank = shared(group), group.rank()
    for later in (False, True):
        for name, (call, shapes) in calls(group).items():
            with torch.profiler.profile(record_shapes=True) as profile:
                for _ in range(2):
                    work = call(group=ours, async_op=later)
                    if later:
                        assert work is not None
                        work.wait()
            found = events(profile, name.split(" of ")[0])
            assert len(found) == 2, (name, later, [event.name for event in profile.events()])
            for event in found:
                assert event.is_async
                assert event.input_shapes == shapes, (name, event.input_shapes)
                assert event.cpu_time_total >= 0
    # Messages.
    with torch.profiler.profile(record_shapes=True) as profile:
        if rank == 0:
            dist.send(torch.ones(4), group=ours, group_dst=1)
            dist.isend(torch.ones(4), group=ours, group_dst=1).wait()
            dist.send(torch.ones(4), group=ours, group_dst=1)
        elif rank == 1:
            dist.recv(torch.ones(4), group=ours, group_src=0)
            dist.irecv(torch.ones(4), group=ours, group_src=0).wait()
            dist.recv(torch.ones(4), group=ours)
    counts = {0: {"send": 3}, 1: {"recv": 2, "recvAnySource": 1}}.get(rank, {})
    for name in ("send", "recv", "recvAnySource"):
        found = events(profile, name)
        assert len(found) == counts.get(name, 0), name
        assert all(event.input_shapes == [[4]] for event in found)
    # The event of a refused call ends, too.
    with torch.profiler.profile() as profile:
        try:
            dist.all_reduce(torch.ones(3 + rank), group=ours)
        except dist.DistBackendError:
            pass
        else:
            raise AssertionError
    assert len(events(profile, "all_reduce")) == 1


_DELAY = 0.2  # seconds by which rank 1 comes late


def in_background(group: dist.ProcessGroup) -> dict[str, Callable[[], Callable[[], object]]]:
    """Functions that start a transfer and return a function that waits for it, by event name."""
    ours, wait = shared(group), torch.ops._c10d_functional.wait_tensor
    small, large = torch.ones(64), torch.ones(300_000)
    whole = torch.ones(2 * small.numel())

    def all_reduce() -> Callable[[], object]:
        work = dist.all_reduce(large, group=ours, async_op=True)
        assert work is not None
        return work.wait

    def transfer(op: torch._ops.OpOverload, *args: object) -> Callable[[], Callable[[], object]]:
        def start() -> Callable[[], object]:
            result = op(*args)
            return lambda: wait(result)

        return start

    ops, name = torch.ops.symm_mem, group.group_name
    return {
        "all_reduce": all_reduce,
        "_low_contention_all_gather": transfer(ops._low_contention_all_gather, large, name),
        "_low_contention_reduce_scatter": transfer(
            ops._low_contention_reduce_scatter, large, "sum", name
        ),
        # A transfer this small is carried out by the thread that waits for it.
        "_low_contention_all_gather_out": transfer(
            ops._low_contention_all_gather_out, small, name, whole
        ),
    }


@pytest.mark.ranks(2)
def test_events_of_the_background(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """The event lasts until the transfer has been waited for, also as Perfetto reads it."""
    for name, start in in_background(group).items():
        start()()  # ranks find each other
        with torch.profiler.profile() as profile:
            if group.rank() == 0:
                wait = start()
                dist.barrier(group)
            else:
                dist.barrier(group)
                time.sleep(_DELAY)
                wait = start()
            wait()
        (event,) = events(profile, name)
        assert event.is_async, name
        if group.rank() == 0:
            assert event.time_range.elapsed_us() >= _DELAY * 1e6, (name, event.time_range)
            trace = tmp_path / f"{name}.json"
            profile.export_chrome_trace(str(trace))
            shown = json.loads(trace.read_text())["traceEvents"]
            (duration,) = [each["dur"] for each in shown if each["name"] == f"symm_cp:{name}"]
            assert duration >= _DELAY * 1e6, name


@pytest.mark.ranks(2)
def test_an_event_that_ends_after_the_profile(group: dist.ProcessGroup) -> None:
    """A call that outlives its profiler harms neither that profile nor the next one."""
    for name, start in in_background(group).items():
        start()()  # ranks find each other
        for _ in range(5):
            if group.rank() == 1:
                dist.barrier(group)  # so that rank 0's transfer ends when its profile has ended
            with torch.profiler.profile() as profile:
                wait = start()
            assert len(events(profile, name)) <= 1
            with torch.profiler.profile() as following:
                sums = [torch.ones(3) + 1 for _ in range(500)]  # may lie where the event did
                if group.rank() == 0:
                    dist.barrier(group)
                wait()
                sums.append(torch.ones(3) + 1)
            added = [event for event in following.events() if event.name == "aten::add"]
            assert len(added) == len(sums)
            assert all(event.time_range.elapsed_us() < 1e6 * _DELAY for event in added)
            assert not events(following, name)


@pytest.mark.ranks(2)
def test_ops_are_events(group: dist.ProcessGroup) -> None:
    """Events have the ops' names in `torch.ops.symm_mem`, also if public functions call the ops."""

    def named(run: Callable[[], object]) -> set[str]:
        with torch.profiler.profile() as profile:
            run()
        beginning = "symm_mem::"
        names = {event.name for event in profile.events() if event.name.startswith(beginning)}
        return {name.removeprefix(beginning) for name in names}

    for name, call in ops_with_gradients(group, torch.float32).items():
        inputs = leaves(call.inputs)
        outputs: list[torch.Tensor] = []
        assert name in named(lambda: outputs.extend(call.run(*inputs)))  # noqa: B023
        assert named(lambda: sum(out.sum() for out in outputs).backward()), name  # noqa: B023
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    assert named(lambda: symm_cp.all_gather_matmul(x, w, group=group)) == {
        "fused_all_gather_matmul"
    }
    assert named(lambda: symm_cp.matmul_all_reduce(x, w, group=group)) == {
        "fused_matmul_all_reduce"
    }
