"""Recordings of what ranks did, against the schedules that they carried out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.schedule import patterns
from symm_cp.schedule.steps import Compute, Schedule, Signal, Step, Wait

OPS = torch.ops.symm_mem
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def told(step: Step) -> tuple[object, ...]:
    """The parts of a step that a recording keeps."""
    if isinstance(step, Signal):
        return ("signal", step.to, step.flag)
    if isinstance(step, Wait):
        return ("wait", step.source, step.flag, step.lag)
    if isinstance(step, Compute):
        return ("compute", step.kernel, step.index)
    return ("copy",)


@pytest.mark.parametrize("world_size", [2, 3, 4])  # one rank exchanges nothing
@pytest.mark.ranks
def test_native_products_have_the_steps_of_their_collectives(
    group: dist.ProcessGroup, world_size: int
) -> None:
    """A collective before or after a product runs the steps of its proven schedule."""
    W, rank, name = group.size(), group.rank(), group.group_name
    gather, scatter = (
        pattern.direct().schedule(rank, W)
        for pattern in (patterns.ALL_GATHER, patterns.REDUCE_SCATTER)
    )
    consume, produce = ("compute", "consume", rank), ("compute", "produce", rank)
    x, weight, one = torch.randn(4, 16), torch.randn(16, 8), torch.ones(())
    wide, float8 = torch.randn(4 * W, 16), torch.float8_e4m3fn
    rows, last = torch.ones(4, 1), ([None], [None], [torch.float32], [False])
    x8, wide8, weight8 = x.to(float8), wide.to(float8), weight.t().contiguous().to(float8).t()
    ops: list[tuple[Callable[[], object], list[Any]]] = [
        (lambda: OPS.fused_all_gather_matmul(x, [weight], 0, name), [gather, consume]),
        (lambda: OPS.fused_matmul_reduce_scatter(wide, weight, "sum", 0, name), [produce, scatter]),
        (
            lambda: OPS.fused_all_gather_scaled_matmul(x8, [weight8], one, [one], 0, name, *last),
            [gather, consume],
        ),
        (
            lambda: OPS.fused_all_gather_scaled_matmul(x8, [weight8], rows, [one], 0, name, *last),
            [gather, gather, consume],  # of the matrix, and of its rows' scales
        ),
        (
            lambda: OPS.fused_scaled_matmul_reduce_scatter(
                wide8, weight8, one, one, "sum", 0, 0, name, None, None, None, torch.float32
            ),
            [produce, scatter, consume],  # adds a bias and rounds
        ),
    ]
    for number, (run, parts) in enumerate(ops):
        run()
        with symm_cp.trace() as recording:
            run()
        found = [told(event.step) for event in recording.timeline.events]
        expected: list[tuple[object, ...]] = []
        for part in parts:
            exchange = isinstance(part, Schedule)
            expected += [told(step) for step in part.lanes["compute"]] if exchange else [part]
        assert found == expected, number


@WORLD_SIZES
@pytest.mark.ranks
def test_the_copy_engine_is_recorded(group: dist.ProcessGroup, world_size: int) -> None:
    x = torch.randn(1 << 18)
    # A call that needs larger memory is left to the engine as a whole.
    symm_cp.low_contention_all_gather(x, group=group).sum()
    with symm_cp.trace() as recording:
        pending = symm_cp.low_contention_all_gather(x, group=group)
        torch.ops._c10d_functional.wait_tensor(pending)
        again = symm_cp.low_contention_all_gather(x, group=group)
        torch.ops._c10d_functional.wait_tensor(again)
    events = recording.timeline.events
    # The caller publishes; the rest is done by the caller or the engine, whichever comes first.
    published = [event for event in events if isinstance(event.step, Signal)]
    assert all(event.lane == "compute" for event in published)
    assert len(published) == 2 * (group.size() - 1)
    assert {event.lane for event in events} <= {"compute", "copy"}
    steps = [told(event.step) for event in sorted(events, key=lambda e: (e.call, e.start))]
    schedule = patterns.BACKGROUND_ALL_GATHER.direct().schedule(group.rank(), group.size())
    assert steps == [told(step) for step in schedule.lanes["copy"]] * 2


@WORLD_SIZES
@pytest.mark.ranks
def test_a_file_of_all_ranks(group: dist.ProcessGroup, tmp_path: Path, world_size: int) -> None:
    folder = str(tmp_path)
    with symm_cp.trace() as recording, tuning.forced("shards"):
        symm_cp.all_gather_matmul(torch.ones(6, 4), torch.ones(4, 5), group=group)
    path = os.path.join(folder, "trace.json")
    recording.save(path, group)
    chart = os.path.join(folder, "chart.png")
    recording.draw(chart, group)
    dist.barrier(group)
    assert Path(chart).read_bytes().startswith(b"\x89PNG")
    rows = json.loads(Path(path).read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == [f"rank {rank}, measured" for rank in range(group.size())]
    # On one clock: nobody sees a signal before it was sent.
    timeline = recording.all_ranks(group)
    first, *lines = str(timeline).splitlines()
    assert first.startswith(f"{len(timeline.events)} steps on {group.size()} ranks in ")
    assert len(lines) == len(timeline.events)
    assert lines[0].endswith(f": {min(timeline.events, key=lambda event: event.start).step}")
    sent = {
        (event.call, event.rank, event.step.to): event.start
        for event in timeline.events
        if isinstance(event.step, Signal)
    }
    for event in timeline.events:
        if isinstance(event.step, Wait):
            assert sent[event.call, event.step.source, event.rank] <= event.end


@pytest.mark.ranks(2)
def test_recordings_do_not_mix(group: dist.ProcessGroup) -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with symm_cp.trace() as recording:
        with pytest.raises(RuntimeError, match="recording already"), symm_cp.trace():
            pass
        symm_cp.all_gather_matmul(a, b, group=group)
    assert any(isinstance(event.step, Compute) for event in recording.timeline.events)
    failed = None
    try:
        with symm_cp.trace() as failed:
            symm_cp.all_gather_matmul(a, b, group=group)
            raise KeyError("in the block")
    except KeyError:
        pass
    assert failed is not None
    assert len(failed.timeline.events) == len(recording.timeline.events)
    with symm_cp.trace() as empty:
        pass
    assert empty.timeline.events == ()
