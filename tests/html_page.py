"""Reads the pages of `symm-cp explain --html`."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

_EMPTY = {"meta"}  # elements without an end tag


class Page(HTMLParser):
    """The cells of tables, the items of lists, and the parts of pictures, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.items: list[str] = []
        self.spans: list[tuple[str, float, float]] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes the numbers of a part of a picture."""
        if tag not in _EMPTY:
            self._open.append(tag)
        given = dict(attrs)
        if "data-us" in given:
            start, us = given["data-start-us"], given["data-us"]
            self.spans.append((given["class"] or "", float(start or 0), float(us or 0)))
        for texts, name in ((self.cells, "td"), (self.items, "li"), (self.headings, "h2")):
            if tag == name:
                texts.append("")
        assert tag not in ("script", "link", "img", "iframe")
        assert not given.keys() & {"src", "href", "onclick", "onload"}

    def handle_endtag(self, tag: str) -> None:
        """Elements end in the order in which they began."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Takes texts."""
        for texts, name in ((self.cells, "td"), (self.items, "li"), (self.headings, "h2")):
            if name in self._open:
                texts[-1] += data

    def check(self, graphs: Sequence[dict[str, Any]]) -> None:
        """The page shows the numbers that the JSON has."""
        cells, spans = [], []
        for graph in graphs:
            if timeline := graph["timeline"]:
                kinds = ("total", "compute", "communication", "exposed")
                cells += [str(timeline[f"{kind}_us"]) for kind in kinds] + [timeline["machine"]]
                for lane in ("compute", "communication"):
                    own = [span for span in timeline["spans"] if span["lane"] == lane]
                    spans += [(span["kind"], span["start_us"], span["us"]) for span in own]
            for each in graph["collectives"]:
                numbers = (each[name] for name in ("bytes", "ranks", "calls", "exposed_us"))
                fate = each["fused_into"] or each["reason"]
                cells += [each["name"], *map(str, numbers), fate]
        assert len(self.cells) == len(cells)
        for shown, wanted in zip(self.cells, cells, strict=True):
            assert shown.endswith(wanted)
        assert self.spans == spans
