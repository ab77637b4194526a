"""Whether this process is the command `symm-cp`. It answers `--help` before torch is imported."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

#: The script's names, as installed by `pip` and on Windows.
_SCRIPTS = ("symm-cp", "symm-cp.exe", "symm-cp-script.py")


def as_command() -> bool:
    """Whether `symm-cp` or `python -m symm_cp` has started this process."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # until Python has found the module to run
        return ("-m", "symm_cp") in itertools.pairwise(getattr(sys, "orig_argv", ()))
    return Path(program).name in _SCRIPTS
