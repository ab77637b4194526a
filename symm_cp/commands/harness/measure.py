"""Times variants of one job against each other, with confidence intervals.

Each repetition runs all variants, so that drift of the machine's speed affects them equally; its
times are the slowest rank's. The results are medians, the medians of the ratios to the limit
within a repetition, and 95% confidence intervals (percentile bootstrap over repetitions; Efron,
1979).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from symm_cp.commands.harness.placement import SignalTimer
from symm_cp.ranks import quick_barrier

#: Names of variants; `overlap` looks for the first three.
LIMIT, UNFUSED, FUSED, IN_PLACE = "limit", "unfused", "fused", "fused, in place"

_RESAMPLES = 500  # of the bootstrap: quantiles at 2.5% then rest on 12 values
#: An overlap whose interval is wider than this is inconclusive.
_MAX_WIDTH = 0.25
_MAX_RATIO_WIDTH = 0.1  # likewise for ratios of times, relative to ratios above 1
_WARM_UP = 2  # calls that are not timed
_MIN_REPETITIONS = 5  # even if a case takes longer than its time
_TIMING_SECONDS, _MAX_INNER = 1e-3, 200  # length and calls of a timing, for `inner` 0
_PAUSE_SECONDS = 0.05  # threads of GNU's OpenMP look for more work for about 15 ms

Interval = tuple[float, float]


def overlap_is_noisy(interval: Interval) -> bool:
    """Whether an overlap's interval is too wide for a claim."""
    return interval[1] - interval[0] > _MAX_WIDTH


def ratio_is_noisy(ratio: float, interval: Interval) -> bool:
    """Whether a ratio's interval is too wide for a claim."""
    return interval[1] - interval[0] > _MAX_RATIO_WIDTH * max(1.0, ratio)


def unfused_over(backend: str) -> str:
    """Returns the name of the unfused variant over a backend of torch.distributed."""
    return f"{UNFUSED} ({backend})"


@dataclass
class Case:
    """Variants of one job by name, the limit first; `check` raises if a result is wrong."""

    name: str
    variants: Mapping[str, Callable[[], object]]
    check: Callable[[], None] = lambda: None
    repetitions: int = 0  # 0: the number that fits into the time of `measure`
    inner: int = 1  # calls in one timing; 0: the number that takes a variant about a millisecond
    most: int = 60  # the most repetitions if `repetitions` is 0
    synchronize: Callable[[], object] = lambda: None  # called before and after a timing
    #: Variants with more threads than a rank has; a pause follows, so that they disturb no other.
    threaded: Collection[str] = ()
    #: Computes notes from the measured row.
    after: Callable[[Row], dict[str, object]] = lambda row: {}


@dataclass(frozen=True)
class Overlap:
    """The share of the communication time that the fused op hides.

    1 - (fused - limit) / (unfused - limit): 1 if the fused op takes as long as the compute alone, 0
    if it takes as long as the unfused variant.
    """

    value: float
    interval: Interval

    @property
    def is_conclusive(self) -> bool:
        """Whether noise was low enough for the value to be meaningful."""
        return not overlap_is_noisy(self.interval)


