"""The table at the end: losses side by side, step times, and how much communication was hidden."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

import torch

from symm_cp.demo.options import Options
from symm_cp.trusted import write_output

DENSE, UNFUSED, FUSED, COMPUTE = "one process", "unfused", "fused", "compute alone"
_TRAINED = (DENSE, UNFUSED, FUSED)
# The first steps make workspaces and packed weights.
_WARM_UP = 2


@dataclass(frozen=True)
class Result:
    """Losses and seconds of every step, by variant; alike on all ranks."""

    options: Options
    text: str
    parameters: int
    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]

    def tolerance(self) -> float:
        """How far losses of one step may lie apart.

        A loss near log(256) is a mean of sums that are taken in another order by each variant; its
        rounding error is some tens of units in the last place, and training passes an error on from
        step to step. So: 50 units of round-off of the dtype, for each step.
        """
        unit = torch.finfo(self.options.dtype).eps
        return 50 * unit * max(max(self.losses[DENSE]), 1.0) * self.options.steps

    def distances(self) -> list[float]:
        """How far each loss is from that of the one process at the same step."""
        return [
            abs(loss - exact)
            for name in _TRAINED
            for loss, exact in zip(self.losses[name], self.losses[DENSE], strict=True)
        ]

    def agree(self) -> bool:
        """Tells whether all losses agree; not-a-numbers never do."""
        return all(distance <= self.tolerance() for distance in self.distances())

    def median_seconds(self, name: str) -> float:
        """The median step, without the first ones."""
        seconds = self.seconds[name]
        return statistics.median(seconds[_WARM_UP:] or seconds)

    def hidden(self) -> float | None:
        """The part of the communication that fusing hid; None where there was none to hide.

        From the medians: 1 - (fused - compute) / (unfused - compute).
        """
        unfused, fused, compute = map(self.median_seconds, (UNFUSED, FUSED, COMPUTE))
        return 1 - (fused - compute) / (unfused - compute) if unfused > compute else None


def _lines(result: Result) -> list[str]:
    options = result.options
    model = options.model
    lines = [
        f"{result.parameters / 1e6:.1f} M parameters ({model.layers} layers, {model.dim} features, "
        f"{model.heads} heads, {model.kv_heads} for keys and values), {options.dtype}",
        f"text: {result.text}; {options.steps} steps of {options.batch} x {options.seq} bytes",
        "",
        f"{'loss at step':<16}" + "".join(f"{name:>16}" for name in _TRAINED),
    ]
    shown = sorted({0, 1, options.steps // 2, options.steps - 1} & set(range(options.steps)))
    for step in shown:
        losses = "".join(f"{result.losses[name][step]:>16.6f}" for name in _TRAINED)
        lines.append(f"{step + 1:<16}{losses}")
    if options.cp > 1:
        lines.append(f"{options.ranks // options.cp} x {options.cp} ranks: features x sequence")
    verdict = "agree" if result.agree() else "DIFFER"
    lines += [
        f"losses {verdict}: at most {max(result.distances()):.1e} apart, allowed are "
        f"{result.tolerance():.1e} ({options.dtype}, {options.steps} steps)",
        "",
        f"{'':<16}{'ranks':>8}{'step':>12}{'speed-up':>12}",
    ]
    unfused = result.median_seconds(UNFUSED)
    for name in (*_TRAINED, COMPUTE):
        seconds = result.median_seconds(name)
        ranks = 1 if name == DENSE else options.ranks
        lines.append(f"{name:<16}{ranks:>8}{seconds * 1e3:>9.0f} ms{unfused / seconds:>10.2f} x")
    hidden = result.hidden()
    share = "no communication to hide" if hidden is None else f"{hidden:.0%} of it"
    spent = max(0.0, unfused - result.median_seconds(COMPUTE))
    lines += [
        "(speed-up over unfused; medians of steps, each the time of its slowest rank)",
        f"communication: {spent * 1e3:.0f} ms of an unfused step; hidden by fusing: {share}",
    ]
    return lines


def show(result: Result) -> None:
    """Prints the table, and writes the JSON file that was asked for."""
    print("\n".join(_lines(result)), flush=True)
    path = result.options.json
    if path is not None:
        report = {
            "agree": result.agree(),
            "hidden": result.hidden(),
            "losses": result.losses,
            "seconds": result.seconds,
            "tolerance": result.tolerance(),
        }
        write_output(path, json.dumps(report, indent=1) + "\n")
