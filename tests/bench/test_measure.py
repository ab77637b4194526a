"""Statistics of times: medians, ratios, intervals, the overlap."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch.distributed as dist

from symm_cp.commands.harness import measure, report
from symm_cp.commands.harness.measure import FUSED, LIMIT, UNFUSED, Case, Row, bootstrap, duration
from symm_cp.testing import Ranks
from tests.exhaustive import some


def row(limit: list[float], unfused: list[float], fused: list[float]) -> Row:
    return Row("a case", {LIMIT: tuple(limit), UNFUSED: tuple(unfused), FUSED: tuple(fused)})


def noisy(center: float, noise: float, count: int = 40) -> list[float]:
    draw = random.Random(center)
    return [center * (1 + noise * draw.uniform(-1, 1)) for _ in range(count)]


def test_overlap_by_hand() -> None:
    measured_row = row([1.0] * 5, [2.0] * 5, [1.25] * 5)
    overlap = measured_row.overlap()
    assert overlap is not None
    assert overlap.value == pytest.approx(0.75)
    assert overlap.interval == pytest.approx((0.75, 0.75))
    assert overlap.is_conclusive
    assert measured_row.ratio(UNFUSED) == 2.0
    assert measured_row.as_dict()["overlap"]["value"] == pytest.approx(0.75)
    # Communication that takes no time cannot be hidden; the fused op can only be slower.
    for fused, value in ((0.9, 1.0), (1.1, 0.0)):
        overlap = row([1.0] * 5, [1.0] * 5, [fused] * 5).overlap()
        assert overlap is not None
        assert overlap.value == value
    assert Row("", {LIMIT: (1.0,), FUSED: (1.0,)}).overlap() is None


def test_the_overlap_is_that_over_the_first_backend() -> None:
    seconds = {LIMIT: (1.0,), "unfused (gloo)": (3.0,), "unfused (symm_cp)": (2.0,), FUSED: (1.5,)}
    overlap = Row("", seconds).overlap()
    assert overlap is not None
    assert overlap.value == pytest.approx(0.75)


def test_a_line_says_what_its_ratios_are() -> None:
    """Ratios are not quotients of medians where the machine's speed drifts."""
    drifting = row([1.0, 1.0, 4.0], [2.0, 2.0, 2.0], [1.0, 1.05, 4.0])
    assert "fused 1.05 s (1.00)" in report.line(drifting)
    assert "unfused 2 s (too noisy: 0.50 to 2.00)" in report.line(drifting)
    assert "median of the ratios within each\nrepetition" in report.LEGEND
    assert "not the quotient of the medians" in report.LEGEND


def test_noise_shows() -> None:
    quiet = row(noisy(1.0, 0.01), noisy(1.5, 0.01), noisy(1.1, 0.01)).overlap()
    loud = row(noisy(1.0, 0.3), noisy(1.1, 0.3), noisy(1.05, 0.3)).overlap()
    assert quiet is not None
    assert loud is not None
    assert quiet.is_conclusive
    assert not loud.is_conclusive
    low, high = quiet.interval
    assert low < quiet.value < high
    assert quiet.value == pytest.approx(0.8, abs=0.05)


def test_ratios_are_taken_within_repetitions() -> None:
    """Drift of the machine's speed affects all variants of a repetition equally."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    drifting = row(drift, [2 * t for t in drift], [1.5 * t for t in drift])
    assert drifting.ratio(UNFUSED) == 2.0
    assert drifting.ratio_interval(FUSED) == (1.5, 1.5)


def test_an_interval_holds_the_mean_of_what_it_was_drawn_from() -> None:
    inside = 0
    for seed in range(100):
        draw = random.Random(seed)
        sample = [draw.gauss(5.0, 1.0) for _ in range(30)]
        low, high = bootstrap(lambda column: sum(column) / len(column), sample)
        inside += low <= 5.0 <= high
    assert 86 <= inside <= 100  # 95 on average


def test_durations() -> None:
    assert duration(1.234567) == "1.23 s"
    assert duration(0.0123456) == "12.3 ms"
    assert duration(1.5e-6) == "1.5 us"


def measured(group: dist.ProcessGroup) -> tuple[dict[str, int], Row]:
    calls = {"one": 0, "two": 0, "check": 0}

    def count(name: str) -> None:
        calls[name] += 1

    case = Case(
        "counted",
        {"one": lambda: count("one"), "two": lambda: count("two")},
        lambda: count("check"),
        repetitions=7,
        inner=3,
    )
    return calls, measure.measure(case, group)


@pytest.mark.parametrize("world_size", some(1, 3, of=[1, 2, 3]))
def test_all_ranks_have_the_same_row(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(world_size, measured)
    for calls, measured_row in results:
        assert calls == {"one": 27, "two": 27, "check": 1}  # two to warm up
        assert measured_row == results[0][1]
        assert [len(times) for times in measured_row.seconds.values()] == [7, 7]


@pytest.mark.ranks(2)
def test_wrong_results_are_not_timed(group: dist.ProcessGroup) -> None:
    def wrong() -> None:
        raise AssertionError("wrong result")

    case = Case("wrong", {LIMIT: lambda: None}, wrong)
    with pytest.raises(AssertionError, match="wrong result"):
        measure.measure(case, group)


def test_no_variant_comes_more_often_behind_another_one() -> None:
    """Orders are balanced, since the previous variant leaves data and code in the caches."""
    names = ["limit", "fused", "unfused"]
    rounds = [measure._order(names, repetition) for repetition in range(6)]
    run = list(itertools.chain(*rounds))
    behind = Counter(itertools.pairwise(run * 2))
    assert all(sorted(order) == sorted(names) for order in rounds)
    assert Counter(order[0] for order in rounds) == dict.fromkeys(names, 2)
    pairs = [behind[pair] for pair in itertools.permutations(names, 2)]
    assert max(pairs) - min(pairs) <= 2, behind
