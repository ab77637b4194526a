"""Plots of measured rows: times and ratios to the limit over size, and over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symm_cp.bench.report import Written
from symm_cp.schedule.trace import load_pyplot, save_figure


def _kinds(rows: Sequence[Written]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def _variants(rows: Sequence[Written]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["ms"]))


def draw(folder: Path, rows: Sequence[Written]) -> list[Path]:
    """Writes `KIND.png` for each kind of case, and `scaling.png` for several numbers of ranks.

    Raises `RuntimeError` if matplotlib is missing.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    max_ranks = max(row["ranks"] for row in rows)
    for kind in _kinds(rows):
        chosen = [row for row in rows if row["kind"] == kind and row["ranks"] == max_ranks]
        chosen.sort(key=lambda row: row["size"])
        written.append(folder / f"{kind}.png")
        _against_size(pyplot, written[-1], kind, chosen)
    if len({row["ranks"] for row in rows}) > 1:
        written.append(folder / "scaling.png")
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
        ax.legend()
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)
