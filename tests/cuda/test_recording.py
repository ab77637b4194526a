"""Recordings of lanes on a device, over the simulated driver."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.ops.common import device_kernels
from symm_cp.schedule import Compute, Copy, Signal, Wait
from symm_cp.schedule.simulate import Event
from tests.cuda.simulated import simulation


def on(events: tuple[Event, ...], lane: str) -> list[Event]:
    return [event for event in events if event.lane == lane]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.ranks
def test_both_lanes_are_recorded(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    x, weight = torch.randn(6, 4), torch.randn(4, 5)
    with simulation(), tuning.forced("shards"):
        expected = symm_cp.all_gather_matmul(x, weight, group=group)
        with symm_cp.trace() as recording:
            out = symm_cp.all_gather_matmul(x, weight, group=group)
    torch.testing.assert_close(out, expected)
    events = recording.timeline.events
    assert {event.op.split()[0] for event in events} == {"fused_all_gather_matmul"}
    compute, copy = on(events, "compute"), on(events, "copy")
    for lane in (compute, copy):
        for before, after in itertools.pairwise(lane):
            assert before.start <= before.end <= after.start
    kernels = [event for event in compute if isinstance(event.step, Compute)]
    assert [event.step.index for event in kernels] == [(rank + i) % W for i in range(W)]
    others = {(rank + i) % W for i in range(1, W)}
    assert {event.step.to for event in copy if isinstance(event.step, Signal)} >= others
    waited = [event for event in copy if isinstance(event.step, Wait)]
    assert {event.step.source for event in waited if event.step.flag == "ready"} == others
    pulls = [
        event
        for event in copy
        if isinstance(event.step, Copy) and event.step.src.rank not in (rank,)
    ]
    assert [event.step.src.rank for event in pulls] == [(rank + i) % W for i in range(1, W)]
    # Nothing is computed with before it was pulled.
    for pull, kernel in zip(pulls, kernels[1:], strict=True):
        assert pull.end <= kernel.start


@pytest.mark.ranks(3)
def test_the_lane_that_signals_is_recorded(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    x, weight = torch.randn(3 * W, 4), torch.randn(4, 5)
    with simulation(), tuning.forced("shards"), symm_cp.trace() as recording:
        symm_cp.matmul_reduce_scatter(x, weight, group=group)
    events = recording.timeline.events
    produced = [e for e in on(events, "compute") if isinstance(e.step, Compute)][:-1]
    assert not any(isinstance(e.step, Signal) and e.step.to != rank for e in on(events, "compute"))
    sent = [e for e in on(events, "signal") if isinstance(e.step, Signal)]
    assert [event.step.to for event in sent] == [(rank + i) % W for i in range(1, W)]
    for kernel, signal in zip(produced, sent, strict=False):
        assert kernel.end <= signal.end


@pytest.mark.ranks(2)
def test_what_is_in_the_background(group: dist.ProcessGroup) -> None:
    with simulation(), symm_cp.trace() as recording:
        gather = device_kernels["_low_contention_all_gather"]
        torch.ops._c10d_functional.wait_tensor(gather(torch.ones(8), group.group_name))
    events = recording.timeline.events
    assert {event.op.split()[0] for event in events} == {"_low_contention_all_gather"}
    assert any(isinstance(event.step, Copy) for event in on(events, "copy"))
