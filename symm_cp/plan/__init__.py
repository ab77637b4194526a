"""`symm-cp plan`: predicted step times of a model on hosts that one does not have at hand."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from symm_cp.launch import counts, positive
from symm_cp.plan.models import MODELS, Model
from symm_cp.plan.predict import ALL, Layout, Prediction, fits, layouts, memory_of, predict
from symm_cp.schedule.machine import MACHINES, Machine, machine
from symm_cp.schedule.trace import load_pyplot, save_figure
from symm_cp.trusted import write_output

_MOST_DOUBLINGS = 10  # of the hosts, when looking for what would fit


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
        help="a number, some (1,2,4), or doubling (1..128)",
    )
    parser.add_argument("--gpus", type=positive, help="GPUs of a host (default: the machine's)")
    parser.add_argument("--sequence", type=positive, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=positive, default=1, help="sequences of a replica's step")
    parser.add_argument(
        "--fsdp", nargs="?", type=positive, const=ALL, default=1, metavar="DEGREE",
        help="shard weights, gradients and optimizer states over so many of the ranks that tensor "
        "parallelism leaves the same weights (dp x cp); without a number over all of them",
    )  # fmt: skip
    parser.add_argument("--show", type=positive, default=5, help="layouts a number of hosts")
    parser.add_argument("--json", type=Path, help="write all predictions here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")


def best(
    model: Model,
    host: Machine,
    hosts: int,
    gpus: int,
    batch: int,
    sequence: int,
    fsdp: int = 1,
) -> list[Prediction]:
    """Returns predictions for all layouts: those that fit into memory first, the fastest first."""
    found = [
        predict(model, host, layout, batch, sequence)
        for layout in layouts(model, host, hosts, gpus, sequence, fsdp)
    ]
    return sorted(found, key=lambda p: (not p.fits, -p.tokens))


_HEAD = (
    f"{'hosts':>5} {'tp':>3} {'cp':>4} {'dp':>5} {'fsdp':>5} {'chunks':>6}  {'step':>10} "
    f"{'compute':>10} {'comm.':>10} {'hidden':>6}  {'memory':>8}  tokens/s/GPU"
)


def _row(hosts: int, gpus: int, found: Prediction) -> str:
    layout = found.layout
    chunks = layout.cp * 2 if layout.cp > 1 else 1
    rate = found.tokens / (hosts * gpus)
    return (
        f"{hosts:>5} {layout.tp:>3} {layout.cp:>4} {layout.dp:>5} {layout.fsdp:>5} {chunks:>6}  "
        f"{found.step * 1e3:>7.1f} ms {found.compute * 1e3:>7.1f} ms "
        f"{found.communication * 1e3:>7.1f} ms {found.hidden:>6.0%}  "
        f"{found.memory / 1e9:>5.1f} GB  {rate:>7.0f}{'' if found.fits else '  (does not fit)'}"
    )


def _plot(path: Path, title: str, rows: list[tuple[int, int, Prediction]]) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for degree in sorted({found.layout.tp * found.layout.cp for _, _, found in rows}):
        points: dict[int, float] = {}
        for hosts, gpus, found in rows:
            if found.layout.tp * found.layout.cp == degree and found.fits:
                rate = found.tokens / (hosts * gpus)
                points[hosts * gpus] = max(points.get(hosts * gpus, 0.0), rate)
        if points:
            axes.plot(list(points), list(points.values()), marker="o", label=f"tp x cp = {degree}")
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens/s/GPU (predicted)", title=title)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)


def _named(hosts: int) -> str:
    return f"{hosts} host{'s' if hosts > 1 else ''}"


def _choice(rows: list[tuple[int, int, Prediction]]) -> str | None:
    """The line that says which layout to take, if one fits."""
    fitting = [row for row in rows if row[2].fits]
    if not fitting:
        return None
    hosts, gpus, found = max(fitting, key=lambda row: row[2].tokens / (row[0] * row[1]))
    return (
        f"choose {_named(hosts)}, {found.layout}: of what fits the most tokens/s/GPU "
        f"({found.tokens / (hosts * gpus):.0f})"
    )


def _would_fit(given: argparse.Namespace, model: Model, host: Machine, gpus: int) -> str:
    """The line that says what to change, where no layout fits."""
    batch, sequence = given.batch, given.sequence

    def least(machine: Machine, hosts: int, gpus: int) -> tuple[float, Layout | None]:
        found = layouts(model, machine, hosts, gpus, sequence, ALL)
        needed = [(memory_of(model, layout, batch, sequence), layout) for layout in found]
        return min(needed, key=lambda pair: pair[0], default=(math.inf, None))

    most = max(given.hosts)
    for hosts in [*given.hosts, *(most << n for n in range(1, _MOST_DOUBLINGS))]:
        needed, layout = least(host, hosts, gpus)
        if fits(needed, host):
            return f"nothing fits; what would: --fsdp on {_named(hosts)} ({layout})"
    for name, other in MACHINES.items():
        hosts = max(1, most * gpus // other.gpus)
        if fits(least(other, hosts, other.gpus)[0], other):
            return f"nothing fits; what would: --fsdp --machine {name} --hosts {hosts}"
    return (
        f"nothing fits, nor with --fsdp on {most << _MOST_DOUBLINGS - 1} hosts: take a shorter "
        f"--sequence (now {sequence}), a smaller --batch (now {batch}) or a smaller model"
    )


def main(given: argparse.Namespace) -> int:
    """Prints the best layouts for each number of hosts; returns 1 when none is possible."""
    model = MODELS[given.model]
    try:
        host = machine(given.machine)
        if given.plot:
            load_pyplot()
    except (ValueError, RuntimeError) as error:
        print(f"symm-cp plan: {error}")
        return 2
    gpus = given.gpus or host.gpus
    print(
        f"{model.name} ({model.parameters / 1e9:.1f} G parameters), hosts of {gpus} x {host.name}, "
        f"{given.batch} x {given.sequence} tokens a replica\n"
        "predicted from published peaks and simulated schedules; nothing of it was measured\n"
    )
    print(_HEAD)
    rows = []
    for hosts in given.hosts:
        found = best(model, host, hosts, gpus, given.batch, given.sequence, given.fsdp)
        rows += [(hosts, gpus, prediction) for prediction in found]
        fitting = [prediction for prediction in found if prediction.fits] or found
        for prediction in fitting[: given.show]:
            print(_row(hosts, gpus, prediction))
    if not rows:
        fsdp = " Does --fsdp divide the ranks?" if given.fsdp > 1 else ""
        print(f"no layout is possible: is --sequence a multiple of twice the ranks?{fsdp}")
        return 1
    if given.json:
        report = [
            {"hosts": hosts, "gpus": gpus, **asdict(found), "hidden": found.hidden}
            for hosts, gpus, found in rows
        ]
        write_output(given.json, json.dumps(report, indent=1) + "\n")
    if given.plot:
        _plot(given.plot, f"{model.name}, {host.name}", rows)
    print("\n" + (_choice(rows) or _would_fit(given, model, host, gpus)))
    return 0
