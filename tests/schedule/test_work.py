"""Predictions of ops against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp.schedule.machine import Curve, Machine
from symm_cp.schedule.patterns import ALL_GATHER_AND_CONSUME, PRODUCE_AND_REDUCE_SCATTER
from symm_cp.schedule.work import Work

#: Moving a byte takes a second; reading it from a peer takes half a second more.
SLOW = Machine(
    "slow",
    1.0,
    0.0,
    2.0,
    1.0,
    link_reached=1.0,
    kernel_seconds=0.0,
    signal_seconds=0.0,
    curves={"remote": Curve((1e-3, 1e3), (5e-4, 500.0))},
)
CONSUME = ALL_GATHER_AND_CONSUME.direct()
RANKS = st.integers(1, 8)
TIMES = st.floats(0.01, 100.0)


@settings(deadline=None)  # the first example builds schedules
@given(RANKS, TIMES, TIMES)
def test_consuming_in_place(ranks: int, kernel: float, shard: float) -> None:
    """A copy to the slot, then W kernels, of which W - 1 read from peers."""
    work = Work("op", CONSUME, lambda _: kernel, shard=shard)
    expected = ranks * kernel + (shard + (ranks - 1) * shard / 2 if ranks > 1 else 0.0)
    assert work.predict(SLOW, ranks).total == pytest.approx(expected)


@settings(deadline=None)  # the first example builds schedules
@given(RANKS, TIMES, TIMES)
def test_producing(ranks: int, kernel: float, partial: float) -> None:
    """W kernels, then a sum that reads W partial sums and writes one."""
    work = Work("op", PRODUCE_AND_REDUCE_SCATTER.direct(), lambda _: kernel, partial=partial)
    expected = ranks * kernel + (ranks + 1) * partial / 2
    assert work.predict(SLOW, ranks).total == pytest.approx(expected)


@settings(deadline=None)  # the first example builds schedules
@given(RANKS, TIMES, TIMES)
def test_staged_transfers_hide_behind_kernels(ranks: int, kernel: float, shard: float) -> None:
    """A pull ends at (t + 2) copies, a kernel begins when it and the kernel before have ended."""
    work = Work("op", ALL_GATHER_AND_CONSUME.staged(), lambda _: kernel, shard=shard)
    end = kernel
    for turn in range(1, ranks):
        end = max(end, (turn + 1) * shard) + kernel
    assert work.predict(SLOW, ranks).total == pytest.approx(end)


def test_a_call_and_new_memory_are_paid_once() -> None:
    machine = replace(SLOW, calls={"op": 5.0}, curves={"fresh": Curve((1.0, 10.0), (2.0, 20.0))})
    for ranks in (1, 2, 5):
        work = Work("op", CONSUME, lambda _: 1.0, fresh=10.0)
        assert work.predict(machine, ranks).total == pytest.approx(ranks + 5.0 + 20.0)
        other = replace(work, op="another", fresh=0.0)
        assert other.predict(machine, ranks).total == pytest.approx(ranks)
        assert work.predict(machine, ranks, calls=3).total == pytest.approx(3 * (ranks + 25.0))
