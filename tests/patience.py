"""How long something may take on a machine that others use as well."""

from __future__ import annotations

import os
from pathlib import Path


def patient(seconds: float) -> float:
    """Returns `seconds`, the time on an idle machine, times the tasks for each processor.

    Counts tasks that are runnable now, or were on average in the last minute, whichever is more.
    """
    average, _, _, running, *_ = Path("/proc/loadavg").read_text().split()
    tasks = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, tasks / len(os.sched_getaffinity(0)))
