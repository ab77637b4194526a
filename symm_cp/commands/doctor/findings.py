"""The findings of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report; `state` is "ok", "missing" (with advice) or "info"."""

    section: str
    name: str
    state: str
    detail: str
    advice: str = ""
