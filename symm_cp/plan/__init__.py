"""`symm-cp plan`: predicted step times of a model on hosts that one does not have at hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from symm_cp.launch import counts, positive
from symm_cp.plan.models import MODELS, Model
from symm_cp.plan.predict import Prediction, layouts, predict
from symm_cp.schedule.machine import MACHINES, Machine, machine


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
    parser.add_argument("--show", type=positive, default=5, help="layouts a number of hosts")
    parser.add_argument("--json", type=Path, help="write all predictions here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")


def best(
    model: Model, host: Machine, hosts: int, gpus: int, batch: int, sequence: int
) -> list[Prediction]:
    """Returns predictions for all layouts: those that fit into memory first, the fastest first."""
    found = [
        predict(model, host, layout, batch, sequence)
        for layout in layouts(model, host, hosts, gpus, sequence)
    ]
    return sorted(found, key=lambda p: (not p.fits, -p.tokens))


_HEAD = (
    f"{'hosts':>5} {'tp':>3} {'cp':>4} {'dp':>5} {'chunks':>6}  {'step':>10} {'compute':>10} "
    f"{'comm.':>10} {'hidden':>6}  {'memory':>8}  tokens/s/GPU"
)


def _row(hosts: int, gpus: int, found: Prediction) -> str:
    layout = found.layout
    chunks = layout.cp * 2 if layout.cp > 1 else 1
    rate = found.tokens / (hosts * gpus)
    return (
        f"{hosts:>5} {layout.tp:>3} {layout.cp:>4} {layout.dp:>5} {chunks:>6}  "
        f"{found.step * 1e3:>7.1f} ms {found.compute * 1e3:>7.1f} ms "
        f"{found.communication * 1e3:>7.1f} ms {found.hidden:>6.0%}  "
        f"{found.memory / 1e9:>5.1f} GB  {rate:>7.0f}{'' if found.fits else '  (does not fit)'}"
    )


def _plot(path: Path, title: str, rows: list[tuple[int, int, Prediction]]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("symm-cp plan --plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    figure.savefig(path, dpi=150)


def main(given: argparse.Namespace) -> int:
    """Prints the best layouts for each number of hosts; returns 1 when none is possible."""
    model = MODELS[given.model]
    try:
        host = machine(given.machine)
    except ValueError as error:
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
        found = best(model, host, hosts, gpus, given.batch, given.sequence)
        rows += [(hosts, gpus, prediction) for prediction in found]
        fitting = [prediction for prediction in found if prediction.fits] or found
        for prediction in fitting[: given.show]:
            print(_row(hosts, gpus, prediction))
    if not rows:
        print("no layout is possible: is --sequence a multiple of twice the ranks?")
        return 1
    if given.json:
        report = [
            {"hosts": hosts, "gpus": gpus, **asdict(found), "hidden": found.hidden}
            for hosts, gpus, found in rows
        ]
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    if given.plot:
        _plot(given.plot, f"{model.name}, {host.name}", rows)
    return 0
