"""The result: losses and step times side by side, and how much communication was hidden."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

import torch

from symm_cp.demo.arguments import DemoOptions
from symm_cp.trusted import write_output

DENSE, UNFUSED, FUSED, COMPUTE = "one process", "unfused", "fused", "compute alone"
_TRAINED = (DENSE, UNFUSED, FUSED)
# The first steps allocate workspaces and pack weights.
_WARM_UP = 2


@dataclass(frozen=True)
class Result:
    """Losses and seconds of each step by variant, identical on all ranks."""

    options: DemoOptions
    text: str
    parameters: int
    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]

    def tolerance(self) -> float:
        """Returns how much losses of one step may differ.

        Each variant computes the sums in a loss, near log(256), in another order; the rounding
        error is some tens of units in the last place, and training carries it from step to step.
        Hence 50 machine epsilons of the dtype for each step.
        """
        epsilon = torch.finfo(self.options.dtype).eps
        return 50 * epsilon * max(max(self.losses[DENSE]), 1.0) * self.options.steps

    def differences(self) -> list[float]:
        """Returns how much each loss differs from that of the one process at the same step."""
        return [
            abs(loss - dense)
            for name in _TRAINED
            for loss, dense in zip(self.losses[name], self.losses[DENSE], strict=True)
        ]

    def agree(self) -> bool:
        """Tells whether all losses agree; NaNs never do."""
        return all(difference <= self.tolerance() for difference in self.differences())

    def median_seconds(self, name: str) -> float:
        """Returns the median over steps, except the first ones."""
        seconds = self.seconds[name]
        return statistics.median(seconds[_WARM_UP:] or seconds)

    def hidden(self) -> float | None:
        """Returns the share of communication that fusing hid; None without any communication.

        From medians: 1 - (fused - compute) / (unfused - compute).
        """
        unfused, fused, compute = map(self.median_seconds, (UNFUSED, FUSED, COMPUTE))
        return 1 - (fused - compute) / (unfused - compute) if unfused > compute else None


def _lines(result: Result) -> list[str]:
    options = result.options
    model = options.model
    lines = [
        f"{result.parameters / 1e6:.1f} M parameters ({model.layers} layers, {model.dim} features, "
        f"{model.heads} query heads, {model.kv_heads} key/value heads), {options.dtype}",
        f"text: {result.text}; {options.steps} steps of {options.batch} x {options.seq} bytes",
        "",
        f"{'loss at step':<16}" + "".join(f"{name:>16}" for name in _TRAINED),
    ]
    shown = sorted({0, 1, options.steps // 2, options.steps - 1} & set(range(options.steps)))
    for step in shown:
        losses = "".join(f"{result.losses[name][step]:>16.6f}" for name in _TRAINED)
        lines.append(f"{step + 1:<16}{losses}")
    if options.cp > 1:
        grid = f"{options.ranks // options.cp} x {options.cp} ranks"
        lines.append(f"{grid} (tensor parallel x context parallel)")
    verdict = "agree" if result.agree() else "DIFFER"
    lines += [
        f"losses {verdict}: they differ by at most {max(result.differences()):.1e}, allowed are "
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
    share = "nothing (no communication)" if hidden is None else f"{hidden:.0%} of it"
    communication = max(0.0, unfused - result.median_seconds(COMPUTE))
    lines += [
        "(speed-up over unfused; medians over steps of the slowest rank)",
        f"communication: {communication * 1e3:.0f} ms of an unfused step; "
        f"hidden by fusing: {share}",
    ]
    return lines


def show(result: Result) -> None:
    """Prints the table, and writes the JSON file, if any."""
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
