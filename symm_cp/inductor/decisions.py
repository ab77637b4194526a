"""What the passes did with each collective of a graph, or why they left it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from symm_cp.tuning import Choice


@dataclass(frozen=True)
class Decision:
    """A collective of a compiled graph: what it was fused into, or why it was not."""

    collective: str
    group: str
    fused_into: str | None
    reason: str
    critical: bool = False  # next to a matmul or attention

    def __str__(self) -> str:
        fate = f"fused into {self.fused_into}" if self.fused_into else "left alone"
        return f"{self.collective} (group {self.group}): {fate}: {self.reason}"


@dataclass
class Report:
    """The decisions on all collectives of the compiled graphs, in graph order."""

    decisions: list[Decision] = field(default_factory=list)
    #: The way that each fused matmul took when the graphs ran, by op, dtype and shape.
    ways: dict[str, Choice] = field(default_factory=dict)

    @property
    def fused(self) -> list[Decision]:
        """The collectives that were fused."""
        return [decision for decision in self.decisions if decision.fused_into is not None]

    @property
    def left(self) -> list[Decision]:
        """The collectives that were left alone."""
        return [decision for decision in self.decisions if decision.fused_into is None]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.decisions)} collectives fused"]
        lines += [f"- {decision}" for decision in self.decisions]
        lines += [f"- {matmul}: {choice}" for matmul, choice in self.ways.items()]
        return "\n".join(lines)


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
    if report is not None:
        report.decisions.append(decision)
