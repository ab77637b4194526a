"""Measures the size from which a rank's threads share copies and reductions (csrc/base/team.h)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from symm_cp import env, native
from symm_cp.native.wire import DType, ReduceOp

#: 16 KiB to 16 MiB.
SIZES = tuple(1 << exponent for exponent in range(14, 25))
_ONE, _ALL = 0, 2  # which threads copy and reduce, as numbered in csrc/base/team.h

#: Returns the seconds of a call on the slowest rank.
Meter = Callable[[Callable[[], object]], float]


def smallest_worth(ratios: Mapping[int, float]) -> int:
    """Returns the smallest size at which several threads are faster than one.

    `ratios` are their times relative to one thread, by size. They must be faster at this size and
    the next one, since one alone may be noise. If they never are, the result is twice the largest
    size, since no larger one was measured.
    """
    sizes = sorted(ratios)
    for size, larger in itertools.pairwise(sizes):
        if ratios[size] < 1 and ratios[larger] < 1:
            return size
    return 2 * sizes[-1]


def measure(seconds: Meter, threads: int) -> int:
    """Returns the size in bytes from which `threads` threads copy and add faster than one.

    Call it on all ranks at once; they get the same result if their `seconds` returns the same.
    """
    library = native.load()
    x, y, out = (torch.ones(SIZES[-1] // 4) for _ in range(3))
    sources = (ctypes.c_void_p * 2)(x.data_ptr(), y.data_ptr())

    def copy(size: int) -> None:
        library.symm_cp_copy(out.data_ptr(), x.data_ptr(), size, False)

    def add(size: int) -> None:
        to, count = out.data_ptr(), size // 4
        library.symm_cp_reduce(to, sources, 2, count, DType.FLOAT32, ReduceOp.SUM, False)

    def ratio(size: int) -> float:
        """Returns the larger ratio of the two jobs: the job that gains less decides."""
        found = []
        for job in (copy, add):
            times = {}
            for choice in (_ONE, _ALL):
                library.symm_cp_set_threads(choice, 1)
                times[choice] = seconds(lambda job=job: job(size))  # type: ignore[misc]
            found.append(times[_ALL] / times[_ONE])
        return max(found)

    with _dividing_all(threads):
        return smallest_worth({size: ratio(size) for size in SIZES})


@contextmanager
def _dividing_all(threads: int) -> Iterator[None]:
    """Lets `threads` threads share work of any size in the `with` block."""
    library, before = native.load(), torch.get_num_threads()
    torch.set_num_threads(threads)
    library.symm_cp_set_divided_from(threads, 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        library.symm_cp_set_threads(env.threads(), env.background_threads())
        native.divide_as_measured(library)
