"""Which stores to slots go past the caches, by the time that they took."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from symm_cp import native

#: Seconds a byte.
FAST, SLOW = 1e-10, 4e-10
#: Bytes of the smallest stores that are measured.
LEAST = 4096


def chosen(usual: Sequence[float], past: Sequence[float]) -> list[bool]:
    """For each store, whether it goes past the caches, given the times of both ways."""
    count = len(usual)
    paces = ctypes.c_double * count
    answers = (ctypes.c_uint8 * count)()
    native.load().symm_cp_slot_stores(LEAST, paces(*usual), paces(*past), count, answers)
    return [bool(answer) for answer in answers]


def test_the_usual_way_stays_unless_it_takes_far_longer() -> None:
    for pace in (FAST, 1.5 * FAST):
        past = chosen([pace] * 1000, [FAST] * 1000)
        assert sum(past[4:]) == 1000 // 64  # to see how long they take
        assert sum(past[:4]) == 2


def test_stores_that_are_slow_go_past_the_caches() -> None:
    past = chosen([SLOW] * 1000, [FAST] * 1000)
    assert sum(past[4:]) == 996 - 1000 // 64


def test_changes_are_noticed() -> None:
    """As when the ranks move to cores that share a cache, and back."""
    usual = [FAST] * 500 + [SLOW] * 500 + [FAST] * 500
    past = chosen(usual, [1.2 * FAST] * 1500)
    assert not any(past[448:502])
    assert all(past[502:511])
    assert not any(past[1100:1150])


def test_an_interruption_changes_nothing() -> None:
    usual = [FAST] * 1000
    usual[300] = usual[700] = 1e-6
    assert chosen(usual, [FAST] * 1000) == chosen([FAST] * 1000, [FAST] * 1000)
