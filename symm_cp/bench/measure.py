"""Times variants of one job against each other, and says how sure the result is.

All variants run in turn in each repetition, so that drift of the machine's speed hits them alike; a
repetition's time is that of the slowest rank. Reported are medians, the medians of the ratios to
the limit within a repetition, and intervals that hold with 95% (percentile bootstrap over
repetitions; Efron, 1979).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

#: The names that `overlap` looks for.
LIMIT, COMMUNICATION, UNFUSED, FUSED = "limit", "communication", "unfused", "fused"

_RESAMPLES = 500
#: An interval of the overlap that is wider than this tells nothing.
_TELLING = 0.25
_WARM_UP = 2
_REPETITIONS = (5, 60)  # at least, at most

Interval = tuple[float, float]


@dataclass
class Case:
    """Variants of one job by name, the limit first; `check` raises when one computes wrongly."""

    name: str
    variants: Mapping[str, Callable[[], object]]
    check: Callable[[], None] = lambda: None
    repetitions: int = 0  # 0: as many as fit into the time given to `measure`
    inner: int = 1  # calls in one timing, for short ones
    # Called before and after a timing; with `host` only before, so that what is timed is how long
    # the host takes to hand the work out.
    synchronize: Callable[[], object] = lambda: None
    host: bool = False
    #: What else is to be written of the row, which is known only when it was measured.
    after: Callable[[Row], dict[str, object]] = lambda row: {}


@dataclass(frozen=True)
class Overlap:
    """How much of what communication costs the fused op saves.

    1 - (fused - limit) / (unfused - limit): 1 when it takes the time of the compute alone, 0 when
    it takes that of the unfused one.
    """

    value: float
    interval: Interval

    @property
    def telling(self) -> bool:
        """Whether the machine was quiet enough for the value to mean something."""
        return self.interval[1] - self.interval[0] <= _TELLING


@dataclass(frozen=True)
class Row:
    """A measured case: seconds of every repetition by variant, alike on all ranks."""

    case: str
    seconds: Mapping[str, tuple[float, ...]]
    notes: Mapping[str, object] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The name of the first variant, which ratios are taken to."""
        return next(iter(self.seconds))

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """The median of the ratios to the limit within a repetition."""
        return _ratio(self.seconds[name], self.seconds[self.limit])

    def ratio_interval(self, name: str) -> Interval:
        """Holds the ratio with 95%."""
        return bootstrap(_ratio, self.seconds[name], self.seconds[self.limit])

    def overlap(self) -> Overlap | None:
        """How much of the communication was hidden; None without the three variants for it."""
        if not {LIMIT, UNFUSED, FUSED} <= self.seconds.keys():
            return None
        columns = [self.seconds[name] for name in (LIMIT, UNFUSED, FUSED)]
        return Overlap(_overlap(*columns), bootstrap(_overlap, *columns))

    def as_dict(self) -> dict[str, Any]:
        """What is written to JSON: milliseconds, ratios, intervals."""
        overlap = self.overlap()
        return {
            "case": self.case,
            **self.notes,
            "ms": {name: self.median(name) * 1e3 for name in self.seconds},
            "ratio": {name: self.ratio(name) for name in self.seconds},
            "ratio_95": {name: self.ratio_interval(name) for name in self.seconds},
            **({"overlap": asdict(overlap)} if overlap is not None else {}),
        }


def _ratio(times: Sequence[float], limits: Sequence[float]) -> float:
    return statistics.median(time / limit for time, limit in zip(times, limits, strict=True))


def _overlap(limit: Sequence[float], unfused: Sequence[float], fused: Sequence[float]) -> float:
    alone = statistics.median(limit)
    spent = statistics.median(unfused) - alone
    if spent <= 0.0:
        # Nothing to hide: all is hidden, unless the fused op is the slower one.
        return 1.0 if statistics.median(fused) <= alone else 0.0
    return 1.0 - (statistics.median(fused) - alone) / spent


def bootstrap(statistic: Callable[..., float], *columns: Sequence[float]) -> Interval:
    """Returns the 2.5% and 97.5% points of a statistic over resampled repetitions."""
    count = len(columns[0])
    draw = random.Random(0)  # the interval of the same times is always the same
    found = []
    for _ in range(_RESAMPLES):
        chosen = [draw.randrange(count) for _ in range(count)]
        found.append(statistic(*([column[i] for i in chosen] for column in columns)))
    found.sort()
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]


def _time(case: Case, run: Callable[[], object], barrier: Callable[[], None]) -> float:
    case.synchronize()
    barrier()
    start = time.perf_counter()
    for _ in range(case.inner):
        run()
    if not case.host:
        case.synchronize()
    return (time.perf_counter() - start) / case.inner


def quick_barrier(group: dist.ProcessGroup) -> Callable[[], None]:
    """Returns a barrier in shared memory, which ranks leave within microseconds. Collective.

    Those of gloo they leave half a millisecond apart, which is longer than many an op.
    """
    word = symm_mem.empty(1, dtype=torch.int32, device="cpu")
    return symm_mem.rendezvous(word, group).barrier


def measure(case: Case, group: dist.ProcessGroup, seconds: float = 4.0) -> Row:
    """Checks a case, times it, and returns the same row on all ranks. Collective.

    Takes about `seconds`, unless the case says how many repetitions it wants.
    """
    case.check()
    barrier = quick_barrier(group)
    names = list(case.variants)
    round_seconds = 0.0
    for _ in range(_WARM_UP):  # workspaces, packed weights, page faults
        start = time.perf_counter()
        for name in names:
            _time(case, case.variants[name], barrier)
        round_seconds = time.perf_counter() - start
    own = []
    for repetition in range(case.repetitions or _fitting(round_seconds, seconds, group)):
        # Another one goes first each time: what runs before leaves its data in the caches.
        first = repetition % len(names)
        order = [*names[first:], *names[:first]]
        taken = {name: _time(case, case.variants[name], barrier) for name in order}
        own.append([taken[name] for name in names])
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    taken_by = {name: tuple(times[:, i].tolist()) for i, name in enumerate(names)}
    row = Row(case.name, taken_by)
    return replace(row, notes=case.after(row))


def _fitting(round_seconds: float, seconds: float, group: dist.ProcessGroup) -> int:
    """How many repetitions fit, alike on all ranks."""
    slowest = torch.tensor(round_seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    least, most = _REPETITIONS
    return max(least, min(most, int(seconds / max(1e-9, float(slowest)))))


def duration(seconds: float) -> str:
    """Returns seconds as text, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
