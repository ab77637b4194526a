"""The result: losses and step times side by side, and how much communication was hidden."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import torch

from symm_cp.commands.demo.arguments import DemoOptions
from symm_cp.commands.harness.paired import (
    COMPUTE,
    DENSE,
    FUSED,
    Ratio,
    against_one_process,
    is_dense,
    ratio,
    threads_of_name,
)
from symm_cp.parsing import STDOUT, write_json

#: The widest interval with which the ratio of the fused step's time to the compute alone counts as
#: certain. A larger limit ends the demo on noisy figures; a smaller one takes more steps than most
#: users wait for.
WIDEST_INTERVAL = 0.05
# The first steps allocate workspaces and pack weights.
_WARM_UP = 2
_NAME_WIDTH = 24


@dataclass(frozen=True)
class Result:
    """Losses and seconds of each step by variant, identical on all ranks."""

    options: DemoOptions
    text: str
    parameters: int
    losses: dict[str, list[float]]  # of `options.steps` steps
    seconds: dict[str, list[float]]  # of at least that many steps; exactly, for the one process

    def tolerance(self) -> float:
        """Returns how much losses of one step may differ.

        Each variant computes the sums in a loss, near log(256), in a different order; the rounding
        error is some tens of units in the last place, and training carries it from step to step.
        The tolerance is therefore 50 machine epsilons of the dtype for each step.
        """
        epsilon = torch.finfo(self.options.dtype).eps
        return 50 * epsilon * max(max(self.losses[DENSE]), 1.0) * self.options.steps

    def differences(self) -> list[float]:
        """Returns the differences between each loss and the one process's at the same step."""
        return [
            abs(loss - dense)
            for name in self.losses
            if name != COMPUTE
            for loss, dense in zip(self.losses[name], self.losses[DENSE], strict=True)
        ]

    def agree(self) -> bool:
        """Tells whether all losses agree; NaNs never agree."""
        return all(difference <= self.tolerance() for difference in self.differences())

    def timed(self, name: str) -> list[float]:
        """Returns the seconds of all steps except the first ones."""
        return after_warm_up(self.seconds[name])

    def unfused(self) -> list[str]:
        """Returns the names of the unfused variants, beginning with the fastest backend."""
        return [n for n in self.seconds if not is_dense(n) and n not in (FUSED, COMPUTE)]

    def ratio(self, name: str) -> Ratio:
        """Returns the ratio of a variant's time to the compute alone, from steps made in turn."""
        return ratio(self.timed(name), self.timed(COMPUTE))

    def hidden(self, name: str) -> float | None:
        """Returns the share of an unfused variant's communication that fusing hid.

        1 - (fused - compute) / (unfused - compute); None if communication took no time.
        """
        communication = self.ratio(name).median - 1
        return 1 - (self.ratio(FUSED).median - 1) / communication if communication > 0 else None


def after_warm_up(seconds: list[float]) -> list[float]:
    """Returns all steps except the first ones, unless there are no others."""
    return seconds[_WARM_UP:] or seconds


def _lines(result: Result) -> list[str]:
    options = result.options
    model = options.model
    trained = [n for n in result.losses if n == DENSE or not (is_dense(n) or n == COMPUTE)]
    lines = [
        f"{result.parameters / 1e6:.1f} M parameters ({model.layers} layers, {model.dim} features, "
        f"{model.heads} query heads, {model.kv_heads} key/value heads), {options.dtype}",
        f"text: {result.text}; {options.steps} steps of {options.batch} x {options.seq} bytes",
        "",
        f"{'loss at step':<{_NAME_WIDTH}}" + "".join(f"{name:>{_NAME_WIDTH}}" for name in trained),
    ]
    shown = sorted({0, 1, options.steps // 2, options.steps - 1} & set(range(options.steps)))
    for step in shown:
        losses = "".join(f"{result.losses[name][step]:>{_NAME_WIDTH}.6f}" for name in trained)
        lines.append(f"{step + 1:<{_NAME_WIDTH}}{losses}")
    if options.cp > 1:
        grid = f"{options.ranks // options.cp} x {options.cp} ranks"
        lines.append(f"{grid} (tensor parallel x context parallel)")
    verdict = "agree" if result.agree() else "DIFFER"
    lines += [
        f"losses {verdict}: they differ by at most {max(result.differences()):.1e}, allowed are "
        f"{result.tolerance():.1e} ({options.dtype}, {options.steps} steps)",
        "",
    ]
    return lines + _time_lines(result)


def _time_lines(result: Result) -> list[str]:
    head = "against compute alone (95% interval)"
    lines = [f"{'':<{_NAME_WIDTH}}{'ranks':>8}{'threads':>9}{'step':>12}    {head}"]
    for name in result.seconds:
        milliseconds = statistics.median(result.timed(name)) * 1e3
        ranks = 1 if is_dense(name) else result.options.ranks
        threads = threads_of_name(name) if is_dense(name) else ranks
        against = "" if is_dense(name) or name == COMPUTE else f"    {result.ratio(name)}"
        cells = f"{ranks:>8}{threads:>9}{milliseconds:>9.0f} ms"
        lines.append(f"{name:<{_NAME_WIDTH}}{cells}{against}")
    steps = len(result.timed(FUSED))
    lines.append(f"(medians over {steps} steps, made in turn; the slowest rank of each step)")
    for name in result.unfused():
        hidden = result.hidden(name)
        share = "nothing to hide" if hidden is None else f"{max(hidden, 0.0):.0%} hidden by fusing"
        speed_up = ratio(result.timed(name), result.timed(FUSED))
        communication = max(0.0, result.ratio(name).median - 1)
        lines.append(
            f"{name}: communication adds {communication:.1%} to a step, {share}; "
            f"fused is {speed_up.median:.2f} times as fast"
        )
    lines += against_one_process({n: result.timed(n) for n in result.seconds}, "trains")
    if result.options.compile:
        lines.append("(the one process is not compiled)")
    if (width := result.ratio(FUSED).width) > WIDEST_INTERVAL:
        lines.append(
            f"The interval of the fused step is {width:.2f} wide: the machine is too noisy, or "
            "--most-steps too low"
        )
    return lines


def show(result: Result) -> None:
    """Prints the table, and writes or prints the JSON, if asked."""
    path = result.options.json
    if path != STDOUT:
        print("\n".join(_lines(result)), flush=True)
    if path is not None:
        report = {
            "agree": result.agree(),
            "hidden": {name: result.hidden(name) for name in result.unfused()},
            "fused_to_compute": asdict(result.ratio(FUSED)),
            "losses": result.losses,
            "seconds": result.seconds,
            "tolerance": result.tolerance(),
        }
        write_json(path, report)
