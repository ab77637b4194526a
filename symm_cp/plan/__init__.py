"""`symm-cp plan`: predicted step times of a model on machines that are not at hand."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from symm_cp.plan.models import MODELS, Model
from symm_cp.plan.predict import (
    ALL,
    ParallelLayout,
    Prediction,
    fits,
    layouts,
    memory_of,
    predict,
)
from symm_cp.ranks import counts, positive
from symm_cp.schedule.machine import MACHINES, Machine, machine
from symm_cp.schedule.trace import load_pyplot, save_figure
from symm_cp.trusted import write_output

_MAX_DOUBLINGS = 10  # of the hosts, in the search for a layout that fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp plan`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="llama3-70b")
    parser.add_argument(
        "--machine", default="h100", help=f"{', '.join(MACHINES)}, or a TOML file (default: h100)"
    )
    parser.add_argument(
        "--hosts",
        type=counts,
        default=[1],
        help="a number, a list (1,2,4) or doubling numbers (1..128)",
    )
    parser.add_argument(
        "--gpus", type=positive, help="GPUs of a host (default: those of the machine)"
    )
    parser.add_argument("--sequence", type=positive, default=8192, help="tokens of a sequence")
    parser.add_argument(
        "--batch", type=positive, default=1, help="sequences of a replica in a step"
    )
    parser.add_argument(
        "--fsdp", nargs="?", type=positive, const=ALL, default=1, metavar="DEGREE",
        help="shard weights, gradients and optimizer states over DEGREE of the dp x cp ranks that "
        "have the same weights; without a number, over all of them",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=positive, default=5, help="layouts to show for each number of hosts"
    )
    parser.add_argument("--json", type=Path, help="write all predictions to this file")
    parser.add_argument(
        "--plot", type=Path, help="write a plot (PNG) to this file; needs matplotlib"
    )


def best(
    model: Model,
    host: Machine,
    hosts: int,
    gpus: int,
    batch: int,
    sequence: int,
    fsdp: int = 1,
) -> list[Prediction]:
    """Returns predictions for all layouts: first those that fit into memory, the fastest first."""
    predictions = [
        predict(model, host, layout, batch, sequence)
        for layout in layouts(model, host, hosts, gpus, sequence, fsdp)
    ]
    return sorted(predictions, key=lambda p: (not p.fits, -p.tokens))


_HEAD = (
    f"{'hosts':>5} {'tp':>3} {'cp':>4} {'dp':>5} {'fsdp':>5} {'chunks':>6}  {'step':>10} "
    f"{'compute':>10} {'comm.':>10} {'hidden':>6}  {'memory':>8}  tokens/s/GPU"
)


def _row(hosts: int, gpus: int, prediction: Prediction) -> str:
    layout = prediction.layout
    chunks = layout.cp * 2 if layout.cp > 1 else 1
    rate = prediction.tokens / (hosts * gpus)
    return (
        f"{hosts:>5} {layout.tp:>3} {layout.cp:>4} {layout.dp:>5} {layout.fsdp:>5} {chunks:>6}  "
        f"{prediction.step * 1e3:>7.1f} ms {prediction.compute * 1e3:>7.1f} ms "
        f"{prediction.communication * 1e3:>7.1f} ms {prediction.hidden:>6.0%}  "
        f"{prediction.memory / 1e9:>5.1f} GB  {rate:>7.0f}"
        f"{'' if prediction.fits else '  (does not fit)'}"
    )


def _plot(path: Path, title: str, rows: list[tuple[int, int, Prediction]]) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for degree in sorted({row.layout.tp * row.layout.cp for _, _, row in rows}):
        points: dict[int, float] = {}
        for hosts, gpus, row in rows:
            if row.layout.tp * row.layout.cp == degree and row.fits:
                rate = row.tokens / (hosts * gpus)
                points[hosts * gpus] = max(points.get(hosts * gpus, 0.0), rate)
        if points:
            axes.plot(list(points), list(points.values()), marker="o", label=f"tp x cp = {degree}")
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens/s/GPU (predicted)", title=title)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)


def _hosts(hosts: int) -> str:
    return f"{hosts} host{'s' if hosts > 1 else ''}"


def _choice(rows: list[tuple[int, int, Prediction]]) -> str | None:
    """Returns the line that recommends a layout, if one fits."""
    fitting = [row for row in rows if row[2].fits]
    if not fitting:
        return None
    hosts, gpus, fastest = max(fitting, key=lambda row: row[2].tokens / (row[0] * row[1]))
    return (
        f"choose {_hosts(hosts)}, {fastest.layout}: the most tokens/s/GPU that fit into memory "
        f"({fastest.tokens / (hosts * gpus):.0f})"
    )


def _would_fit(args: argparse.Namespace, model: Model, host: Machine, gpus: int) -> str:
    """Returns the line that says what to change if no layout fits."""
    batch, sequence = args.batch, args.sequence

    def least(machine: Machine, hosts: int, gpus: int) -> tuple[float, ParallelLayout | None]:
        sharded = layouts(model, machine, hosts, gpus, sequence, ALL)
        needed = [(memory_of(model, layout, batch, sequence), layout) for layout in sharded]
        return min(needed, key=lambda pair: pair[0], default=(math.inf, None))

    max_hosts = max(args.hosts)
    for hosts in [*args.hosts, *(max_hosts << n for n in range(1, _MAX_DOUBLINGS))]:
        needed, layout = least(host, hosts, gpus)
        if fits(needed, host):
            return f"nothing fits; this would: --fsdp on {_hosts(hosts)} ({layout})"
    for name, other in MACHINES.items():
        hosts = max(1, max_hosts * gpus // other.gpus)
        if fits(least(other, hosts, other.gpus)[0], other):
            return f"nothing fits; this would: --fsdp --machine {name} --hosts {hosts}"
    return (
        f"nothing fits, not even with --fsdp on {max_hosts << _MAX_DOUBLINGS - 1} hosts: use a "
        f"shorter --sequence (now {sequence}), a smaller --batch (now {batch}) or a smaller model"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the best layouts for each number of hosts; returns 1 if none is possible."""
    model = MODELS[args.model]
    try:
        host = machine(args.machine)
        if args.plot:
            load_pyplot()
    except (ValueError, RuntimeError) as error:
        print(f"symm-cp plan: {error}")
        return 2
    gpus = args.gpus or host.gpus
    print(
        f"{model.name} ({model.parameters / 1e9:.1f} G parameters), hosts of {gpus} x {host.name}, "
        f"{args.batch} x {args.sequence} tokens a replica\n"
        "predicted from published peaks and simulated schedules, not measured\n"
    )
    print(_HEAD)
    rows = []
    for hosts in args.hosts:
        predictions = best(model, host, hosts, gpus, args.batch, args.sequence, args.fsdp)
        rows += [(hosts, gpus, prediction) for prediction in predictions]
        fitting = [prediction for prediction in predictions if prediction.fits] or predictions
        for prediction in fitting[: args.show]:
            print(_row(hosts, gpus, prediction))
    if not rows:
        fsdp = " Does --fsdp divide the ranks?" if args.fsdp > 1 else ""
        print(f"no layout is possible: is --sequence a multiple of twice the ranks?{fsdp}")
        return 1
    if args.json:
        report = [
            {"hosts": hosts, "gpus": gpus, **asdict(prediction), "hidden": prediction.hidden}
            for hosts, gpus, prediction in rows
        ]
        write_output(args.json, json.dumps(report, indent=1) + "\n")
    if args.plot:
        _plot(args.plot, f"{model.name}, {host.name}", rows)
    print("\n" + (_choice(rows) or _would_fit(args, model, host, gpus)))
    return 0
