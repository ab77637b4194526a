"""The result: whether the tokens agree, and how fast each variant generated them."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from symm_cp.commands.demo.decoding.options import DecodeOptions
from symm_cp.commands.harness.paired import (
    COMPUTE,
    FUSED,
    Ratio,
    against_one_process,
    is_dense,
    ratio,
    threads_of_name,
)
from symm_cp.parsing import STDOUT, write_json

#: Steps after the prompt that are not timed: the first compiles or allocates workspaces, the
#: others warm up.
WARM_UP = 3
_NAME_WIDTH = 24


@dataclass(frozen=True)
class Agreement:
    """Compares a variant's tokens and logits with the one process's."""

    equal: int  # equal tokens
    tied: int  # different tokens whose logits in the one process differ by less than rounding
    wrong: int  # all other different tokens
    largest: float  # largest difference of logits
    ranks_agree: bool


@dataclass(frozen=True)
class DecodeResult:
    """The generated tokens, and the seconds of the slowest rank for each token."""

    options: DecodeOptions
    config: Any
    parameters: int
    agreements: dict[str, Agreement]
    seconds: dict[str, list[float]]  # the prompt's first
    tolerance: float

    def agree(self) -> bool:
        """Tells whether all variants generated the tokens of the one process."""
        return all(
            found.wrong == 0 and found.ranks_agree and found.largest <= self.tolerance
            for found in self.agreements.values()
        )

    def timed(self, name: str) -> list[float]:
        """Returns the seconds of all steps after the warm-up, or of all if there are no others."""
        steps = self.seconds[name][1:]
        return steps[WARM_UP:] or steps

    def ratio(self, name: str) -> Ratio:
        """Returns the ratio of a variant's time to the compute alone, from steps made in turn."""
        return ratio(self.timed(name), self.timed(COMPUTE))

    def share(self, name: str) -> float:
        """Returns the share of communication, and of its side effects, in a step's time."""
        return max(0.0, 1 - 1 / self.ratio(name).median)


def tolerance_of(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns how much logits may differ between variants, which sum in different orders.

    It is the error of a sum in `dtype`: some tens of units in the last place of the largest logit.
    """
    return 50 * torch.finfo(dtype).eps * max(1.0, float(logits.abs().max()))


def compare(
    tokens: list[int], logits: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float
) -> tuple[int, int, int, float]:
    """Returns the numbers of equal, tied and wrong tokens, and the largest difference of logits.

    A token is tied if its wanted logit is at most twice the tolerance below the largest one.
    """
    equal = tied = 0
    for token, reference in zip(tokens, wanted, strict=True):
        best = int(reference.argmax())
        if token == best:
            equal += 1
        elif float(reference[best] - reference[token]) <= 2 * tolerance:
            tied += 1
    pairs = zip(logits, wanted, strict=True)
    differences = [float((own - reference).abs().max()) for own, reference in pairs]
    # NaN is larger than every tolerance.
    largest = max(differences, key=lambda value: (value != value, value))
    return equal, tied, len(tokens) - equal - tied, largest


def _lines(result: DecodeResult) -> list[str]:
    options, config = result.options, result.config
    lines = [
        f"{config.model_type}: {result.parameters / 1e6:.1f} M parameters "
        f"({config.num_hidden_layers} layers, {config.hidden_size} features, "
        f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key/value heads, "
        f"vocabulary of {config.vocab_size}), random weights, {options.dtype}",
        f"{options.tokens} tokens after a prompt of {options.prompt}, batch 1, greedy; each step "
        "is given the tokens of the one process",
        "",
    ]
    for name, found in result.agreements.items():
        verdict = f"{found.equal} of {options.tokens} tokens are those of the one process"
        if found.tied:
            verdict += f", {found.tied} are tied with them within rounding"
        if found.wrong:
            verdict += f", {found.wrong} are WRONG"
        if not found.ranks_agree:
            verdict += "; the ranks DIFFER"
        lines.append(f"{name:<{_NAME_WIDTH}}{verdict} (logits differ by {found.largest:.1e})")
    lines.append(
        f"tokens {'agree' if result.agree() else 'DIFFER'}: allowed are differences of logits of "
        f"{result.tolerance:.1e} ({options.dtype})"
    )
    return [*lines, "", *_time_lines(result)]


def _time_lines(result: DecodeResult) -> list[str]:
    head = "".join(f"{text:>12}" for text in ("ranks", "threads", "tokens/s", "a token", "prompt"))
    first = f"{'first step':>12}" if result.options.compile else ""
    lines = [f"{'':<{_NAME_WIDTH}}{head}{first}    against compute alone (95% interval), share"]
    for name, seconds in result.seconds.items():
        timed = result.timed(name)
        median = statistics.median(timed)
        ranks = 1 if is_dense(name) else result.options.ranks
        threads = threads_of_name(name) if is_dense(name) else ranks
        cells = f"{ranks:>12}{threads:>12}{1 / median:>12.1f}{_ms(median):>12}{_ms(seconds[0]):>12}"
        if first:
            cells += f"{seconds[1]:>10.1f} s" if len(seconds) > 1 else " " * 12
        against = ""
        if not (is_dense(name) or name == COMPUTE):
            share = f"{result.share(name):.1%} is communication"
            against = f"    {result.ratio(name)}, {share}"
        lines.append(f"{name:<{_NAME_WIDTH}}{cells}{against}")
    tokens = len(result.timed(COMPUTE))
    lines.append(f"(medians over {tokens} tokens, made in turn; the slowest rank of each)")
    for name in result.seconds:
        if not (is_dense(name) or name in (COMPUTE, FUSED)):
            speed_up = ratio(result.timed(name), result.timed(FUSED))
            lines.append(f"fused generates {speed_up.median:.2f} times as fast as {name}")
    lines += against_one_process({n: result.timed(n) for n in result.seconds}, "generates")
    return [*lines, "(the one process is not compiled)"] if result.options.compile else lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def show(result: DecodeResult) -> None:
    """Prints the result, and writes or prints the JSON, if asked."""
    path = result.options.json
    if path != STDOUT:
        print("\n".join(_lines(result)), flush=True)
    if path is not None:
        spread = [n for n in result.seconds if not (is_dense(n) or n == COMPUTE)]
        report = {
            "agree": result.agree(),
            "agreements": {name: asdict(found) for name, found in result.agreements.items()},
            "tolerance": result.tolerance,
            "to_compute": {name: asdict(result.ratio(name)) for name in spread},
            "communication": {name: result.share(name) for name in spread},
            "seconds": result.seconds,
            "timed": {name: result.timed(name) for name in result.seconds},
        }
        write_json(path, report)
