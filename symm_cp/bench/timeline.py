"""`symm-cp trace`: what each lane of each rank did, next to what the simulator says."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from symm_cp import launch, native, tuning
from symm_cp.bench import calibrate, measure, shapes
from symm_cp.bench.command import DTYPES
from symm_cp.bench.jobs import Job, Setting
from symm_cp.bench.measure import FUSED, Case, duration
from symm_cp.runtime.recorder import trace
from symm_cp.schedule import trace as drawing
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.simulate import Timeline
from symm_cp.schedule.steps import Compute, Copy
from symm_cp.schedule.work import Work

HELP = "record what each lane of each rank does, next to a simulation of the same schedule"

#: Each op with the kind of shape that it takes.
OPS = {
    "all-gather-matmul": ("matmul", "512x1024x512"),
    "matmul-reduce-scatter": ("matmul", "512x1024x512"),
    "attention": ("attention", "1024x8x64"),
    "all-gather": ("collectives", "16MiB"),
    "reduce-scatter": ("collectives", "16MiB"),
}
_WARM_UP_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp trace`."""
    add = parser.add_argument
    add("op", choices=sorted(OPS))
    add("--shape", help="of a rank, as --shapes of symm-cp bench takes it")
    add("--ranks", type=launch.positive, default=2, help="(%(default)s)")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="(%(default)s)")
    add("--calls", type=launch.positive, default=3, help="to record (%(default)s)")
    add("--way", choices=tuning.WAYS, default="shards", help="for matmuls (%(default)s)")
    add(
        "--machine",
        help="for the simulation: a TOML file (default: what calibrate has written, "
        "else what is measured first, briefly)",
    )
    add("--out", type=Path, default=Path("trace.json"), help="for Perfetto (%(default)s)")
    add("--plot", type=Path, metavar="FILE", help="a Gantt chart (PNG); needs matplotlib")
    launch.add_rendezvous(parser)


def _job(given: argparse.Namespace) -> shapes.Wanted:
    kind, shape = OPS[given.op]
    chosen = given.shape or shape
    jobs = list(shapes.wanted(kind, chosen, given.ranks, 0))
    return next(job for job in jobs if job.kind == given.op)


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp trace`; returns 0 when the files were written."""
    if launch.is_rank():
        launch.leave(launch.as_rank(lambda group: _rank(given, group), given.rendezvous))
    try:
        if (given.shape or "").count(","):
            raise ValueError(f"--shape {given.shape}: give one")
        _job(given)
        calibrate.find(given.machine, given.ranks)
        native.load()
        if given.plot is not None:
            drawing.load_pyplot()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"symm-cp trace: {error}", file=sys.stderr)
        return 2
    return launch.run_ranks("trace", given.ranks, given.arguments)


def with_kernel_alone(work: Work, seconds: float) -> Work:
    """Returns the work with the time of its kernel as it was measured."""
    return replace(work, kernel=lambda machine: seconds)


def predicted(job: Job, machine: Machine, group: dist.ProcessGroup, calls: int) -> Timeline:
    """Simulates a job with its kernel timed alone, on all ranks at once. Collective."""
    work = job.work
    if job.kernel is not None:
        case = Case("kernel", {"kernel": job.kernel}, inner=4)
        work = with_kernel_alone(work, measure.measure(case, group, 1.0).median("kernel"))
    return work.predict(machine, group.size(), calls)


def _rank(given: argparse.Namespace, group: dist.ProcessGroup) -> int:
    torch.manual_seed(group.rank())
    job = _job(given).make(Setting(group, DTYPES[given.dtype]))
    assert isinstance(job, Job)
    run = job.case.variants[FUSED]
    with tuning.listening() as chosen:
        run()
    with tuning.forced(given.way):
        return _record(given, job, run, group, chosen)


def _record(
    given: argparse.Namespace,
    job: Job,
    run: Callable[[], object],
    group: dist.ProcessGroup,
    chosen: Mapping[str, tuning.Choice],
) -> int:
    machine = calibrate.find_or_measure(given.machine, group)
    # How often, all ranks must agree on.
    alone = measure.measure(Case("op", {FUSED: run}), group, _WARM_UP_SECONDS)
    measure.quick_barrier(group)()
    with trace() as recording:
        for _ in range(given.calls):
            run()
    measured = recording.all_ranks(group)
    simulated = predicted(job, machine, group, given.calls)
    if group.rank() == 0:
        _show(given, job.case.name, measured, simulated, alone.median(FUSED))
        for choice in chosen.values():
            print(f"the op by itself goes: {choice}")
    return 0


def per_call(timeline: Timeline) -> float:
    """The median over calls of the time from the first beginning to the last end in a call."""
    spans: dict[int, tuple[float, float]] = {}
    for event in timeline.events:
        start, end = spans.get(event.call, (event.start, event.end))
        spans[event.call] = min(start, event.start), max(end, event.end)
    return statistics.median(end - start for start, end in spans.values())


def _show(
    given: argparse.Namespace, name: str, measured: Timeline, simulated: Timeline, untraced: float
) -> None:
    timelines = {"measured": measured, "simulated": simulated}
    print(f"{name}, {given.ranks} ranks; a call, of {given.calls}; untraced {duration(untraced)}")
    print(f"{'':<12}{'in all':>10}{'computing':>11}{'copying':>10}{'copying hidden':>16}")
    for kind, timeline in timelines.items():
        hidden = f"{timeline.hidden():.0%}" if timeline.busy(0, Copy) else "none to hide"
        computing, copying = (timeline.busy(0, k) / given.calls for k in (Compute, Copy))
        print(
            f"{kind:<12}{duration(per_call(timeline)):>10}{duration(computing):>11}"
            f"{duration(copying):>10}{hidden:>16}"
        )
    print(f"simulated / untraced: {per_call(simulated) / untraced - 1:+.0%}")
    drawing.save(given.out, timelines)
    print(f"{given.out}: open it at ui.perfetto.dev or chrome://tracing")
    if given.plot is not None:
        drawing.draw(given.plot, timelines, name)
        print(given.plot)
