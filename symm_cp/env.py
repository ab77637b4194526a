"""The environment variables of symm_cp, all of them, read when they are used.

| variable | meaning | default |
|---|---|---|
| `SYMM_CP_BUILD_DIR` | where built code and measurements are kept | `~/.cache/symm_cp` |
| `SYMM_CP_TIMEOUT_MS` | how long an op waits for a peer, in milliseconds | the group's time-out |
| `SYMM_CP_SIGNALS` | who signals between GPUs: `stream`s or torch's `kernel`s | `stream` |
| `SYMM_CP_ATTENTION` | on CUDA: a `pipeline` of kernels, or one that polls (`arrival`) | as tuned |
| `SYMM_CP_DEBUG` | 1: on CUDA, ranks compare their calls first (always so on CPU) | 0 |
| `SYMM_CP_DEBUG_OFFSETS` | a number: moves slots and scratch, by multiples of 64 bytes | unset |
| `SYMM_CP_WAY` | how fused matmuls go: by `shards`, or `whole` | by simulation |
| `SYMM_CP_HOST` | what tells this host from others in a group | boot id and network namespace |
| `CXX` | the C++ compiler that builds the native part | `c++`, else `g++`, else `clang++` |
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class NoHomeError(RuntimeError):
    """Nobody knows where this user's files are kept."""


def build_dir() -> Path:
    """Returns the folder of built native parts, calibrations and tunings; raises `NoHomeError`."""
    chosen = os.environ.get("SYMM_CP_BUILD_DIR")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # to be ignored, says the specification
        with suppress(RuntimeError):  # neither HOME nor an entry for the user
            cache = (Path.home() if os.environ.get("HOME") != "" else Path()) / ".cache"
    if not cache.is_absolute():
        raise NoHomeError(
            f"user {os.getuid()} has no home folder (HOME): set SYMM_CP_BUILD_DIR to a folder that "
            "only this user can write"
        )
    return cache / "symm_cp"


def timeout_ms() -> int:
    """Returns the wait limit in milliseconds; 0 stands for the time-out of the group."""
    text = os.environ.get("SYMM_CP_TIMEOUT_MS", "0")
    if not text.isdigit():
        raise ValueError(
            f"SYMM_CP_TIMEOUT_MS={text!r} is not a number: give milliseconds, 0 for the group's own"
        )
    return int(text)


def signals() -> str:
    """Returns how GPUs signal each other: "stream" or "kernel"."""
    text = os.environ.get("SYMM_CP_SIGNALS", "stream")
    if text not in ("stream", "kernel"):
        raise ValueError(f"SYMM_CP_SIGNALS={text!r} must be 'stream' or 'kernel'")
    return text


def attention() -> str | None:
    """Returns the way that attention on CUDA is forced to take, if any."""
    text = os.environ.get("SYMM_CP_ATTENTION") or None
    if text not in (None, "pipeline", "arrival"):
        raise ValueError(f"SYMM_CP_ATTENTION={text!r} must be 'pipeline' or 'arrival'")
    return text


def way() -> str | None:
    """Returns the way that fused matmuls are forced to take, if any."""
    text = os.environ.get("SYMM_CP_WAY") or None
    if text not in (None, "shards", "whole"):
        raise ValueError(f"SYMM_CP_WAY={text!r} must be 'shards' or 'whole'")
    return text


def debug() -> bool:
    """Returns whether ranks compare their calls on devices before they make them."""
    text = os.environ.get("SYMM_CP_DEBUG", "0")
    if text not in ("0", "1"):
        raise ValueError(f"SYMM_CP_DEBUG={text!r} must be 0 or 1")
    return text == "1"


def debug_offsets() -> int | None:
    """Returns the seed by which buffers are moved to other addresses, if they are."""
    text = os.environ.get("SYMM_CP_DEBUG_OFFSETS") or None
    if text is not None and not text.isdigit():
        raise ValueError(f"SYMM_CP_DEBUG_OFFSETS={text!r} must be a number, the same on all ranks")
    return None if text is None else int(text)


def host() -> str | None:
    """Returns the identity of the host that the user chose, if any."""
    return os.environ.get("SYMM_CP_HOST") or None


def compiler() -> str | None:
    """Returns the compiler that the user chose, if any."""
    return os.environ.get("CXX") or None
