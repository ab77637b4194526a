"""All environment variables of symm_cp, read when they are used.

| variable | meaning | default |
|---|---|---|
| `SYMM_CP_BUILD_DIR` | folder of built code and of `symm-cp tune`'s tables | `~/.cache/symm_cp` |
| `SYMM_CP_TIMEOUT_MS` | how long an op waits for a peer, in milliseconds | the group's time-out |
| `SYMM_CP_SELFTEST` | 0: use GPUs without first testing what works between them | 1 |
| `SYMM_CP_ATTENTION` | `pipeline`, on CUDA also `together` (tuning.py) | as tuned |
| `SYMM_CP_DEBUG` | 1: ranks compare their calls first on CUDA (they always do on CPU) | 0 |
| `SYMM_CP_DEBUG_OFFSETS` | a seed: moves slots and scratch by multiples of 64 bytes | unset |
| `SYMM_CP_ALGORITHM` | `shards`, `whole`, on CUDA also `lanes`, `tiles`, of matmuls | as tuned |
| `SYMM_CP_BACKEND_FOR` | backends that symm_cp replaces on CPU (`symm-cp run` sets it) | none |
| `SYMM_CP_PLANS` | 0: Python makes each call, no recorded plan does | 1 |
| `SYMM_CP_KEEP_MIB` | freed result memory that a process keeps for later results, in MiB | below |
| `SYMM_CP_THREADS` | threads of a rank that copy and reduce: `one`, or `all` of torch's | below |
| `SYMM_CP_BACKGROUND_THREADS` | threads that copy and reduce in asynchronous ops, per group | 1 |
| `SYMM_CP_HUGE_PAGES` | 1: symmetric memory takes huge pages that the system has reserved | 0 |
| `SYMM_CP_READ_MESSAGES` | 1: read long messages in the sender's memory; 0: never | below |
| `SYMM_CP_COMPARE_INPUTS` | 0: ranks do not compare batches, prompts, weights | 1 |
| `SYMM_CP_HOST` | identity of this host within a group | boot id and network namespace |
| `CXX` | the C++ compiler that builds the native part | `c++`, else `g++`, else `clang++` |

`SYMM_CP_KEEP_MIB` defaults to 1/32 of the memory of the machine or container, at most 1024. With
0, large results come from torch's allocator, like all others.

By default, large copies and reductions take all of torch's threads in the process
(`OMP_NUM_THREADS`, `torch.set_num_threads`) if the ranks of the group may run on enough cores for
one core per thread, and else one thread.

Unless `SYMM_CP_READ_MESSAGES` is set, a rank reads a message in the sender's memory if the sender
goes on meanwhile; if the sender waits, both copy at the same time through a ring.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Container
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

# The dict of bytes behind `os.environ`. `os.environ`'s own look-up raises and catches an error for
# an unset variable: a microsecond, several times in each op.
_variables: Container[bytes] | None = getattr(os.environ, "_data", None)


def _get(name: str, default: str = "") -> str:
    if _variables is not None and name.encode() not in _variables:
        return default
    return os.environ.get(name, default)


def _flag(name: str, default: str = "") -> bool:
    text = _get(name, default)
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r} must be 0 or 1")
    return text == "1"


#: Set by commands for their own processes, and by tests.
_INTERNAL = ("COMPARE", "CUDA_ON_CPU", "EXPLAIN", "EXPLAIN_EAGER", "NUMA")
_RENAMED = {"SYMM_CP_WAY": "SYMM_CP_ALGORITHM"}


def warn_of_unknown() -> None:
    """Warns of variables that are set and have no meaning: they may be misspelled."""
    known = re.findall(r"^\| `(SYMM_CP_\w+)`", __doc__ or "", re.MULTILINE)
    given = [name for name in os.environ if known and name.startswith("SYMM_CP_")]
    for name in {*given} - {*known, *(f"SYMM_CP_{each}" for each in _INTERNAL)}:
        if not name.startswith(("SYMM_CP_TEST_", "SYMM_CP_SUITE_")):
            nearest = [_RENAMED[name]] if name in _RENAMED else get_close_matches(name, known, 1)
            advice = f"; did you mean {nearest[0]}?" if nearest else ""
            warnings.warn(f"symm_cp: {name} is set but has no meaning{advice}", stacklevel=3)


class NoHomeError(RuntimeError):
    """The user has no home folder, and `SYMM_CP_BUILD_DIR` is not set."""


def build_dir() -> Path:
    """Returns the folder of built native parts and tables of `tune`; raises `NoHomeError`."""
    chosen = os.environ.get("SYMM_CP_BUILD_DIR")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification: relative paths are ignored
        with suppress(RuntimeError):  # neither HOME nor an entry for the user
            cache = (Path.home() if os.environ.get("HOME") != "" else Path()) / ".cache"
    if not cache.is_absolute():
        raise NoHomeError(
            f"user {os.getuid()} has no home folder (HOME): set SYMM_CP_BUILD_DIR to a folder that "
            "only this user can write"
        )
    return cache / "symm_cp"


def timeout_ms() -> int:
    """Returns the time-out of waits in milliseconds; 0 means the group's time-out."""
    text = os.environ.get("SYMM_CP_TIMEOUT_MS", "0")
    if not text.isdigit():
        raise ValueError(
            f"SYMM_CP_TIMEOUT_MS={text!r} must be milliseconds, or 0 for the group's time-out"
        )
    return int(text)


