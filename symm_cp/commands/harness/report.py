"""Prints and writes measured rows."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from symm_cp import parsing
from symm_cp.commands.harness.measure import Row, duration, ratio_is_noisy
from symm_cp.measured import processor_name

#: The meaning of the numbers in `line`.
LEGEND = (
    "medians of repetitions; in parentheses the ratio to the limit: the median of the ratios within"
    " each\nrepetition, in which drift of the machine's speed cancels (so not the quotient of the "
    "medians), or\nits 95% interval alone where that is too wide to compare"
)

#: A row in the form for JSON.
Written = Mapping[str, Any]


def processor() -> str:
    """Returns the model of the processor and the number of cores that this process may use."""
    return f"{processor_name()}, {len(os.sched_getaffinity(0))} cores"


def device_name(device: str) -> str:
    """Returns the name of the GPU or the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def line(row: Row) -> str:
    """Returns a row as text: times, ratios to the limit, overlap and its interval."""
    cells = [f"{name} {duration(row.median(name))} ({_ratio(row, name)})" for name in row.seconds]
    overlap = row.overlap()
    if overlap is not None:
        low, high = overlap.interval
        interval = f"{low:.0%} to {high:.0%}"
        cells.append(
            f"overlap {overlap.value:.0%} ({interval})"
            if overlap.is_conclusive
            else f"overlap: inconclusive, the machine is too noisy ({interval})"
        )
    signal: Any = row.notes.get("signal_ns", (0.0,))
    if max(signal) > 0:
        cells.append(f"signal {' to '.join(f'{each:.0f}' for each in signal)} ns")
    return f"{row.case}\n    " + "  ".join(cells)


def _ratio(row: Row, name: str) -> str:
    ratio, (low, high) = row.ratio(name), row.ratio_interval(name)
    if ratio_is_noisy(ratio, (low, high)):
        return f"too noisy: {low:.2f} to {high:.2f}"
    return f"{ratio:.2f}"


def heading(command: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """Returns the head of a file of results: command, date, machine, torch."""
    return {
        "command": " ".join(command),
        "date": datetime.date.today().isoformat(),
        "machine": device_name(device),
        "torch": torch.__version__,
    }


def write_json(path: Path, head: Mapping[str, Any], rows: Sequence[Written]) -> None:
    """Writes the head and all rows, or prints them."""
    parsing.write_json(path, {**head, "rows": rows})
