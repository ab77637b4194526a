"""How long something may take on a machine that others use as well."""

from __future__ import annotations

import os
from pathlib import Path


def patient(seconds: float) -> float:
    """Returns what takes some seconds on an idle machine, times the tasks for each processor.

    Those that want to run now, or wanted to in the last minute, whichever are more.
    """
    average, _, _, running, *_ = Path("/proc/loadavg").read_text().split()
    tasks = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, tasks / len(os.sched_getaffinity(0)))
