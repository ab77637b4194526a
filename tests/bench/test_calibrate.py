"""`symm-cp calibrate`: fits are plausible, or nothing is written."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import native
from symm_cp.commands.bench import calibrate, divisions, parsers
from symm_cp.commands.bench.calibrate import Point, falls, rising
from symm_cp.testing import Ranks


def test_a_curve_never_falls() -> None:
    assert rising([(1.0, 3.0), (2.0, 3.0), (4.0, 5.0)]).seconds == pytest.approx((3.0, 3.0, 5.0))
    # Values that fall are replaced by their geometric mean.
    assert rising([(1.0, 4.0), (2.0, 1.0), (4.0, 8.0)]).seconds == pytest.approx((2.0, 2.0, 8.0))
    draw = random.Random(0)
    for _ in range(50):
        points = [(float(size), draw.lognormvariate(-9.0, 2.0)) for size in range(1, 9)]
        seconds = rising(points).seconds
        assert all(before <= after * (1 + 1e-12) for before, after in itertools.pairwise(seconds))
        assert min(seconds) >= min(s for _, s in points) * (1 - 1e-12) > 0


def test_what_fell_under_load() -> None:
    """Finds the outlier in a real measurement: 1.8 ms for 8 KiB, but 0.23 ms for 2 MiB."""
    busy: list[Point] = [(8192.0, 1.8e-3), (32768.0, 1.1e-4), (2097152.0, 2.3e-4)]
    assert falls(busy) == [0]
    noise = [(4096.0, 9e-6), (16384.0, 4e-6), (65536.0, 1.1e-5)]
    assert falls(noise) == []


def test_points_that_fall_are_measured_again() -> None:
    times = {1: iter([1e-3, 1e-3, 2e-5]), 2: iter([3e-5]), 4: iter([4e-5])}
    meter = object.__new__(calibrate._Meter)  # without ranks
    meter.progress, meter.implausible = None, []
    curve = meter.curve("copy", lambda size: (float(size), next(times[size])), [1, 2, 4])
    assert curve.seconds == pytest.approx((2e-5, 3e-5, 4e-5))
    assert meter.implausible == []
    seconds = {1: 1e-3, 2: 3e-5}
    meter.curve("copy", lambda size: (float(size), seconds[size]), [1, 2])
    assert meter.implausible == ["copy of 1 took 1 ms, of 2 30 us"]


def refused(group: dist.ProcessGroup, folder: str) -> None:
    """Under load all ranks end with exit code 1, and nothing is written."""
    path = Path(folder, f"machine{group.rank()}.toml")
    parser = argparse.ArgumentParser()
    parsers.calibrate(parser)
    args = parser.parse_args(["--seconds", "0.0001", "--out", str(path)])
    with mock.patch.object(calibrate._Meter, "share", return_value=0.55):
        with pytest.raises(calibrate.BusyError, match="got 55% of a core each"):
            calibrate.measure(group, idle=True)
        assert calibrate.run_rank(args, group) == 1
    calls = itertools.count(10_000, -1)

    def less_and_less(*_: object, **__: object) -> float:
        return next(calls) * 1e-4

    with (
        mock.patch.object(calibrate._Meter, "share", return_value=1.0),
        mock.patch.object(calibrate._Meter, "seconds", less_and_less),
        mock.patch.object(calibrate, "_FALL", 0.9999),
        mock.patch.object(calibrate, "_kernels", calibrate._one_matmul),
    ):
        with pytest.raises(calibrate.BusyError, match="more work took less time: copy of 4"):
            calibrate.measure(group, idle=True)
        assert not path.exists()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            calibrate.measure(group)
    assert ("more work took less time: copy of 4" in said.getvalue()) == (group.rank() == 0)


def test_a_busy_machine_is_not_described(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, refused, str(tmp_path))


def shared(group: dist.ProcessGroup) -> float:
    return calibrate._Meter(group, None, 0.0).share()


def test_ranks_agree_on_their_share_of_a_core(ranks: Ranks) -> None:
    first, second = ranks.run(2, shared)
    assert first == second
    assert 0.0 < first <= 1.05


@pytest.mark.parametrize(
    ("ratios", "size"),
    [
        ((1.2, 0.9, 1.1, 0.9, 0.6), 8),  # 2 alone is noise
        ((1.2, 1.0, 0.9, 0.9, 1.1), 4),  # memory is as fast for one thread
        ((0.9, 0.8, 0.7, 0.6, 0.5), 1),
        ((2.0, 2.0, 2.0, 2.0, 0.9), 32),
    ],
)
def test_from_which_size_threads_are_worth_it(ratios: tuple[float, ...], size: int) -> None:
    assert divisions.smallest_worth({1 << i: ratio for i, ratio in enumerate(ratios)}) == size


def compares_threads(group: dist.ProcessGroup) -> tuple[int, int]:
    """Uses a fake clock: divided work takes 1 s, and other work 1 s for each 256 KiB."""
    library, before = native.load(), torch.get_num_threads()
    each = itertools.chain.from_iterable((size, size, size, size) for size in divisions.SIZES)

    def seconds(run: Callable[[], object]) -> float:
        divided, size = library.symm_cp_divisions(), next(each)
        run()
        return 1.0 if library.symm_cp_divisions() > divided else size / (256 << 10)

    found = divisions.measure(seconds, 2)
    assert torch.get_num_threads() == before
    start = library.symm_cp_divisions()
    x, out = torch.ones(4 << 20), torch.zeros(4 << 20)
    library.symm_cp_copy(out.data_ptr(), x.data_ptr(), x.nbytes, False)
    return found, library.symm_cp_divisions() - start


def test_both_ways_are_measured_and_settings_are_restored(ranks: Ranks) -> None:
    assert ranks.run(1, compares_threads) == [(512 << 10, 0)]
