"""Compiles the native part for wheels: `python -m symm_cp.native [LEVEL ...]`.

Compiles for the installed torch and Python, once for each processor level (by default all levels of
this architecture), into the folder of this checkout from which wheels take it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from symm_cp.native import prebuilt
from symm_cp.native.building import build_for
from symm_cp.native.errors import BuildError


def main(names: Sequence[str]) -> int:
    """Compiles for the levels of these names; returns an exit code."""
    if unknown := set(names) - set(prebuilt.levels()):
        known = ", ".join(prebuilt.levels()) or "none for this architecture"
        print(f"unknown levels: {', '.join(sorted(unknown))}; known: {known}", file=sys.stderr)
        return 2
    for level in names or prebuilt.levels():
        try:
            print(build_for(level))
        except BuildError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
