"""Prints and writes measured rows: text, JSON, CSV."""

from __future__ import annotations

import csv
import datetime
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from symm_cp import parsing
from symm_cp.commands.harness.measure import Row, duration
from symm_cp.measured import processor_name
from symm_cp.trusted import write_output

#: The meaning of the numbers in `line`.
LEGEND = (
    "medians of repetitions; in parentheses the ratio to the limit: the median of the ratios within"
    " each\nrepetition, in which drift of the machine's speed cancels (so not the quotient of the "
    "medians)"
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
    cells = [f"{name} {duration(row.median(name))} ({row.ratio(name):.2f})" for name in row.seconds]
    overlap = row.overlap()
    if overlap is not None:
        low, high = overlap.interval
        interval = f"{low:.0%} to {high:.0%}"
        cells.append(
            f"overlap {overlap.value:.0%} ({interval})"
            if overlap.is_conclusive
            else f"overlap: inconclusive, the machine is too noisy ({interval})"
        )
    return f"{row.case}\n    " + "  ".join(cells)


def heading(command: Sequence[str], device: str) -> dict[str, Any]:
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


def _flat(rows: Iterable[Written]) -> list[dict[str, Any]]:
    """Returns a line for each variant."""
    return [
        {
            "case": row["case"],
            "ranks": row["ranks"],
            "variant": name,
            "ms": ms,
            "ratio": row["ratio"][name],
            "ratio_low": row["ratio_95"][name][0],
            "ratio_high": row["ratio_95"][name][1],
            "overlap": row["overlap"]["value"] if "overlap" in row else "",
        }
        for row in rows
        for name, ms in row["ms"].items()
    ]


def write_csv(path: Path, rows: Sequence[Written]) -> None:
    """Writes a line for each variant of each case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _flat(rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["case"])
    writer.writeheader()
    writer.writerows(lines)
    write_output(path, text.getvalue())
