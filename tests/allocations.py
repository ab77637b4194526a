"""What torch allocates while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated(run: Callable[[], Any]) -> list[int]:
    """The bytes that are allocated (or freed, then negative) on the CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    # `profiler.events()` omits allocations within an op.
    found = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = [event for event in found if event.name() == "[memory]"]
    assert events
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that torch's tensors took at a time while `run` ran."""
    now = most = 0
    for nbytes in allocated(run):
        now += nbytes
        most = max(most, now)
    return most
