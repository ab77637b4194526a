"""Reports as HTML: for each graph a picture of its predicted timeline, and a table of collectives.

The input is the output of `symm-cp explain --json`. The page has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
.symm-cp{font:14px/1.4 system-ui,sans-serif;color:#222;background:#fff;padding:1em}
.symm-cp table{border-collapse:collapse;margin:.5em 0}
.symm-cp th,.symm-cp td{border:1px solid #ccc;padding:.2em .6em;text-align:left;vertical-align:top}
.symm-cp td.number{text-align:right;white-space:nowrap}
.symm-cp svg{width:100%;height:auto;font:11px system-ui,sans-serif}
.symm-cp rect{stroke:#fff;stroke-width:.4}
.symm-cp rect.lane{fill:#f2f2f2;stroke:none}
.symm-cp rect.compute{fill:#4878a8}
.symm-cp rect.communication{fill:#e0a030}
.symm-cp rect.exposed{fill:#c83232}
"""
_LEFT, _WIDTH, _HEIGHT, _GAP = 110, 1000, 22, 6
_LANES = ("compute", "communication")
_LEGEND = (
    "Blue: kernels. Yellow: communication. Red: the rank only waits for communication (exposed). "
    "Predicted in graph order; point at a part for its name."
)


def document(
    graphs: Sequence[Mapping[str, Any]], breaks: Mapping[str, int], *, command: Sequence[str]
) -> str:
    """Returns a page on the graphs of all ranks."""
    title = f"symm-cp explain: {' '.join(command)}"
    advice: dict[str, list[str]] = {}
    for graph in graphs:
        for each in graph["collectives"]:
            if each["advice"]:
                advice.setdefault(each["advice"], []).append(each["name"])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{fragment(graphs, breaks, advice)}\n</body></html>\n"
    )


def fragment(
    graphs: Sequence[Mapping[str, Any]],
    breaks: Mapping[str, int],
    advice: Mapping[str, Sequence[str]],
) -> str:
    """Returns the report as one element that can be embedded in any page."""
    parts = [f'<div class="symm-cp"><style>{_STYLE}</style>', f"<p>{_LEGEND}</p>"]
    if not graphs:
        parts.append("<p>No graph with a collective was compiled.</p>")
    for graph in graphs:
        parts += _graph(graph)
    parts += _list("Graph breaks", (f"{text} ({count} x)" for text, count in breaks.items()))
    # Each piece of advice appears once, and lists each collective's name once.
    what = (f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in advice.items())
    return "\n".join([*parts, *_list("What to change", what), "</div>"])


def title_of(graph: Mapping[str, Any]) -> str:
    """Returns the heading of a graph."""
    if graph.get("eager"):
        fusible = sum(bool(each["could_be"]) for each in graph["collectives"])
        return f"called by uncompiled code; symm_cp could fuse or hide {fusible}"
    joint = ", of forward and backward before they are split" if graph.get("joint") else ""
    return f"graph {graph['graph']}{joint}"


def fate_of(each: Mapping[str, Any]) -> str:
    """Returns how the passes replaced a collective, or why they did not."""
    if each["fused_into"]:
        return f"fused into {each['fused_into']}"
    if each["runs_as"]:
        return f"runs as {each['runs_as']}: {each['reason']}"
    return f"left alone: {each['reason']}"


def _graph(graph: Mapping[str, Any]) -> Iterable[str]:
    rank = f"rank {graph['rank']}, " if "rank" in graph else ""
    yield f"<section><h2>{escape(rank + title_of(graph))}</h2>"
    if timeline := graph.get("timeline"):
        yield _summary(timeline)
        yield _picture(timeline)
    if graph["collectives"]:
        yield _table(graph["collectives"])
    yield "</section>"


def _summary(timeline: Mapping[str, Any]) -> str:
    cells = "".join(
        f'<td class="number {kind}">{timeline[f"{kind}_us"]}</td>'
        for kind in ("total", "compute", "communication", "exposed")
    )
    return (
        "<table><tr><th>total, us</th><th>kernels</th><th>communication</th><th>exposed</th>"
        f"<th>machine</th></tr><tr>{cells}<td>{escape(timeline['machine'])}</td></tr></table>"
    )


def _picture(timeline: Mapping[str, Any]) -> str:
    spans = timeline["spans"]
    end = max((span["start_us"] + span["us"] for span in spans), default=0.0) or 1.0
    height = len(_LANES) * (_HEIGHT + _GAP) + 16
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" '
        'role="img">'
    ]
    for row, lane in enumerate(_LANES):
        top = row * (_HEIGHT + _GAP)
        parts.append(f'<text x="0" y="{top + 15}">{lane}</text>')
        parts.append(_rect("lane", 0, 1, top))
        for span in spans:
            if span["lane"] == lane:
                begin, width = span["start_us"] / end, span["us"] / end
                data = f' data-start-us="{span["start_us"]}" data-us="{span["us"]}"'
                what = "waits for " if span["kind"] == "exposed" else ""
                told = f"{what}{span['name']}: {span['us']} us from {span['start_us']} us"
                parts.append(_rect(span["kind"], begin, width, top, data, escape(told)))
    parts.append(f'<text x="{_LEFT}" y="{height - 3}">0</text>')
    parts.append(
        f'<text x="{_LEFT + _WIDTH}" y="{height - 3}" text-anchor="end">{end:.4g} us</text></svg>'
    )
    return "\n".join(parts)


def _rect(kind: str, begin: float, width: float, top: int, data: str = "", told: str = "") -> str:
    x, wide = _LEFT + begin * _WIDTH, width * _WIDTH
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{top}" width="{wide:.2f}" height="{_HEIGHT}"{data}>'
        f"<title>{told}</title></rect>"
    )


def _table(collectives: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{escape(each['name'])}</td>"
        f'<td class="number">{each["bytes"]}</td><td class="number">{each["ranks"]}</td>'
        f'<td class="number">{each["calls"]}</td>'
        f'<td class="number">{each["exposed_us"]}</td><td>{escape(fate_of(each))}</td></tr>'
        for each in collectives
    ]
    head = "<tr><th>collective</th><th>bytes</th><th>ranks</th><th>calls</th><th>exposed, us</th>"
    return f"<table>{head}<th>what became of it</th></tr>\n{chr(10).join(rows)}</table>"


def _list(title: str, lines: Iterable[str]) -> Iterable[str]:
    items = [f"<li>{escape(line)}</li>" for line in lines]
    return [f"<h2>{title}</h2><ul>", *items, "</ul>"] if items else []
