"""Timelines as files: for Perfetto or chrome://tracing, and as a Gantt chart.

Both take timelines by name; simulated (`simulate`) and measured (recorded) ones have one type.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Copy, Signal, Wait
from symm_cp.trusted import write_output

#: For each kind of step its name, and the colour of its bars.
_KINDS: dict[type, tuple[str, str]] = {
    Compute: ("compute", "#4c72b0"),
    Copy: ("copy", "#dd8452"),
    Wait: ("wait", "#c9c9c9"),
    Signal: ("signal", "#55a868"),
}


def _lanes(timeline: Timeline) -> list[tuple[int, str]]:
    """The lanes of all ranks; compute first."""
    return sorted({(e.rank, e.lane) for e in timeline.events}, key=lambda k: (k[0], k[1][::-1]))


def chrome(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Returns trace events (JSON Object Format of Chrome's tracing), with one process per rank.

    Times are in microseconds since the first event of each timeline.
    """
    rows: list[dict[str, Any]] = []
    process = 0
    for name, timeline in timelines.items():
        zero = timeline.begin
        numbers: dict[tuple[int, str], tuple[int, int]] = {}
        last = None
        for rank, lane in _lanes(timeline):
            if rank != last:
                process, last = process + 1, rank
                rows.append(_named("process_name", process, 0, f"rank {rank}, {name}"))
            numbers[rank, lane] = process, len(numbers)
            rows.append(_named("thread_name", process, len(numbers) - 1, lane))
        for event in timeline.events:
            pid, tid = numbers[event.rank, event.lane]
            rows.append(
                {
                    "ph": "X",
                    "name": str(event.step),
                    "cat": _KINDS[type(event.step)][0],
                    "pid": pid,
                    "tid": tid,
                    "ts": (event.start - zero) * 1e6,
                    "dur": (event.end - event.start) * 1e6,
                    "args": {"call": event.call, **({"op": event.op} if event.op else {})},
                }
            )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def save(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes the trace-event file."""
    write_output(Path(path), json.dumps(chrome(timelines)) + "\n")


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, set to write files; raises `RuntimeError` if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("a chart needs matplotlib: pip install 'symm_cp[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plain_numbers(*axes: Any, at: Sequence[float] = ()) -> None:
    """Labels logarithmic axes with plain numbers (16, not 1.6 x 10^1), only those `at` if given."""
    from matplotlib import ticker

    for axis in axes:
        if at:
            axis.set_major_locator(ticker.FixedLocator(list(at)))
            axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        if not at:
            axis.set_minor_formatter(ticker.LogFormatter())


def save_figure(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure in the format of the file's suffix (PNG without one)."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix.removeprefix(".") or "png")
    write_output(path, content.getvalue())


def draw(path: str | Path, timelines: Mapping[str, Timeline], title: str = "") -> None:
    """Writes a Gantt chart (PNG): timelines below each other, on one scale.

    Raises `RuntimeError` if matplotlib is missing.
    """
    pyplot = load_pyplot()
    from matplotlib import patches

    rows = [(name, rank, lane) for name, t in timelines.items() for rank, lane in _lanes(t)]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.38 * len(rows)))
    for name, timeline in timelines.items():
        zero = timeline.begin
        for event in timeline.events:
            row = rows.index((name, event.rank, event.lane))
            _bar(axes, row, event, zero)
    axes.set_yticks(range(len(rows)), [f"{name}: rank {r}, {lane}" for name, r, lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left", fontsize="medium", pad=24)
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in _KINDS.values()]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False}
    axes.legend(handles=handles, ncols=len(handles), fontsize="small", **place)
    figure.tight_layout()
    save_figure(figure, Path(path))
    pyplot.close(figure)


def _bar(axes: Any, row: int, event: Event, zero: float) -> None:
    start, length = (event.start - zero) * 1e3, (event.end - event.start) * 1e3
    colour = _KINDS[type(event.step)][1]
    if isinstance(event.step, Signal):
        axes.plot([start], [row + 0.33], marker="^", markersize=3, color=colour)
    else:
        style = {"color": colour, "edgecolor": "white", "linewidth": 0.4}
        axes.barh(row, length, left=start, height=0.7, **style)
