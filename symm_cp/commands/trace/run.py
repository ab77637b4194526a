"""Records as the ranks of `symm-cp trace`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.commands.harness import measure
from symm_cp.commands.harness.measure import Case, duration
from symm_cp.commands.harness.start import run_command
from symm_cp.commands.trace import OPS
from symm_cp.context_parallel import all_gather_attention
from symm_cp.group.hosts import QUESTION
from symm_cp.parsing import plot_file
from symm_cp.ranks import quick_barrier
from symm_cp.runtime.recorder import trace
from symm_cp.schedule import trace as drawing
from symm_cp.schedule.simulate import Timeline
from symm_cp.schedule.steps import Compute, Copy

_WARM_UP_SECONDS = 0.5


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp trace`; returns 0 if the files were written."""
    return run_command(args, check, run_rank)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` or `RuntimeError` for invalid arguments, before any rank starts."""
    names, _ = OPS[args.op]
    if args.shapes and [len(sizes) for sizes in args.shapes] != [names.count("x") + 1]:
        raise ValueError(f"--shapes of {args.op} must be a single shape {names}")
    if args.plot is not None:
        drawing.load_pyplot()


def _op(args: argparse.Namespace, group: dist.ProcessGroup) -> Callable[[], object]:
    """Returns the op with its input; all ranks have the same sizes."""
    sizes, ops, name = _sizes(args), torch.ops.symm_mem, str(group.group_name)
    wait = torch.ops._c10d_functional.wait_tensor.default

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(getattr(torch, args.dtype))

    if args.op == "attention":
        tokens, heads, features = sizes
        q, k, v = (new(1, heads, tokens, features) for _ in range(3))
        return lambda: all_gather_attention(q, k, v, group=group)
    if args.op == "all-gather":
        x = new(*sizes)
        return lambda: wait(ops._low_contention_all_gather(x, name))
    if args.op == "reduce-scatter":
        x = new(group.size() * sizes[0])
        return lambda: wait(ops._low_contention_reduce_scatter(x, "sum", name))
    rows, inner, columns = sizes
    weight = new(inner, columns)
    if args.op == "all-gather-matmul":
        x = new(rows, inner)
        return lambda: ops.fused_all_gather_matmul(x, [weight], 0, name, return_A=False)
    x = new(group.size() * rows, inner)
    return lambda: ops.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)


def _sizes(args: argparse.Namespace) -> tuple[int, ...]:
    return args.shapes[0] if args.shapes else OPS[args.op][1]


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Records and prints as one of the ranks."""
    torch.manual_seed(group.rank())
    run = _op(args, group)
    with tuning.listening() as choices:
        run()
    with tuning.forced(args.algorithm):
        # Uses `measure`, because all ranks must agree on the number of repetitions.
        untraced = measure.measure(Case("op", {"op": run}), group, _WARM_UP_SECONDS)
        quick_barrier(group)()
        with trace() as recording:
            for _ in range(args.calls):
                run()
    timeline = without_questions(recording.all_ranks(group))
    if group.rank() == 0:
        _show(args, timeline, untraced.median("op"))
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


def _show(args: argparse.Namespace, timeline: Timeline, untraced: float) -> None:
    name = f"{args.op}, {'x'.join(map(str, _sizes(args)))}, {args.dtype}"
    print(f"{name}, {args.ranks} ranks; one of {args.calls} calls; untraced {duration(untraced)}")
    computing, copying = (timeline.busy(0, kind) / args.calls for kind in (Compute, Copy))
    text = f"total {duration(per_call(timeline))}, computing {duration(computing)}"
    text += f", copying {duration(copying)}"
    if can_hide(timeline):
        print(f"{text}, of which hidden {timeline.hidden():.0%}")
    else:
        print(f"{text}: peers' shards are read where they lie, so no copy runs beside a kernel")
    drawing.save(args.out, {"measured": timeline})
    print(f"{args.out}: open it in ui.perfetto.dev or chrome://tracing")
    if args.plot is not None:
        chart = plot_file(args.plot, "trace")
        drawing.draw(chart, {"measured": timeline}, name)
        print(chart)
