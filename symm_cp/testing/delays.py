"""Random delays around every wait in a test run: up to `SYMM_CP_TEST_DELAYS` microseconds.

They pause threads of a test's processes before and after waits, before signals and requests to
stores: code that does not wait for a peer that it needs fails sooner or later.
"""

from __future__ import annotations

import os

from symm_cp import native

VARIABLE = "SYMM_CP_TEST_DELAYS"


def begin(seed: int) -> None:
    """Starts the delays of this process, drawn with `seed`, if the variable is set."""
    if longest := int(os.environ.get(VARIABLE) or 0):
        native.load().symm_cp_set_pauses(seed, longest)
