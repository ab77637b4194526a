"""The name of this machine, in results and in the names of files of measurements."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from functools import cache
from pathlib import Path

import torch


@cache
def processor_name() -> str:
    """Returns the model of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def machine_key() -> str:
    """Names the scope of measurements, in file names: processor, number of cores, torch version.

    Machines of several kinds may share a home folder. Counts all cores of the machine, since ranks
    may be bound to one each.
    """
    text = f"{processor_name()} {os.cpu_count()} cores torch {torch.__version__}"
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-")
