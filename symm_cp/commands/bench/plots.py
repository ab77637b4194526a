"""Plots of measured rows: times, ratios to the limit and overlap, over size and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from symm_cp.commands.harness.measure import FUSED, UNFUSED, overlap_is_noisy, ratio_is_noisy
from symm_cp.commands.harness.report import Written
from symm_cp.parsing import plot_file
from symm_cp.schedule.trace import load_pyplot, plain_numbers, save_figure

_NOISY = {"color": "gray", "linestyle": "dotted"}  # an interval without a point
_LINES = ("-", "--", ":", "-.")  # one for each dtype
# The end of the axis of ratios, by the largest of a fused op: gloo's would hide all differences.
_HEADROOM = 1.5


def _kinds(rows: Sequence[Written]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def draw(path: Path, rows: Sequence[Written], head: Mapping[str, Any]) -> list[Path]:
    """Writes a plot for each kind of case, and `scaling` if the numbers of ranks differ.

    Files are `KIND.png` in folder `path`, or the kind is added to the name of file `path`. `head`
    is the heading of the results. Raises `RuntimeError` if matplotlib is missing.
    """
    pyplot = load_pyplot()
    max_ranks = max(row["ranks"] for row in rows)
    scales = len({row["ranks"] for row in rows}) > 1
    several = scales or len(_kinds(rows)) > 1
    figures = {}
    for kind in _kinds(rows):
        chosen = [row for row in rows if row["kind"] == kind and row["ranks"] == max_ranks]
        figures[kind] = _against_size(pyplot, kind, sorted(chosen, key=lambda row: row["size"]))
    if scales:
        figures["scaling"] = _scaling(pyplot, rows)
    written = []
    for name, figure in figures.items():
        ranks = "" if name == "scaling" else f"{max_ranks} ranks, "
        figure.supxlabel(
            f"{ranks}{head['machine']}, torch {head['torch']}, {head['date']}. Bars: 95% "
            "intervals; dotted, without a point: too noisy to compare",
            fontsize="small",
        )
        figure.tight_layout()
        written.append(plot_file(path, name, several=several))
        save_figure(figure, written[-1])
        pyplot.close(figure)
    return written


def _series(
    rows: Sequence[Written], x: str
) -> Iterator[tuple[str, dict[str, Any], dict[int, Written]]]:
    """Yields each variant and dtype: the variant, how it is drawn, its rows by `x`."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for color, name in enumerate(dict.fromkeys(name for row in rows for name in row["ms"])):
        for line, dtype in zip(cycle(_LINES), dtypes, strict=False):
            chosen = [row for row in rows if name in row["ms"] and row["dtype"] == dtype]
            style = {"label": f"{name}, {dtype}", "color": f"C{color}", "linestyle": line}
            if chosen:
                yield name, {**style, "marker": "o"}, {row[x]: row for row in chosen}


def _with_bars(
    ax: Any, style: dict[str, Any], values: Mapping[int, tuple[float, Sequence[float], bool]]
) -> None:
    """Draws values with their intervals; of noisy ones (the third item), the interval alone."""
    shown = {x: value for x, (value, _, is_noisy) in values.items() if not is_noisy}
    ax.plot(list(shown), list(shown.values()), **style)
    for x, (_, (low, high), is_noisy) in values.items():
        ax.vlines(x, low, high, **(_NOISY if is_noisy else {"color": style["color"]}))


def _draw_ratios(ax: Any, rows: Sequence[Written], x: str) -> None:
    """Draws ratios to the limit on a linear axis."""
    fused = [1.0]
    for name, style, by_x in _series(rows, x):
        ratios = {at: (row["ratio"][name], row["ratio_95"][name]) for at, row in by_x.items()}
        fused += [ratio for ratio, _ in ratios.values() if name.startswith(FUSED)]
        _with_bars(ax, style, {at: (*r, ratio_is_noisy(*r)) for at, r in ratios.items()})
    ax.axhline(1.0, color="gray", linewidth=0.8)
    ax.set_ylim(0.0, min(_HEADROOM * max(fused), ax.get_ylim()[1]))
    ax.set_ylabel("ratio to the limit (slower variants leave the axis)")


def _draw_overlap(ax: Any, rows: Sequence[Written]) -> None:
    over = next(name for name in rows[0]["ms"] if name.startswith(UNFUSED))
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    for line, dtype in zip(cycle(_LINES), dtypes, strict=False):
        style = {"label": dtype, "color": "C0", "linestyle": line, "marker": "o"}
        overlaps = {row["size"]: row["overlap"] for row in rows if row["dtype"] == dtype}
        values = {x: (each["value"], each["interval"]) for x, each in overlaps.items()}
        _with_bars(ax, style, {x: (*v, overlap_is_noisy(v[1])) for x, v in values.items()})
    ax.set(ylim=(-0.25, 1.25), ylabel="overlap", title=f"share hidden of {over}'s communication")
    ax.legend(fontsize="small")


def _against_size(pyplot: Any, kind: str, rows: Sequence[Written]) -> Any:
    overlaps = [row for row in rows if "overlap" in row]
    count = 3 if overlaps else 2
    figure, (times, ratios, *others) = pyplot.subplots(1, count, figsize=(5.5 * count, 4.5))
    for name, style, by_size in _series(rows, "size"):
        times.plot(list(by_size), [row["ms"][name] for row in by_size.values()], **style)
    _draw_ratios(ratios, rows, "size")
    if overlaps:
        _draw_overlap(others[0], overlaps)
    for ax in (times, ratios, *others):
        ax.set(xscale="log", xlabel=rows[0]["unit"])
        plain_numbers(ax.xaxis, at=sorted({row["size"] for row in rows}))
    times.set(yscale="log", ylabel="milliseconds", title=kind)
    plain_numbers(times.yaxis)
    times.legend(fontsize="small")
    return figure


def _scaling(pyplot: Any, rows: Sequence[Written]) -> Any:
    """Draws the ratio to the limit over ranks, for the largest size of each kind."""
    kinds = _kinds(rows)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4.5), squeeze=False)
    for kind, ax in zip(kinds, axes[0], strict=True):
        chosen = [row for row in rows if row["kind"] == kind]
        chosen.sort(key=lambda row: (row["ranks"], row["size"]))
        _draw_ratios(ax, chosen, "ranks")
        ax.set(xlabel="ranks", title=kind)
        ax.set_xticks(sorted({row["ranks"] for row in chosen}))
        ax.legend(fontsize="small")
    return figure
