"""Compiled libraries in a wheel, so that its users need no compiler.

`python -m symm_cp.native` compiles them, for processor levels with psABI's names. A library
works with all releases of one minor version of torch, which share a C++ interface. A level is used
if the processor has all its features; if none fits, the native part is built from its sources.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

import torch

from symm_cp.native.compiler import FLAGS, processor
from symm_cp.native.sources import Sources

#: The folder of the libraries in a wheel, with a subfolder for each key.
FOLDER = Path(__file__).resolve().parent / "prebuilt"
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
#: Levels of each architecture, the best first, and their required features.
LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3},
    "aarch64": {"armv8-a": frozenset()},
}


def levels() -> dict[str, frozenset[str]]:
    """Returns the levels of this architecture, none if it has no prebuilt libraries."""
    return LEVELS.get(platform.machine(), {})


def key(sources: Sources, level: str) -> str:
    """Returns the key of a library for a level: sources, torch's minor version, Python, flags."""
    minor = ".".join(torch.__version__.split(".")[:2])
    parts = (sources.all_digest, minor, str(sysconfig.get_config_var("SOABI")), str(FLAGS), level)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def find(sources: Sources, name: str) -> Path | None:
    """Returns this installation's best library of a name for this processor, if any."""
    if not FOLDER.is_dir():
        return None
    features = set(processor().split())
    for level, needed in levels().items():
        path = FOLDER / key(sources, level) / name
        if needed <= features and path.is_file():
            return path
    return None
