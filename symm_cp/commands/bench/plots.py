"""Plots of measured rows: times and ratios to the limit over size, and over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symm_cp.commands.harness.report import Written
from symm_cp.parsing import plot_file
from symm_cp.schedule.trace import load_pyplot, plain_numbers, save_figure


def _kinds(rows: Sequence[Written]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def _variants(rows: Sequence[Written]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["ms"]))


def draw(path: Path, rows: Sequence[Written]) -> list[Path]:
    """Writes a plot for each kind of case, and `scaling` if the numbers of ranks differ.

    Files are `KIND.png` in folder `path`, or the kind is added to the name of file `path`. Raises
    `RuntimeError` if matplotlib is missing.
    """
    pyplot = load_pyplot()
    written = []
    max_ranks = max(row["ranks"] for row in rows)
    scales = len({row["ranks"] for row in rows}) > 1
    several = scales or len(_kinds(rows)) > 1
    for kind in _kinds(rows):
        chosen = [row for row in rows if row["kind"] == kind and row["ranks"] == max_ranks]
        chosen.sort(key=lambda row: row["size"])
        written.append(plot_file(path, kind, several=several))
        _against_size(pyplot, written[-1], kind, chosen)
    if scales:
        written.append(plot_file(path, "scaling", several=several))
        _scaling(pyplot, written[-1], rows)
    return written


def _against_size(pyplot: Any, path: Path, kind: str, rows: Sequence[Written]) -> None:
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name in _variants(rows):
        measured = [row for row in rows if name in row["ms"]]
        sizes = [row["size"] for row in measured]
        times.plot(sizes, [row["ms"][name] for row in measured], marker="o", label=name)
        ratios.plot(sizes, [row["ratio"][name] for row in measured], marker="o", label=name)
        low, high = zip(*(row["ratio_95"][name] for row in measured), strict=True)
        ratios.fill_between(sizes, low, high, alpha=0.2)
    unit = rows[0]["unit"]
    times.set(xscale="log", yscale="log", xlabel=unit, ylabel="milliseconds", title=kind)
    ratios.set(xscale="log", yscale="log", xlabel=unit, ylabel="ratio to the limit")
    ratios.axhline(1.0, color="gray", linewidth=0.8)
    plain_numbers(times.yaxis, ratios.yaxis)
    times.legend()
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)


def _scaling(pyplot: Any, path: Path, rows: Sequence[Written]) -> None:
    """Draws the ratio to the limit over ranks, for the largest size of each kind."""
    kinds = _kinds(rows)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
    for kind, ax in zip(kinds, axes[0], strict=True):
        chosen = [row for row in rows if row["kind"] == kind]
        for name in _variants(chosen):
            points = {}
            for row in sorted(chosen, key=lambda row: (row["ranks"], row["size"])):
                if name in row["ms"]:
                    points[row["ranks"]] = row["ratio"][name]
            ax.plot(list(points), list(points.values()), marker="o", label=name)
        ax.set(xlabel="ranks", ylabel="ratio to the limit", title=kind, yscale="log")
        ax.set_xticks(sorted({row["ranks"] for row in chosen}))
        plain_numbers(ax.yaxis)
        ax.legend()
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)
