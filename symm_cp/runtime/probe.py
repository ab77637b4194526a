"""Faults between the steps of a schedule, for tests: random delays, or a rank that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from symm_cp import native

#: Whether steps that run in Python must be counted by the native part.
active = False


class Steps:
    """The number of steps, once the block has ended."""

    count = 0


@contextmanager
def probing(*, seed: int = 0, delay_us: int = 0, fatal: int = -1) -> Iterator[Steps]:
    """Delays each step of this process by up to `delay_us`, at random, or kills it before one.

    `fatal` is the number of that step, from 0, among those inside; -1: none.
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
    """Counts a step that runs in Python, before it runs."""
    native.load().symm_cp_probe_step()
