"""Faults between the steps of a schedule, for tests: a rank that dawdles, or that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from symm_cp import native

#: Whether steps that Python carries out have to be told to the native part.
active = False


class Steps:
    """How many steps there were, once the block has ended."""

    count = 0


@contextmanager
def probing(*, seed: int = 0, delay_us: int = 0, fatal: int = -1) -> Iterator[Steps]:
    """Pauses before steps of this process, at random up to `delay_us`, or kills it before one.

    `fatal` is the number of that step, from 0, of those inside; -1: none.
    """
    global active
    library = native.load()
    steps = Steps()
    library.symm_cp_probe_begin(seed, delay_us, fatal)
    active = True
    try:
        yield steps
    finally:
        active = False
        steps.count = library.symm_cp_probe_end()


def step() -> None:
    """A step that Python carries out comes next."""
    native.load().symm_cp_probe_step()
