"""Names of variants that run their steps in turn, and the ratios of their paired times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DENSE, FUSED, COMPUTE = "one process", "fused", "compute alone"


def unfused_over(backend: str) -> str:
    """Returns the name of the variant with collectives over a backend of torch.distributed."""
    return f"unfused ({backend})"


def dense_with(threads: int) -> str:
    """Returns the name of the one-process variant with this many threads."""
    return DENSE if threads == 1 else f"{DENSE}, {threads} threads"


def is_dense(name: str) -> bool:
    """Tells whether a variant runs in one process, with any number of threads."""
    return name.startswith(DENSE)


def threads_of_name(name: str) -> int:
    """Returns the number of threads of the one-process variant of that name."""
    return 1 if name == DENSE else int(name.split()[-2])


@dataclass(frozen=True)
class Ratio:
    """The median over steps of the ratio of two times in the same step, and its 95% interval.

    The interval lies between two order statistics, which assumes nothing about the noise. With
    fewer than six steps it is None.
    """

    median: float
    interval: tuple[float, float] | None

    @property
    def width(self) -> float:
        """Returns the width of the interval; infinite without one."""
        return math.inf if self.interval is None else self.interval[1] - self.interval[0]

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.median:.3f} (too few steps for an interval)"
        return f"{self.median:.3f} ({self.interval[0]:.3f} to {self.interval[1]:.3f})"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Ratio:
    """Returns the ratio of times of the same steps."""
    ratios = sorted(time / other for time, other in zip(seconds, base, strict=True))
    cut = _cut(len(ratios))
    interval = None if cut is None else (ratios[cut], ratios[-1 - cut])
    return Ratio(statistics.median(ratios), interval)


def _cut(count: int) -> int | None:
    """Returns the number of values on each side outside the median's 95% interval."""
    outside, below = -1, 0.0  # `below`: probability of at most `outside` values below the median
    while below + math.comb(count, outside + 1) / 2**count <= 0.025:
        outside += 1
        below += math.comb(count, outside) / 2**count
    return outside if outside >= 0 else None


def against_one_process(seconds: Mapping[str, list[float]], does: str) -> list[str]:
    """Compares the fused variant's speed with one process that has the threads of all ranks."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        f"fused {does} {medians[name] / medians[FUSED]:.2f} times as fast as {name}"
        for name in medians
        if is_dense(name) and name != DENSE
    ]
