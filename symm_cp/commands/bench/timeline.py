"""`symm-cp trace`: a timeline of each lane of each rank, measured and simulated."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.commands.bench import calibrate, shapes
from symm_cp.commands.bench.command import DTYPES
from symm_cp.commands.bench.jobs import Job, Setting
from symm_cp.commands.bench.parsers import OPS
from symm_cp.commands.harness import measure
from symm_cp.commands.harness.measure import FUSED, Case, duration
from symm_cp.commands.harness.start import run_command
from symm_cp.group.hosts import QUESTION
from symm_cp.parsing import plot_file
from symm_cp.ranks import quick_barrier
from symm_cp.runtime.recorder import trace
from symm_cp.schedule import trace as drawing
from symm_cp.schedule.machine import Machine
from symm_cp.schedule.simulate import Timeline
from symm_cp.schedule.steps import Compute, Copy
from symm_cp.schedule.work import Work

_WARM_UP_SECONDS = 0.5


def _job(args: argparse.Namespace) -> shapes.Wanted:
    kind, default = OPS[args.op]
    jobs = list(shapes.wanted(kind, args.shapes or default, args.ranks, 0))
    return next(job for job in jobs if job.kind == args.op)


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp trace`; returns 0 if the files were written."""
    return run_command(args, check, run_rank)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` or `RuntimeError` for invalid arguments, before any rank starts."""
    if (args.shapes or "").count(","):
        raise ValueError(f"--shapes {args.shapes}: must be a single shape")
    _job(args)
    calibrate.find(args.machine, args.ranks)
    if args.plot is not None:
        drawing.load_pyplot()


def with_measured_kernel(work: Work, seconds: float) -> Work:
    """Returns the work with a measured kernel time."""
    return replace(work, kernel=lambda machine: seconds)


def predicted(job: Job, machine: Machine, group: dist.ProcessGroup, calls: int) -> Timeline:
    """Simulates a job; times its kernel alone, on all ranks at once. Collective."""
    work = job.work
    assert work is not None
    if job.kernel is not None:
        case = Case("kernel", {"kernel": job.kernel}, inner=4)
        work = with_measured_kernel(work, measure.measure(case, group, 1.0).median("kernel"))
    return work.predict(machine, group.size(), calls)


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Records, simulates and prints as one of the ranks."""
    torch.manual_seed(group.rank())
    job = _job(args).make(Setting(group, DTYPES[args.dtype]))
    run = job.case.variants[FUSED]
    with tuning.listening() as choices:
        run()
    with tuning.forced(args.way):
        return _record(args, job, run, group, choices)


def _record(
    args: argparse.Namespace,
    job: Job,
    run: Callable[[], object],
    group: dist.ProcessGroup,
    choices: Mapping[str, tuning.Choice],
) -> int:
    machine = calibrate.find_or_measure(args.machine, group)
    # Uses `measure`, because all ranks must agree on the number of repetitions.
    untraced = measure.measure(Case("op", {FUSED: run}), group, _WARM_UP_SECONDS)
    quick_barrier(group)()
    with trace() as recording:
        for _ in range(args.calls):
            run()
    measured = without_questions(recording.all_ranks(group))
    simulated = predicted(job, machine, group, args.calls)
    if group.rank() == 0:
        _show(args, job.case.name, measured, simulated, untraced.median(FUSED))
        for choice in choices.values():
            print(f"the op chooses by itself: {choice}")
    return 0


def without_questions(timeline: Timeline) -> Timeline:
    """Leaves out the calls in which ranks exchange the places of their inputs."""
    question = QUESTION.decode()
    return Timeline(tuple(e for e in timeline.events if not e.op.startswith(question)))


def per_call(timeline: Timeline) -> float:
    """Returns the median over calls of the time from a call's first start to its last end."""
    spans: dict[int, tuple[float, float]] = {}
    for event in timeline.events:
        start, end = spans.get(event.call, (event.start, event.end))
        spans[event.call] = min(start, event.start), max(end, event.end)
    return statistics.median(end - start for start, end in spans.values())


def can_hide(timeline: Timeline) -> bool:
    """Tells whether a lane only copies while another one computes; on CPU no lane does."""
    computes, copies = (
        {(event.rank, event.lane) for event in timeline.events if isinstance(event.step, kind)}
        for kind in (Compute, Copy)
    )
    return bool(computes) and bool(copies - computes)


def _show(
    args: argparse.Namespace, name: str, measured: Timeline, simulated: Timeline, untraced: float
) -> None:
    timelines = {"measured": measured, "simulated": simulated}
    print(f"{name}, {args.ranks} ranks; one of {args.calls} calls; untraced {duration(untraced)}")
    hides = any(map(can_hide, timelines.values()))
    head = f"{'copying hidden':>16}" if hides else ""
    print(f"{'':<12}{'total':>10}{'computing':>11}{'copying':>10}{head}")
    for kind, timeline in timelines.items():
        hidden = f"{timeline.hidden():>16.0%}" if hides else ""
        computing, copying = (timeline.busy(0, k) / args.calls for k in (Compute, Copy))
        print(
            f"{kind:<12}{duration(per_call(timeline)):>10}{duration(computing):>11}"
            f"{duration(copying):>10}{hidden}"
        )
    if not hides:
        print("nothing is copied beside a kernel here: peers' shards are read where they lie")
    print(f"simulated / untraced: {per_call(simulated) / untraced - 1:+.0%}")
    drawing.save(args.out, timelines)
    print(f"{args.out}: open it in ui.perfetto.dev or chrome://tracing")
    if args.plot is not None:
        chart = plot_file(args.plot, "trace")
        drawing.draw(chart, timelines, name)
        print(chart)
