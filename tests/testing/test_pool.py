"""The pool of rank processes itself: results, failures, hangs, reuse."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Place, RankError, Ranks, RankTimeout, say
from tests.exhaustive import exhaustive
from tests.patience import patient

SIZE = 4  # see conftest.py


def sum_of_ranks(group: dist.ProcessGroup, value: torch.Tensor) -> tuple[int, torch.Tensor]:
    value = value + group.rank()
    dist.all_reduce(value, group=group)
    return group.rank(), value


@pytest.mark.parametrize("world_size", range(1, SIZE + 1))
def test_runs_on_every_world_size(ranks: Ranks, world_size: int) -> None:
    value = torch.arange(3, dtype=torch.bfloat16)
    results = ranks.run(world_size, sum_of_ranks, value)
    assert [rank for rank, _ in results] == list(range(world_size))
    expected = value * world_size + sum(range(world_size))
    for _, result in results:
        torch.testing.assert_close(result, expected)


def own_pid(group: dist.ProcessGroup) -> int:
    return os.getpid()


def test_processes_are_reused(ranks: Ranks) -> None:
    first = ranks.run(SIZE, own_pid)
    assert ranks.run(SIZE, own_pid) == first == ranks.pids()
    assert ranks.run(2, own_pid) == first[:2]


def draw(group: dist.ProcessGroup) -> float:
    return torch.rand(()).item()


def test_seeds_are_fresh_shared_and_repeatable(ranks: Ranks) -> None:
    first, again = ranks.run(2, draw), ranks.run(2, draw)
    assert first[0] == first[1]
    assert first != again
    assert ranks.run(1, draw, seed=7) == ranks.run(1, draw, seed=7)


@pytest.fixture(scope="module")
def few(ranks: Ranks) -> Iterator[Ranks]:
    """A separate pool, for tests that end its processes."""
    pool = Ranks(ranks.session_seed, size=2)
    yield pool
    pool.close()


def fail_on(group: dist.ProcessGroup, failing: list[int], wait: float) -> None:
    own_rank = group.rank()
    if own_rank in failing:
        print("said before failing")
        raise ValueError(f"bad luck on {own_rank}")
    time.sleep(wait)


def test_every_failing_rank_is_reported(few: Ranks) -> None:
    with pytest.raises(RankError, match=r"failed on ranks \[0, 1\]") as caught:
        few.run(2, fail_on, [0, 1], 0.0)
    assert set(caught.value.reports) == {0, 1}
    for rank, report in caught.value.reports.items():
        assert f"ValueError: bad luck on {rank}" in report
        assert f"own_rank = {rank}" in report  # the locals
        assert "said before failing" in report
    assert "SYMM_CP_TEST_SEED=" in str(caught.value)


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no repr today")


def fail_with_a_local(group: dist.ProcessGroup) -> None:
    unshown = Unshown()
    raise ValueError(f"bad luck on {group.rank()}, {unshown is None}")


def test_locals_that_cannot_be_shown(few: Ranks) -> None:
    with pytest.raises(RankError, match=r"bad luck on 0, False\n(.|\n)*unshown = <Unshown inst"):
        few.run(1, fail_with_a_local)


def fail_with_a_tensor(group: dist.ProcessGroup) -> None:
    parts = [torch.zeros(3, dtype=torch.int64)]
    assert parts[0].sum() == 1


def test_failures_are_short(few: Ranks) -> None:
    """Names the cause first, shows no elements of tensors, and equal reports once."""
    with pytest.raises(RankError) as caught:
        few.run(2, fail_with_a_tensor)
    lines = str(caught.value).splitlines()
    assert lines[0] == caught.value.cause == "rank 0: AssertionError: assert parts[0].sum() == 1"
    assert lines[2:4] == ["--- ranks 0, 1 ---", "Traceback (most recent call last):"]
    assert "    parts = [<Tensor int64[3]>]" in lines
    assert len(lines) < 12


@pytest.mark.exhaustive
def test_a_failure_does_not_wait_for_ranks_that_hang(few: Ranks) -> None:
    few.start()
    start = time.monotonic()
    with pytest.raises(RankError, match=r"failed on ranks \[0\]") as caught:
        few.run(2, fail_on, [0], 1000.0)
    assert time.monotonic() - start < 30
    assert "in fail_on" in caught.value.reports[1]  # where the other rank was


def hang(group: dist.ProcessGroup, hanging: int) -> None:
    if group.rank() == hanging:
        time.sleep(1000)


def test_a_hang_is_killed_and_located(few: Ranks) -> None:
    before = few.run(2, own_pid)
    seconds = round(patient(1), 1)
    with pytest.raises(RankTimeout, match=rf"ranks \[1\] did not end within {seconds} s") as caught:
        few.run(2, hang, 1, timeout=seconds)
    assert "in hang" in caught.value.reports[1]
    assert "process.py" not in caught.value.reports[1]
    assert re.fullmatch(r"rank 1: was still here: test_pool.py:\d+, in hang", caught.value.cause)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    after = few.run(2, own_pid)  # a new pool
    assert not set(after) & set(before)


def exit_on(group: dist.ProcessGroup, leaving: int) -> None:
    if group.rank() == leaving:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ends_is_reported(few: Ranks) -> None:
    with pytest.raises(RankError, match=r"the process ended with code -9"):
        few.run(2, exit_on, 1)


def give_lambda(group: dist.ProcessGroup) -> object:
    return lambda: None


def test_results_that_cannot_be_sent_are_errors(few: Ranks) -> None:
    with pytest.raises(RankError, match="give_lambda"):
        few.run(1, give_lambda)


def skip_on(group: dist.ProcessGroup, skipping: list[int]) -> None:
    if group.rank() in skipping:
        pytest.skip(f"nothing to do on rank {group.rank()}")


def test_skips_are_told_from_failures(few: Ranks) -> None:
    before = few.run(2, own_pid)
    with pytest.raises(RankError, match=r"skipped on ranks \[0, 1\]") as caught:
        few.run(2, skip_on, [0, 1])
    assert caught.value.skip is not None
    assert caught.value.skip.reason.startswith("nothing to do on rank")
    assert few.run(2, own_pid) == before  # no process was replaced
    with pytest.raises(RankError, match=r"skipped on ranks \[1\]"):
        few.run(2, skip_on, [1])
    assert not set(few.run(2, own_pid)) & set(before)


def destroy_group(group: dist.ProcessGroup, everything: bool) -> None:
    dist.destroy_process_group(None if everything else group)


def test_ranks_that_destroy_their_group_are_replaced(few: Ranks) -> None:
    for everything in (True, False):
        few.run(1, destroy_group, everything)
        assert [rank for rank, _ in few.run(2, sum_of_ranks, torch.ones(1))] == [0, 1]


def settings() -> list[object]:
    return [
        torch.get_default_dtype(),
        torch.zeros(()).device,
        torch.is_grad_enabled(),
        torch.get_deterministic_debug_mode(),
        dict(os.environ),
    ]


def set_other_ones(group: dist.ProcessGroup) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ["OMP_NUM_THREADS"] = os.environ["NEW"] = "7"
    del os.environ["GLOO_SOCKET_IFNAME"]


def settings_of(group: dist.ProcessGroup) -> list[object]:
    return settings()


def test_settings_are_restored(few: Ranks) -> None:
    before = few.run(2, settings_of)
    few.run(2, set_other_ones)
    assert few.run(2, settings_of) == before


def meets_its_end(group: dist.ProcessGroup) -> str:
    say(f"{os.environ.get('PLACE')} {group.size()}")
    if group.rank() == 1:
        raise ValueError("bad luck")
    if group.rank() > 1:
        time.sleep(1000)
    print("written")
    return "result"


@exhaustive
def test_ranks_of_their_own(ranks: Ranks) -> None:
    """Starts more ranks than the pool has, each with an environment; they may fail, die or hang."""
    places = [Place(environment={"PLACE": str(rank)}) for rank in range(SIZE + 1)]
    with ranks.own(SIZE + 1, meets_its_end, places=places) as running:
        assert running.hear_all() == [f"{rank} {SIZE + 1}" for rank in range(SIZE + 1)]
        running.kill(2)
        first, second, third, fourth, left_out = running.outcomes(2.0, apart_from=[4])
    assert (first.result, first.failure, first.signal) == ("result", "", 0)
    assert first.output == "written\n"
    assert "ValueError: bad luck" in second.failure
    assert third.died_at is not None
    assert "did not end within 2.0 s" in fourth.failure
    assert {third.signal, fourth.signal, left_out.signal} == {signal.SIGKILL}


def test_a_rank_that_says_nothing(ranks: Ranks) -> None:
    with ranks.own(1, own_pid) as running, pytest.raises(AssertionError, match="rank 0 has ended"):
        running.hear(0)


def test_world_size_is_checked(few: Ranks) -> None:
    with pytest.raises(ValueError, match="world_size=3 is not in 1 to 2"):
        few.run(3, own_pid)


_OWNER = """
import time
from symm_cp.testing import Ranks
pool = Ranks(0, size=2)
pool.start()
print(*pool.pids(), flush=True)
time.sleep(1000)
"""


@pytest.mark.exhaustive
def test_processes_die_with_their_parent() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} outlived their parent"
        time.sleep(0.05)
