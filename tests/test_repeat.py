"""`python -m tests.repeat` counts failures, and can show each again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Place, Ranks, delays
from tests import repeat

ROOT = Path(__file__).resolve().parent.parent
FLAKY = """
import os, time

def test_sound(): pass

def test_flaky(): assert int(os.environ["SYMM_CP_TEST_SEED"]) % 3, "divisible by three"

def test_slow(): time.sleep(60 if os.environ["SYMM_CP_TEST_SEED"] == "44000" else 0)

def test_delays(): assert os.environ["SYMM_CP_TEST_DELAYS"] == "70"
"""


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "test_flaky.py"
    path.write_text(FLAKY)
    monkeypatch.delenv("SYMM_CP_TEST_SEED", raising=False)
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.exhaustive
def test_failure_rates(flaky: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    options = ["-n", "2", "--seed", "44", "--busy", "half", "--delays", "70"]
    assert repeat.main([*options, "--log", str(log), flaky]) == 1
    said = capsys.readouterr().out
    assert said == (log / "log.txt").read_text()
    assert re.search(r"\n1 of 2 failed: \S*::test_flaky\n", said), said
    assert "\n    seed 45, busy, delays 70 us\n" in said
    assert "test_sound" not in said
    assert "test_delays" not in said
    last = said.splitlines()[-1]
    assert last.startswith("1 of 2 runs green; 1 of 1 alone ("), last
    assert "; 0 of 1 beside busy loops (" in last
    written = sorted(path.name for path in log.iterdir())
    assert written == ["log.txt", "run-2-seed-45.txt"]
    assert "divisible by three" in (log / written[1]).read_text()


@pytest.mark.exhaustive
def test_a_run_again_until_the_first_failure(flaky: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    only = [flaky, "-k", "flaky and not slow and not sound and not delays"]
    assert (
        repeat.main(["-n", "5", "--seed", "43", "--cores", "1", "--stop", "--log", log, *only]) == 1
    )
    lines = Path(log, "log.txt").read_text().splitlines()
    runs = [line for line in lines if line.startswith("run ")]
    assert [line.partition(" of ")[0] for line in runs] == [
        f"run {n} (seed {42 + n}, on 1" for n in (1, 2, 3)
    ]
    assert lines[-1].startswith("2 of 3 runs green"), lines


@pytest.mark.exhaustive
def test_a_run_that_does_not_end(flaky: str, tmp_path: Path) -> None:
    run = repeat.run_once([flaky], repeat.Conditions(44_000, False, 0, 0), limit=3)
    assert not run.green
    assert run.seconds < 40
    assert run.failed  # the test, if pytest came to it in time


def test_tests_that_did_not_end_have_failed(tmp_path: Path) -> None:
    entries = [("started", "a"), ("passed", "a"), ("ended", "a"), ("started", "b")]
    record = tmp_path / "record"
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = repeat.Run(repeat.Conditions(1, False, 0, 0), -9, 3.0, "", in_time=False)
    repeat.read(record, run)
    assert run.passed == {"a"}
    assert run.failed == ["b"]


@pytest.mark.exhaustive
def test_nothing_outlives_it(flaky: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.repeat",
        "--seed",
        "44000",
        "--log",
        str(tmp_path),
        flaky,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "10 runs" in process.stdout.readline()
        while not (children := _children(process.pid)):
            time.sleep(0.05)
        process.terminate()
        said = process.stdout.read()
    assert said.endswith("0 of 0 runs green; 0 tests in 0 s\n"), said
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_no_tests_is_an_error(flaky: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        repeat.main(["-n", "1", "--log", str(tmp_path / "log"), flaky, "-k", "nothing"])
    assert "pytest found no tests" in capsys.readouterr().err


def _seconds_of_all_reduces(group: dist.ProcessGroup) -> float:
    begin = time.monotonic()
    for _ in range(50):
        torch.ops.symm_mem.one_shot_all_reduce(torch.ones(4), "sum", group.group_name)
    return time.monotonic() - begin


def test_ranks_have_delays(ranks: Ranks) -> None:
    place = Place(environment={delays.VARIABLE: "20000"})
    with ranks.own(2, _seconds_of_all_reduces, places=[place] * 2) as running:
        for outcome in running.outcomes():
            assert outcome.result > 0.05, outcome  # otherwise 0.001
