"""The simulator against closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp.schedule import Compute, Copy, Schedule, Signal, Step, Wait
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    ALL_GATHER_AND_POLL,
    EXCHANGE_AND_CONSUME,
    PRODUCE_AND_REDUCE_SCATTER,
    REDUCE_SCATTER,
)
from symm_cp.schedule.simulate import DeadlockError, simulate
from tests.schedule.calls import PLACES, Place

TIMES = st.floats(0.001, 10.0)
STAGED = ALL_GATHER_AND_CONSUME.staged()


def costs(compute: float, copy: float):  # type: ignore[no-untyped-def]
    def cost(rank: int, step: Step) -> float:
        return compute if isinstance(step, Compute) else copy if isinstance(step, Copy) else 0.0

    return cost


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(1, 8), TIMES)
def test_without_copies_a_pipeline_takes_the_time_of_its_kernels(ranks: int, kernel: float) -> None:
    timeline = simulate([STAGED.schedules(ranks)], costs(kernel, 0.0))
    assert timeline.total == pytest.approx(ranks * kernel)
    assert timeline.busy(0, Compute) == pytest.approx(ranks * kernel)


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(2, 8), TIMES, TIMES)
def test_a_pulled_pipeline_takes_the_longer_of_copies_and_kernels(
    ranks: int, kernel: float, copy: float
) -> None:
    """Equal shards: one copy to the slot, then W - 1 pulls; W kernels, the first at once."""
    timeline = simulate([STAGED.schedules(ranks)], costs(kernel, copy))
    # Pull t ends at (t + 1) copies; kernel t begins when it and kernel t - 1 have ended.
    end = kernel
    for turn in range(1, ranks):
        end = max(end, (turn + 1) * copy) + kernel
    assert timeline.total == pytest.approx(end)
    slower = max(ranks * kernel, ranks * copy)
    assert slower <= timeline.total * (1 + 1e-9)
    assert timeline.total <= slower + min(kernel, copy) + copy


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(1, 6), st.integers(1, 5), TIMES, TIMES)
def test_exchanges_hide_behind_the_work_of_their_step(
    ranks: int, steps: int, kernel: float, copy: float
) -> None:
    """A pipeline over groups of heads takes the longer of work and pulls in each step."""

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Compute):
            return kernel if step.kernel == "consume" else 0.0
        return copy if isinstance(step, Copy) else 0.0

    schedules = EXCHANGE_AND_CONSUME.staged().schedules(ranks)
    timeline = simulate([schedules] * steps, cost)
    assert timeline.total == pytest.approx(steps * max(kernel, (ranks - 1) * copy))


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(2, 6), TIMES, TIMES, TIMES)
def test_signals_take_time(ranks: int, kernel: float, copy: float, signal: float) -> None:
    schedules = STAGED.schedules(ranks)
    timeline = simulate([schedules], costs(kernel, copy), signal=signal)
    end = kernel
    for turn in range(1, ranks):
        end = max(end, copy + signal + turn * copy) + kernel
    assert timeline.total == pytest.approx(end)


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(2, 6), TIMES)
def test_what_is_hidden(ranks: int, kernel: float) -> None:
    schedules = STAGED.schedules(ranks)
    assert simulate([schedules], costs(kernel, kernel / 1e6)).hidden() == pytest.approx(1.0)
    exposed = simulate([schedules], costs(1e-9, kernel)).hidden()
    assert exposed < 1e-6


def test_calls_follow_one_another() -> None:
    schedules = REDUCE_SCATTER.direct().schedules(3)
    one = simulate([schedules], costs(1.0, 0.5)).total
    assert simulate([schedules] * 4, costs(1.0, 0.5)).total == pytest.approx(4 * one)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_variant_ends(place: Place) -> None:
    for world_size in (1, 2, 3, 5, 8):
        schedules = place.variant.schedules(world_size, place.workspace.slots)
        timeline = simulate([schedules] * 3, costs(1.0, 0.1), signal=0.01)
        steps = sum(len(lane) for schedule in schedules for lane in schedule.lanes.values())
        assert len(timeline.events) == 3 * steps


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(1, 8), TIMES, TIMES)
def test_a_kernel_that_polls_begins_when_the_peers_can_go_on(
    ranks: int, shard: float, copy: float
) -> None:
    """And ends as W kernels would, one for each shard."""
    schedules = ALL_GATHER_AND_POLL.staged().schedules(ranks)
    timeline = simulate([schedules], costs(ranks * shard, copy))
    begin = copy if ranks > 1 else 0.0
    end = begin + shard
    for turn in range(1, ranks):
        end = max(end, (turn + 1) * copy) + shard
    assert timeline.total == pytest.approx(end)
    (kernel,) = (e for e in timeline.events if e.rank == 0 and isinstance(e.step, Compute))
    assert kernel.start == begin


@settings(deadline=None)  # the first example builds schedules
@given(st.integers(2, 8), TIMES, TIMES)
def test_a_kernel_that_raises_flags_lets_peers_pull_while_it_runs(
    ranks: int, part: float, copy: float
) -> None:
    """One part after the other, as W kernels would."""

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Compute) and step.kernel == "produce":
            return part * ranks if step.raises else part
        return copy if isinstance(step, Copy) else 0.0

    together, apart = (
        simulate([PRODUCE_AND_REDUCE_SCATTER.staged(together=on).schedules(ranks)], cost)
        for on in (True, False)
    )
    assert together.total == pytest.approx(apart.total)


def test_lanes_that_wait_for_each_other_are_named() -> None:
    lanes = []
    for rank in range(2):
        steps = (Wait(1 - rank, "ready"), Signal(1 - rank, "ready"))
        lanes.append(Schedule("by hand", rank, 2, {"compute": steps}, 2))
    with pytest.raises(DeadlockError, match=r"rank 0, lane 'compute': Wait\('ready' from rank 1"):
        simulate([lanes], costs(1.0, 1.0))
