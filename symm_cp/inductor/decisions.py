"""Records of how the passes treated each collective of a graph, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.tuning import Choice

#: What to do about an unsafe side effect, by which checkpointed modules run uncompiled.
_IN_CHECKPOINTS = (
    "; with activation checkpointing, set "
    "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True, as torchtitan does"
)


@dataclass(frozen=True)
class Decision:
    """A collective of a compiled graph: into which op it was fused, or why it was not.

    A collective that was not fused may still be replaced by another op, `runs_as`.
    """

    collective: str
    group: str
    fused_into: str | None
    reason: str
    critical: bool = False  # next to a matmul or attention
    runs_as: str | None = None
    #: How to change the program so that it communicates less; empty if there is no advice.
    advice: str = ""
    #: File and line of the program that calls it; empty if unknown.
    where: str = ""

    def __str__(self) -> str:
        fate = "left alone"
        if self.fused_into:
            fate = f"fused into {self.fused_into}"
        elif self.runs_as:
            fate = f"not fused, runs as {self.runs_as}"
        at = f", at {self.where}" if self.where else ""
        return f"{self.collective} (group {self.group}{at}): {fate}: {self.reason}"


@dataclass
class Report:
    """The decisions on all collectives of the compiled graphs, in graph order."""

    decisions: list[Decision] = field(default_factory=list)
    #: How each fused matmul ran when the graphs ran, by op, dtype and shape.
    algorithms: dict[str, Choice] = field(default_factory=dict)
    #: Reasons for graph breaks, with counts; code there ran uncompiled and is not in the report.
    breaks: dict[str, int] = field(default_factory=dict)
    #: The rank that prints the report, if it is another one.
    printed_by: int | None = None

    @property
    def fused(self) -> list[Decision]:
        """The collectives that were fused."""
        return [decision for decision in self.decisions if decision.fused_into is not None]

    @property
    def left(self) -> list[Decision]:
        """The collectives that were not fused."""
        return [decision for decision in self.decisions if decision.fused_into is None]

    @property
    def advice(self) -> dict[str, list[str]]:
        """How to change the program, with the collectives that each piece of advice concerns."""
        advice: dict[str, list[str]] = {}
        for decision in self.decisions:
            if decision.advice:
                advice.setdefault(decision.advice, []).append(decision.collective)
        for group in {decision.group: None for decision in self.left if not decision.runs_as}:
            if (backend := _backend_of(group)) not in ("", "symm_cp"):
                hint = f"over the backend 'symm_cp' instead of {backend!r} they would run in"
                advice[f"{hint} shared memory"] = [
                    d.collective for d in self.left if d.group == group and not d.runs_as
                ]
        return advice

    def __str__(self) -> str:
        """Returns the text on the rank that prints it, and one line on others."""
        if self.printed_by is None:
            return self.text()
        first = f"rank {self.printed_by} prints the report (Report.text() has this rank's)"
        return f"rank {dist.get_rank()}: {self._summary()}; {first}"

    def _summary(self) -> str:
        return f"{len(self.fused)} of {len(self.decisions)} collectives fused"

    def text(self) -> str:
        """Returns the whole text, on any rank."""
        lines = [self._summary()]
        lines += [f"- {decision}" for decision in self.decisions]
        lines += [f"- {matmul}: {choice}" for matmul, choice in self.algorithms.items()]
        lines += [f"- {text} ({count} x)" for text, count in self.breaks.items()]
        lines += ["What to change:"] if self.advice else []
        lines += [f"- {', '.join(names)}: {advice}" for advice, names in self.advice.items()]
        return "\n".join(lines)


def graph_breaks(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns the compiler's reasons for graph breaks, with counts, less the counts `before`."""
    breaks: Counter[str] = Counter()
    for reason, count in (counters["graph_break"] - Counter(before or {})).items():
        what, explanation = (*reason.split("\n"), "")[:2]
        text = f"graph break: {what}. {explanation.strip()}".rstrip(". ")
        breaks[f"{text}{_IN_CHECKPOINTS}" if "Unsafe side effect" in text else text] += count
    return dict(breaks)


def printing_rank(report: Report) -> int | None:
    """Returns the first rank of the groups of a report's collectives, if it is another rank."""
    if not dist.is_initialized():
        return None
    groups = {decision.group for decision in report.decisions}
    members = [dist.get_process_group_ranks(_resolve_process_group(name)) for name in groups]  # type: ignore[arg-type]
    first = min((min(ranks) for ranks in members), default=0)
    return None if first == dist.get_rank() else first


def _backend_of(group_name: str) -> str:
    """Returns the backend of a group for CPU tensors; empty if there is none."""
    try:
        group = _resolve_process_group(group_name)  # type: ignore[arg-type]
        return str(group._get_backend(torch.device("cpu")).name())
    except (RuntimeError, ValueError):  # a group that has ended, or that is for CUDA tensors only
        return ""


_active: ContextVar[Report | None] = ContextVar("symm_cp_inductor_report", default=None)


@contextmanager
def recording() -> Iterator[Report]:
    """Collects the decisions that are made in the body of the `with` statement."""
    report = Report()
    token = _active.set(report)
    try:
        yield report
    finally:
        _active.reset(token)


def record(decision: Decision) -> None:
    """Adds a decision to the current report, if there is one."""
    if (report := _active.get()) is not None:
        report.decisions.append(decision)


def recorded() -> set[str]:
    """Returns the names of the collectives in the current report."""
    report = _active.get()
    return {decision.collective for decision in report.decisions} if report is not None else set()
