"""Measurements of this machine: their file names, and the sizes that the native part loads."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from symm_cp import env, trusted


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


def divided_path(threads: int) -> Path:
    """Returns the path of the size from which `threads` threads share copies and reductions."""
    return env.build_dir() / f"divided_{threads}_{machine_key()}.toml"


def to_toml(divided_from: int) -> str:
    """Returns the text of the file at `divided_path`."""
    return f"divided_from = {divided_from}\n"


def divided_from(say: Callable[[str], object]) -> dict[int, int]:
    """Returns the sizes in bytes, by threads, that `symm-cp calibrate` has measured here.

    Calls `say` for each file that is not used, with the reason.
    """
    found: dict[int, int] = {}
    with contextlib.suppress(env.NoHomeError, OSError):
        for path in sorted(env.build_dir().glob("divided_*.toml")):
            threads = path.name.split("_")[1]
            if not threads.isdigit() or path.name != divided_path(int(threads)).name:
                continue
            try:
                found[int(threads)] = _parse(trusted.read(path).decode())
            except (OSError, ValueError) as error:
                say(f"not used: {path}: {error}: delete it, or run symm-cp calibrate again")
    return found


def _parse(text: str) -> int:
    size = tomllib.loads(text).get("divided_from")
    if not isinstance(size, int) or not 0 < size < 1 << 62:
        raise ValueError(f"divided_from must be a number of bytes, not {size!r}")
    return size
