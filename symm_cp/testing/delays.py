"""Random delays around every wait of a run of tests: `SYMM_CP_TEST_DELAYS`, in microseconds.

They pause threads of a test's processes before and after waits, before signals and requests to
stores: code that does not wait for a peer that it needs fails sooner or later.
"""

from __future__ import annotations

import os

from symm_cp import native

VARIABLE = "SYMM_CP_TEST_DELAYS"


def begin(seed: int) -> None:
    """Draws the delays of this process from `seed` from now on, if the variable asks for any."""
    if longest := int(os.environ.get(VARIABLE) or 0):
        native.load().symm_cp_set_pauses(seed, longest)
