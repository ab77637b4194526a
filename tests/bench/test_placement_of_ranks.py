"""Where ranks were while a benchmark ran, by the time of a signal between them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from symm_cp.commands.harness.placement import SignalTimer, described, placements
from symm_cp.testing import Ranks


def rows(*pairs: tuple[float, float]) -> list[dict[str, tuple[float, float]]]:
    return [{"signal_ns": pair} for pair in pairs]


def test_signals_are_grouped_by_placement() -> None:
    seen = rows((240.0, 250.0), (45.0, 40.0), (50.0, 44.0), (260.0, 230.0))
    assert placements(seen) == [[45.0, 50.0], [250.0, 260.0]]
    assert placements(seen[:1]) == [[250.0]]
    assert "45 to 50 ns in 2 cases, 250 to 260 ns in 2 cases" in described(seen)


def test_ranks_that_move_or_share_a_processor_are_in_no_placement() -> None:
    seen = rows((45.0, 240.0), (9000.0, 8000.0), (0.0, 0.0), (45.0, 45.0))
    assert placements(seen) == [[45.0]]
    assert described(seen).endswith("changed, or had to wait for a processor, in 3")


def time_signals(group: dist.ProcessGroup) -> float:
    timer = SignalTimer(group)
    times = [timer.nanoseconds() for _ in range(3)]
    gathered: list[list[float] | None] = [None] * group.size()
    dist.all_gather_object(gathered, times, group)
    assert all(each == times for each in gathered)
    return min(times)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_time_of_a_signal(ranks: Ranks, world_size: int) -> None:
    low, high = (0.0, 0.0) if world_size == 1 else (5.0, 1e8)
    assert low <= ranks.run(world_size, time_signals)[0] <= high
