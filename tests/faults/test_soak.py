"""A short soak; the figures of a long one are in `benchmarks/results/soak.json`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.exhaustive import some
from tests.faults import soak

RESULT = Path(__file__).resolve().parents[2] / "benchmarks/results/soak.json"
_MEMORY_MIB = 24.0  # torch's and Python's own memory settles slowly


def holds_no_more(samples: list[dict[str, float]], margin_mib: float, margin: int = 0) -> None:
    early, last = samples[: len(samples) // 2], samples[-1]
    for name in ("descriptors", "threads", "mappings", "named_segments"):
        assert last[name] <= max(sample[name] for sample in early) + margin, (name, samples)
    resident = max(sample["resident_mib"] for sample in early)
    assert last["resident_mib"] <= resident + margin_mib, samples


@pytest.mark.exhaustive
@pytest.mark.parametrize("ops", some(600, of=(600, 1800)))
def test_nothing_grows(ops: int) -> None:
    report = soak.run(4, ops, random.randrange(1 << 24), looks=3)
    for samples in report["samples_by_rank"]:
        # Fewer than one per group: 32 groups were made in between.
        holds_no_more(samples, _MEMORY_MIB, margin=8)


def test_the_figures_of_the_long_one() -> None:
    report = json.loads(RESULT.read_text())
    assert report["ops"] >= 200_000
    for samples in report["samples_by_rank"]:
        holds_no_more(samples, 0.02 * samples[0]["resident_mib"])
    for percentile, late in report["us_in_the_last_fifth"].items():
        assert late == pytest.approx(report["us_in_the_second_fifth"][percentile], rel=0.25)
