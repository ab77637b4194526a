"""Draws README.md's picture from the schedules: `python benchmarks/readme_picture.py`.

Times are made up: a kernel on a shard takes 1 ms, a copy of a shard 0.6 ms. Needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from symm_cp.schedule.patterns import ALL_GATHER_AND_CONSUME
from symm_cp.schedule.simulate import Event, Timeline, simulate
from symm_cp.schedule.steps import Compute, Copy, Region, Step
from symm_cp.schedule.trace import draw

PICTURE = Path(__file__).resolve().parent / "results" / "overlap.png"
RANKS, KERNEL, COPY = 4, 1e-3, 0.6e-3


def cost(_: int, step: Step) -> float:
    return KERNEL if isinstance(step, Compute) else COPY if isinstance(step, Copy) else 0.0


def of_rank_0(timeline: Timeline) -> Timeline:
    return Timeline(tuple(event for event in timeline.events if event.rank == 0))


def on_one_lane(copies: int) -> Timeline:
    """Copies, then one kernel for each shard."""
    own, gathered = Region(0, "input"), Region(0, "gathered")
    steps: list[Step] = [Copy(own, gathered)] * copies
    events, now = [], 0.0
    for step in (*steps, *[Compute("consume", 0, (gathered,), ())] * RANKS):
        events.append(Event(0, "compute", 0, step, now, now + cost(0, step)))
        now += cost(0, step)
    return Timeline(tuple(events))


if __name__ == "__main__":
    on_cuda = ALL_GATHER_AND_CONSUME.staged(in_place=True).schedules(RANKS)
    timelines = {
        "unfused": on_one_lane(copies=RANKS - 1),
        "fused on CPU, peers' memory read in place": on_one_lane(copies=0),
        "fused on CUDA (experimental)": of_rank_0(simulate([on_cuda], cost)),
    }
    draw(PICTURE, timelines, "all-gather-matmul on 4 ranks")
