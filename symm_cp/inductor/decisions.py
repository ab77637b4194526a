"""Records of how the passes treated each collective of a graph, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch._dynamo.utils import counters

from symm_cp import page
from symm_cp.inductor import advice as advices
from symm_cp.tuning import Choice


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
    #: How to change the program so that it takes less time; empty if there is no advice.
    advice: str = ""

    def __str__(self) -> str:
        fate = "left alone"
        if self.fused_into:
            fate = f"fused into {self.fused_into}"
        elif self.runs_as:
            fate = f"not fused, runs as {self.runs_as}"
        return f"{self.collective} (group {self.group}): {fate}: {self.reason}"


@dataclass
class Report:
    """The decisions on all collectives of the compiled graphs, in graph order."""

    decisions: list[Decision] = field(default_factory=list)
    #: How each fused matmul ran when the graphs ran, by op, dtype and shape.
    ways: dict[str, Choice] = field(default_factory=dict)
    #: Reasons for graph breaks, with counts; code there ran uncompiled and is not in the report.
    breaks: dict[str, int] = field(default_factory=dict)
    #: The graphs as `symm-cp explain --json` writes them: collectives with costs, and a timeline.
    graphs: list[dict[str, Any]] = field(default_factory=list)

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
            if hint := advices.on_group(group):
                advice[hint] = [d.collective for d in self.left
                                if d.group == group and not d.runs_as]  # fmt: skip
        for text in self.breaks:
            if hint := advices.on_reason(text):
                advice.setdefault(hint, []).append("graph break")
        return advice

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.decisions)} collectives fused"]
        lines += [f"- {decision}" for decision in self.decisions]
        lines += [f"- {matmul}: {choice}" for matmul, choice in self.ways.items()]
        lines += [f"- {text} ({count} x)" for text, count in self.breaks.items()]
        lines += ["What to change:"] if self.advice else []
        lines += [f"- {', '.join(names)}: {advice}" for advice, names in self.advice.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Returns the report with the graphs' timelines, as notebooks show it."""
        return page.fragment(self.graphs, self.breaks, self.advice)


def graph_breaks(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns the compiler's reasons for graph breaks, with counts, less the counts `before`."""
    breaks: Counter[str] = Counter()
    for reason, count in (counters["graph_break"] - Counter(before or {})).items():
        what, explanation = (*reason.split("\n"), "")[:2]
        breaks[f"graph break: {what}. {explanation.strip()}".rstrip(". ")] += count
    return dict(breaks)


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
    report = _active.get()
    if report is None:
        return
    if not (decision.fused_into or decision.advice):
        decision = replace(decision, advice=advices.on_reason(decision.reason))
    report.decisions.append(decision)


def recorded() -> set[str]:
    """Returns the names of the collectives in the current report."""
    report = _active.get()
    return {decision.collective for decision in report.decisions} if report is not None else set()
