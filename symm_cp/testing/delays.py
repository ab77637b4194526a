"""Random delays around every wait in a test run: up to `SYMM_CP_TEST_DELAYS` microseconds.

They pause threads of a test's processes before and after waits, before signals and requests to
stores: code that does not wait for a peer that it needs fails sooner or later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from symm_cp import native

VARIABLE = "SYMM_CP_TEST_DELAYS"


def begin(seed: int) -> None:
    """Starts the delays of this process, drawn with `seed`, if the variable is set."""
    if longest := int(os.environ.get(VARIABLE) or 0):
        native.load().symm_cp_set_pauses(seed, longest)


class Steps:
    """The number of steps, once the block has ended."""

    count = 0


@contextmanager
def probing(*, seed: int = 0, delay_us: int = 0, fatal: int = -1) -> Iterator[Steps]:
    """Delays this process's steps by up to `delay_us`, or kills it before step `fatal`.

    Delays are random. The steps inside the block count from 0; `fatal` -1: none.
    """
    library = native.load()
    steps = Steps()
    library.symm_cp_probe_begin(seed, delay_us, fatal)
    try:
        yield steps
    finally:
        steps.count = library.symm_cp_probe_end()
