"""`symm-cp plan`: predicts a model's step times on machines that you need not have."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from symm_cp.commands.plan import predict
from symm_cp.commands.plan.models import MODELS, Model
from symm_cp.commands.plan.predict import (
    ALL,
    ParallelLayout,
    Prediction,
    fits,
    layouts,
    memory_of,
)
from symm_cp.parsing import STDOUT, add_json, add_plot, plot_file, write_json
from symm_cp.ranks import counts, positive
from symm_cp.schedule.machine import MACHINES, Machine, machine
from symm_cp.schedule.trace import load_pyplot, plain_numbers, save_figure

_MAX_DOUBLINGS = 10  # of the number of hosts, in the search for a layout that fits
#: Which layers compute their activations again.
CHECKPOINTING = ("auto", "none", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp plan`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="llama3-70b")
    parser.add_argument(
        "--machine", default="h100", help=f"{', '.join(MACHINES)}, or a TOML file (default: h100)"
    )
    parser.add_argument(
        "--hosts",
        type=counts,
        help="a number, a list (1,2,4) or doubling numbers (1..128) (default: the least of 1, 2, "
        "4, ... on which a layout fits into memory)",
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
        "--checkpointing", choices=CHECKPOINTING, default="auto",
        help="keep each layer's input alone, and compute the layer again before its backward pass: "
        "for all layers, for none, or, for each layout, only if it does not fit otherwise "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=positive, default=5, help="layouts to show for each number of hosts"
    )
    add_json(parser, "all predictions")
    add_plot(parser)


def best(
    model: Model,
    host: Machine,
    hosts: int,
    gpus: int,
    batch: int,
    sequence: int,
    fsdp: int = 1,
    checkpointing: str = "none",
) -> list[Prediction]:
    """Returns predictions for all layouts: first the layouts that fit into memory, fastest first.

    `checkpointing` is one of `CHECKPOINTING`.
    """
    predictions = []
    for layout in layouts(model, host, hosts, gpus, sequence, fsdp):
        memory = memory_of(model, layout, batch, sequence)
        again = checkpointing == "all" or (checkpointing == "auto" and not fits(memory, host))
        predictions.append(
            predict.predict(model, host, layout, batch, sequence, checkpointing=again)
        )
    return sorted(predictions, key=lambda p: (not p.fits, -p.tokens))


_HEAD = (
    f"{'hosts':>5} {'tp':>3} {'cp':>4} {'dp':>5} {'fsdp':>5} {'chunks':>6}  {'step':>10} "
    f"{'compute':>10} {'comm.':>10} {'hidden':>6}  {'memory':>8} {'again':>5}  tokens/s/GPU"
)


def _row(hosts: int, gpus: int, prediction: Prediction) -> str:
    layout = prediction.layout
    chunks = layout.cp * 2 if layout.cp > 1 else 1
    rate = prediction.tokens / (hosts * gpus)
    return (
        f"{hosts:>5} {layout.tp:>3} {layout.cp:>4} {layout.dp:>5} {layout.fsdp:>5} {chunks:>6}  "
        f"{prediction.step * 1e3:>7.1f} ms {prediction.compute * 1e3:>7.1f} ms "
        f"{prediction.communication * 1e3:>7.1f} ms {prediction.hidden:>6.0%}  "
        f"{prediction.memory / 1e9:>5.1f} GB {'yes' if prediction.checkpointing else 'no':>5}  "
        f"{rate:>7.0f}"
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
    plain_numbers(axes.xaxis, at=sorted({hosts * gpus for hosts, gpus, _ in rows}))
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
    again = ", with activation checkpointing" if fastest.checkpointing else ""
    return (
        f"choose {_hosts(hosts)}, {fastest.layout}{again}: the most tokens/s/GPU that fit into "
        f"memory ({fastest.tokens / (hosts * gpus):.0f})"
    )


def _would_fit(args: argparse.Namespace, model: Model, host: Machine, gpus: int) -> str:
    """Returns the line that says what to change if no layout fits."""
    batch, sequence, again = args.batch, args.sequence, args.checkpointing != "none"

    def least(machine: Machine, hosts: int, gpus: int) -> tuple[float, ParallelLayout | None]:
        sharded = layouts(model, machine, hosts, gpus, sequence, ALL)
        needed = [
            (memory_of(model, layout, batch, sequence, checkpointing=again), layout)
            for layout in sharded
        ]
        return min(needed, key=lambda pair: pair[0], default=(math.inf, None))

    asked = args.hosts or [1]
    max_hosts = max(asked)
    for hosts in [*asked, *(max_hosts << n for n in range(1, _MAX_DOUBLINGS))]:
        needed, layout = least(host, hosts, gpus)
        if fits(needed, host):
            return f"nothing fits; this would: --fsdp on {_hosts(hosts)} ({layout})"
    for name, other in MACHINES.items():
        hosts = max(1, max_hosts * gpus // other.gpus)
        if fits(least(other, hosts, other.gpus)[0], other):
            return f"nothing fits; this would: --fsdp --machine {name} --hosts {hosts}"
    recompute = "" if again else ", --checkpointing auto"
    return (
        f"nothing fits, not even with --fsdp on {max_hosts << _MAX_DOUBLINGS - 1} hosts: use a "
        f"shorter --sequence (now {sequence}), a smaller --batch (now {batch}){recompute} or a "
        "smaller model"
    )


_Rows: TypeAlias = list[tuple[int, int, Prediction]]


def _predictions(args: argparse.Namespace, model: Model, host: Machine, gpus: int) -> _Rows:
    """Returns predictions for the requested numbers of hosts, or for the least that fits."""
    rows: _Rows = []
    for hosts in args.hosts or [1 << n for n in range(_MAX_DOUBLINGS)]:
        predictions = best(
            model, host, hosts, gpus, args.batch, args.sequence, args.fsdp, args.checkpointing
        )
        of_hosts = [(hosts, gpus, prediction) for prediction in predictions]
        if args.hosts:
            rows += of_hosts
        elif any(prediction.fits for prediction in predictions):
            return of_hosts
        else:
            rows = rows or of_hosts  # of the least number, if nothing ever fits
    return rows


def _print(args: argparse.Namespace, model: Model, host: Machine, rows: _Rows) -> None:
    gpus = rows[0][1]
    print(
        f"{model.name} ({model.parameters / 1e9:.1f} G parameters), hosts of {gpus} x {host.name}, "
        f"{args.batch} x {args.sequence} tokens a replica\n"
        "predicted from published peaks and simulated schedules, not measured; again: activation "
        "checkpointing\n"
    )
    print(_HEAD)
    for hosts in dict.fromkeys(hosts for hosts, _, _ in rows):
        predictions = [prediction for h, _, prediction in rows if h == hosts]
        fitting = [prediction for prediction in predictions if prediction.fits] or predictions
        for prediction in fitting[: args.show]:
            print(_row(hosts, gpus, prediction))


def _fail(reason: str, code: int) -> int:
    sys.stdout.flush()  # the rows come first
    print(f"symm-cp plan: {reason}", file=sys.stderr)
    return code


def main(args: argparse.Namespace) -> int:
    """Prints the best layouts for each number of hosts; returns 1 if no layout is possible or fits.

    Returns 2 for invalid arguments.
    """
    model = MODELS[args.model]
    try:
        host = machine(args.machine)
        if args.plot:
            load_pyplot()
    except (ValueError, RuntimeError) as error:
        return _fail(str(error), 2)
    gpus = args.gpus or host.gpus
    rows = _predictions(args, model, host, gpus)
    if not rows:
        fsdp = " Does --fsdp divide the ranks?" if args.fsdp > 1 else ""
        return _fail(
            f"no layout is possible: is --sequence a multiple of twice the ranks?{fsdp}", 1
        )
    if args.json != STDOUT:
        _print(args, model, host, rows)
    if args.json is not None:
        report = [
            {"hosts": hosts, "gpus": gpus, **asdict(prediction), "hidden": prediction.hidden}
            for hosts, gpus, prediction in rows
        ]
        write_json(args.json, report)
    if args.plot:
        _plot(plot_file(args.plot, "plan"), f"{model.name}, {host.name}", rows)
    choice = _choice(rows)
    if choice is None:
        return _fail(_would_fit(args, model, host, gpus), 1)
    if args.json != STDOUT:
        print("\n" + choice)
    return 0
