"""Timelines as files: what Perfetto reads, and the chart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from symm_cp.schedule import trace
from symm_cp.schedule.patterns import ALL_GATHER_AND_CONSUME
from symm_cp.schedule.simulate import Event, Timeline, simulate
from symm_cp.schedule.steps import Compute, Copy, Signal, Step


def seconds(rank: int, step: Step) -> float:
    return {Compute: 2e-3, Copy: 1e-3}.get(type(step), 0.0)


TIMELINE = simulate([ALL_GATHER_AND_CONSUME.staged().schedules(3)] * 2, seconds, signal=1e-6)


def test_every_step_is_in_the_file(tmp_path: Path) -> None:
    trace.save(tmp_path / "t.json", {"simulated": TIMELINE, "again": TIMELINE})
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = [row for row in rows if row["ph"] == "M"]
    processes = [row["args"]["name"] for row in named if row["name"] == "process_name"]
    assert processes == [f"rank {r}, {name}" for name in ("simulated", "again") for r in range(3)]
    lanes = [row["args"]["name"] for row in named if row["name"] == "thread_name"]
    assert sorted(set(lanes)) == ["compute", "copy"]
    assert len(lanes) == 12
    steps = [row for row in rows if row["ph"] == "X"]
    assert len(steps) == 2 * len(TIMELINE.events)
    # Each lane has a place of its own, and its steps follow each other.
    assert len({row["pid"] for row in steps}) == 6
    for place in {(row["pid"], row["tid"]) for row in steps}:
        own = [row for row in steps if (row["pid"], row["tid"]) == place]
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    assert sum(row["dur"] for row in steps if row["cat"] == "compute") == pytest.approx(
        2 * 2 * 9 * 2000
    )


def test_times_begin_at_the_first_step() -> None:
    late = Timeline(
        (
            Event(0, "compute", 0, Signal(1, "ready"), 100.0, 100.5, "an op"),
            Event(0, "copy", 0, Compute("reduce", 0, (), ()), 100.25, 101.0),
        )
    )
    assert (late.begin, late.total) == (100.0, 1.0)
    rows = [row for row in trace.chrome({"measured": late})["traceEvents"] if row["ph"] == "X"]
    assert [(row["ts"], row["dur"]) for row in rows] == [(0.0, 5e5), (2.5e5, 7.5e5)]
    assert rows[0]["args"] == {"call": 0, "op": "an op"}


@pytest.mark.exhaustive
def test_the_chart(tmp_path: Path) -> None:
    trace.draw(tmp_path / "t.png", {"measured": TIMELINE, "simulated": TIMELINE}, "a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