@dataclass(frozen=True)
class Row:
    """A measured case: the seconds of each variant's repetitions, identical on all ranks."""

    case: str
    seconds: Mapping[str, tuple[float, ...]]
    notes: Mapping[str, object] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The name of the first variant, the denominator of ratios."""
        return next(iter(self.seconds))

    def median(self, name: str) -> float:
        """Returns the median seconds of a variant."""
        return statistics.median(self.seconds[name])

    def minimum(self, name: str) -> float:
        """Returns a variant's shortest time: the most repeatable figure on a busy machine."""
        return min(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Returns the median of the ratios to the limit within a repetition."""
        return _ratio(self.seconds[name], self.seconds[self.limit])

    def ratio_interval(self, name: str) -> Interval:
        """Returns the 95% confidence interval of the ratio."""
        return bootstrap(_ratio, self.seconds[name], self.seconds[self.limit])

    def claim(self, name: str) -> str:
        """Returns the ratio and its interval as text; of a wide interval, only that it is wide."""
        if len(self.seconds[name]) < _MIN_REPETITIONS:
            return "too few repetitions to compare"
        ratio, (low, high) = self.ratio(name), self.ratio_interval(name)
        interval = f"({low:.2f} to {high:.2f})"
        if ratio_is_noisy(ratio, (low, high)):
            return f"too noisy to compare {interval}"
        return f"{ratio:.2f} {interval}"

    def overlap(self) -> Overlap | None:
        """Returns the hidden share of communication; None unless all three variants were timed."""
        # Unfused over the first backend, if there are several.
        unfused = next((name for name in self.seconds if name.startswith(UNFUSED)), UNFUSED)
        if not {LIMIT, unfused, FUSED} <= self.seconds.keys():
            return None
        columns = [self.seconds[name] for name in (LIMIT, unfused, FUSED)]
        return Overlap(_overlap(*columns), bootstrap(_overlap, *columns))

    def as_dict(self) -> dict[str, Any]:
        """Returns the row for JSON: milliseconds, ratios, intervals."""
        overlap = self.overlap()
        return {
            "case": self.case,
            **self.notes,
            "ms": {name: self.median(name) * 1e3 for name in self.seconds},
            "ms_min": {name: self.minimum(name) * 1e3 for name in self.seconds},
            "ratio": {name: self.ratio(name) for name in self.seconds},
            "ratio_95": {name: self.ratio_interval(name) for name in self.seconds},
            **({"overlap": asdict(overlap)} if overlap is not None else {}),
        }


def _ratio(times: Sequence[float], limits: Sequence[float]) -> float:
    return statistics.median(time / limit for time, limit in zip(times, limits, strict=True))


def _overlap(limit: Sequence[float], unfused: Sequence[float], fused: Sequence[float]) -> float:
    alone = statistics.median(limit)
    communication = statistics.median(unfused) - alone
    if communication <= 0.0:
        # No communication to hide: it counts as hidden, unless the fused op is slower.
        return 1.0 if statistics.median(fused) <= alone else 0.0
    return 1.0 - (statistics.median(fused) - alone) / communication


def bootstrap(statistic: Callable[..., float], *columns: Sequence[float]) -> Interval:
    """Returns the 2.5% and 97.5% quantiles of a statistic over resampled repetitions."""
    count = len(columns[0])
    draw = random.Random(0)  # the same times always give the same interval
    values = []
    for _ in range(_RESAMPLES):
        chosen = [draw.randrange(count) for _ in range(count)]
        values.append(statistic(*([column[i] for i in chosen] for column in columns)))
    values.sort()
    return values[int(0.025 * _RESAMPLES)], values[int(0.975 * _RESAMPLES)]


def _time(case: Case, run: Callable[[], object], barrier: Callable[[], None], inner: int) -> float:
    case.synchronize()
    barrier()
    start = time.perf_counter()
    for _ in range(inner):
        run()
    case.synchronize()
    return (time.perf_counter() - start) / inner


def _order(names: list[str], repetition: int) -> list[str]:
    """Rotates the variants, and reverses their order every other round.

    A variant finds the data and code of the previous variant in the caches, so each variant runs
    as often before another one as after it.
    """
    turns, first = divmod(repetition, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if turns % 2 else order


def measure(case: Case, group: dist.ProcessGroup, seconds: float = 4.0) -> Row:
    """Checks a case, times it, and returns the same row on all ranks. Collective.

    Takes about `seconds`, unless the case sets its number of repetitions.
    """
    case.check()
    barrier, signals = quick_barrier(group), SignalTimer(group)
    names = list(case.variants)
    inner = dict.fromkeys(names, case.inner or 1)
    of_all = dict.fromkeys(names, 0.0)
    for _ in range(_WARM_UP):  # workspaces, packed weights, page faults
        own_times = [_time(case, case.variants[name], barrier, inner[name]) for name in names]
        of_all = dict(zip(names, slowest(own_times, group), strict=True))
    if case.inner == 0:
        for name, call_seconds in of_all.items():
            inner[name] = max(1, min(_MAX_INNER, int(_TIMING_SECONDS / max(1e-9, call_seconds))))
    round_seconds = sum(of_all[name] * inner[name] for name in names)
    fitting = max(_MIN_REPETITIONS, min(case.most, int(seconds / max(1e-9, round_seconds))))
    before, own = signals.nanoseconds(), []
    for repetition in range(case.repetitions or fitting):
        order = _order(names, repetition)
        seconds_by_name = {}
        for name in order:
            seconds_by_name[name] = _time(case, case.variants[name], barrier, inner[name])
            if name in case.threaded:
                time.sleep(_PAUSE_SECONDS)
        own.append([seconds_by_name[name] for name in names])
    placed = {"signal_ns": (before, signals.nanoseconds())}
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    seconds_of = {name: tuple(times[:, i].tolist()) for i, name in enumerate(names)}
    row = Row(case.name, seconds_of)
    return replace(row, notes={**case.after(row), **placed})


def slowest(seconds: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Returns the maximum of each time over the ranks, identically on all ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def duration(seconds: float) -> str:
    """Returns seconds as text, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