def selftest() -> bool:
    """Whether groups test at first use what works between their devices."""
    return _flag("SYMM_CP_SELFTEST", "1")


def attention() -> str | None:
    """Returns the algorithm that attention on CUDA must take, if any."""
    text = _get("SYMM_CP_ATTENTION") or None
    if text not in (None, "pipeline", "together"):
        raise ValueError(f"SYMM_CP_ATTENTION={text!r} must be 'pipeline' or 'together'")
    return text


def algorithm() -> str | None:
    """Returns the algorithm that fused matmuls must take, if any."""
    text = _get("SYMM_CP_ALGORITHM") or None
    algorithms = "shards", "whole", "lanes", "tiles"
    if text not in (None, *algorithms):
        raise ValueError(f"SYMM_CP_ALGORITHM={text!r} must be one of {algorithms}")
    return text


def debug() -> bool:
    """Whether ranks compare their calls on devices before making them."""
    return _flag("SYMM_CP_DEBUG", "0")


def plans() -> bool:
    """Whether calls on streams are recorded, and later calls replayed without Python."""
    return _flag("SYMM_CP_PLANS", "1")


def debug_offsets() -> int | None:
    """Returns the seed for moving buffers to other addresses, if any."""
    text = _get("SYMM_CP_DEBUG_OFFSETS") or None
    if text is not None and not text.isdigit():
        raise ValueError(f"SYMM_CP_DEBUG_OFFSETS={text!r} must be a number, the same on all ranks")
    return None if text is None else int(text)


def kept_bytes() -> int:
    """Returns how much memory of freed results a process keeps; -1 means the default."""
    text = os.environ.get("SYMM_CP_KEEP_MIB") or None
    if text is not None and not text.isdigit():
        raise ValueError(f"SYMM_CP_KEEP_MIB={text!r} must be a number of MiB, 0 to keep none")
    return -1 if text is None else int(text) << 20


def threads() -> int:
    """Returns which threads copy and reduce, as csrc/base/team.h numbers them."""
    text = _get("SYMM_CP_THREADS") or None
    if text not in (None, "one", "all"):
        raise ValueError(f"SYMM_CP_THREADS={text!r} must be 'one' or 'all'")
    return {"one": 0, None: 1, "all": 2}[text]


def background_threads() -> int:
    """Returns how many threads the engine of asynchronous ops has in each group."""
    text = _get("SYMM_CP_BACKGROUND_THREADS", "1")
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"SYMM_CP_BACKGROUND_THREADS={text!r} must be a number of threads")
    return int(text)


def read_messages() -> bool | None:
    """Whether this rank reads long messages in senders' memory; None: if the sender goes on."""
    return _flag("SYMM_CP_READ_MESSAGES") if _get("SYMM_CP_READ_MESSAGES") else None


def compare_inputs() -> bool:
    """Whether ranks compare inputs that must be equal on all of them."""
    return _flag("SYMM_CP_COMPARE_INPUTS", "1")


def host() -> str | None:
    """Returns the identity of the host that the user chose, if any."""
    return os.environ.get("SYMM_CP_HOST") or None


def backend_for() -> tuple[str, ...]:
    """Returns the names of the backends that symm_cp replaces on CPU in this process."""
    text = os.environ.get("SYMM_CP_BACKEND_FOR", "")
    return tuple(name for name in text.split(",") if name)


def compiler() -> str | None:
    """Returns the compiler that the user chose, if any."""
    return os.environ.get("CXX") or None
