"""A device's work in a call: kernels, copies, and the longest time between kernels.

Read from a trace of torch's profiler (GPUs), in which a spinning kernel precedes each call, or from
`symm_cp.trace()` (any device), which sees the kernels of an op as one step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symm_cp.schedule.simulate import Timeline
from symm_cp.schedule.steps import Compute, Copy

#: The kernel of `torch.cuda._sleep`.
SPIN = "spin_kernel"
_COPIES = ("gpu_memcpy", "gpu_memset")

#: When something began, and when it ended.
Span = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """A call on a device: medians over several calls. Times are in microseconds."""

    kernels: int
    copies: int
    #: The longest time between two kernels in which no kernel ran.
    largest_gap_us: float
    #: The time in which some kernel ran.
    busy_us: float


def gaps(spans: Iterable[Span]) -> tuple[list[float], float]:
    """Returns the gaps between spans, and the time that spans cover."""
    between, busy, end = [], 0.0, None
    for begin, until in sorted(spans):
        if end is None or begin > end:
            if end is not None:
                between.append(begin - end)
            busy += until - begin
            end = until
        elif until > end:
            busy += until - end
            end = until
    return between, busy


def _profile(kernels: Sequence[Span], copies: Sequence[Span]) -> Profile:
    between, busy = gaps(kernels)
    return Profile(len(kernels), len(copies), max(between, default=0.0), busy)


def _medians(calls: Sequence[Profile]) -> Profile:
    def median(field: str) -> float:
        return statistics.median(getattr(call, field) for call in calls)

    counts = round(median("kernels")), round(median("copies"))
    return Profile(*counts, median("largest_gap_us"), median("busy_us"))


def of_profiler(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Reads the events of a trace of torch's profiler.

    Each call follows a spinning kernel, which has kept the device busy while the host issued the
    call: so gaps are the device's own. Raises `ValueError` for a trace without one.
    """
    on_device = sorted(
        (event for event in events if event.get("cat") in ("kernel", *_COPIES)),
        key=lambda event: event["ts"],
    )
    calls: list[tuple[list[Span], list[Span]]] = []
    for event in on_device:
        if SPIN in event["name"]:
            calls.append(([], []))
        elif calls:
            span = event["ts"], event["ts"] + event["dur"]
            calls[-1][event["cat"] in _COPIES].append(span)
    if not calls:
        raise ValueError(f"the trace has no {SPIN} among {len(on_device)} kernels and copies")
    return _medians([_profile(kernels, copies) for kernels, copies in calls])


def of_trace(path: Path) -> Profile:
    """Reads a file that torch's profiler has written."""
    return of_profiler(json.loads(path.read_text())["traceEvents"])


def of_recording(timeline: Timeline) -> Profile:
    """Reads a recording of one call by `symm_cp.trace()`."""
    spans: dict[type, list[Span]] = {Compute: [], Copy: []}
    for event in timeline.events:
        if type(event.step) in spans:
            spans[type(event.step)].append((event.start * 1e6, event.end * 1e6))
    return _profile(spans[Compute], spans[Copy])
