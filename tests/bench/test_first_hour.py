"""The runner of the first hour on a GPU: verdicts, time-outs, resumption, reasons to skip."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bounded, first_hour
from benchmarks.first_hour import FAILED, KILLED, PASSED, SKIPPED, Outcome, State
from benchmarks.first_hour_steps import STEPS, Step, simulated

ROOT = Path(__file__).resolve().parents[2]
#: A call over a network has ten minutes, some of which it needs to start.
_CALL_SECONDS = 8 * 60


def step(name: str, program: str, *arguments: object, seconds: float = 30.0) -> Step:
    return Step(name, "", (sys.executable, "-c", program, *map(str, arguments)), seconds)


def outcomes(folder: Path, *steps: Step, minutes: float = 10.0, again: bool = False) -> State:
    state = State.of(folder)
    first_hour.run(steps, state, minutes=minutes, again=again)
    return State.of(folder)  # as another call reads it


def ended(pid: int) -> bool:
    """Tells whether a process has ended, even if its parent has not yet waited for it."""
    return bounded._start_time(pid) is None


def all_end(processes: list[int]) -> bool:
    """Tells whether all processes end within a few seconds."""
    return within(5, lambda: all(map(ended, processes)))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_verdicts(tmp_path: Path) -> None:
    passes = replace(step("passes", "print('12 passed')"), expects=r"\b[1-9]\d* passed")
    skips_all = replace(step("skips-all", "print('3 skipped')"), expects=r"\b[1-9]\d* passed")
    fails = step("fails", "import sys; print('an error\\n'); sys.exit(3)")
    dies = step("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    absent = Step("absent", "", (str(tmp_path / "nothing"),), 9.0)
    state = outcomes(tmp_path, passes, skips_all, fails, dies, absent)
    found = {name: (o.verdict, o.detail) for name, o in state.outcomes.items()}
    assert found["passes"] == (PASSED, "12 passed")
    assert found["skips-all"][0] == FAILED
    assert "has nothing like" in found["skips-all"][1]
    assert found["fails"] == (FAILED, "exit code 3; last line: an error")
    assert found["dies"][0] == FAILED
    assert found["dies"][1].startswith("ended by SIGSEGV")
    assert found["absent"][0] == FAILED
    assert "does not start" in found["absent"][1]
    assert (tmp_path / "fails.txt").read_text() == "an error\n\n"
    text = first_hour.report([passes, fails, step("later", "")], state)
    assert "fails   failed" in text
    assert "later   -" in text
    assert first_hour.exit_code([passes], state.outcomes) == 0
    assert first_hour.exit_code([passes, fails], state.outcomes) == 1
    assert first_hour.exit_code([step("later", "")], state.outcomes) == 2


_HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, *sys.orig_argv[1:], "child"])
name = "child" if len(sys.argv) > 2 else "parent"
pathlib.Path(sys.argv[1], name + ".pid").write_text(str(os.getpid()))
def the_function_that_hangs():
    time.sleep(120)
the_function_that_hangs()
"""


def pids(folder: Path) -> list[int]:
    """Waits until both processes of `_HANGS` have started, and returns their ids."""
    paths = [folder / f"{name}.pid" for name in ("parent", "child")]
    assert within(20, lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def test_a_step_that_hangs_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    began = time.monotonic()
    state = outcomes(tmp_path, step("hangs", _HANGS, tmp_path, seconds=3.0), step("next", ""))
    assert time.monotonic() - began < 30
    outcome = state.outcomes["hangs"]
    assert outcome.verdict == KILLED
    assert outcome.detail.startswith("killed after 3 s")
    # Where it hung.
    assert "the_function_that_hangs" in (tmp_path / "hangs.txt").read_text()
    assert all_end(pids(tmp_path))
    assert state.outcomes["next"].verdict == PASSED
    assert first_hour.exit_code([step("hangs", "")], state.outcomes) == 1


def test_finished_steps_are_not_run_again(tmp_path: Path) -> None:
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('x'); sys.exit(1)"
    counted = step("counted", program, tmp_path / "runs")

    def runs_after(*steps: Step, again: bool = False) -> int:
        outcomes(tmp_path, *steps, again=again)
        return len((tmp_path / "runs").read_text())

    assert runs_after(counted) == 1
    assert runs_after(counted) == 1
    assert runs_after(counted, again=True) == 2
    # Other variables make it a different step.
    assert runs_after(replace(counted, variables={"CUDA_MODULE_LOADING": "EAGER"})) == 3


def test_reasons_to_skip(tmp_path: Path) -> None:
    works = step("works", "", seconds=50.0)
    absent = replace(works, name="absent", program="a-program-that-is-not-there")
    long = replace(works, name="long", seconds=100.0)
    state = outcomes(tmp_path, absent, long, works, minutes=1.0)
    assert {name: o.verdict for name, o in state.outcomes.items()} == {
        "absent": SKIPPED,
        "long": SKIPPED,
        "works": PASSED,
    }
    assert state.outcomes["absent"].detail == "a-program-that-is-not-there is not installed"
    assert state.outcomes["long"].detail.startswith("needs up to 100 s, ")
    # A skipped step is tried again; a step with a result keeps it.
    state = outcomes(tmp_path, long, minutes=2.0)
    assert state.outcomes["long"].verdict == PASSED
    state = outcomes(tmp_path, long, minutes=1.0, again=True)
    assert state.outcomes["long"].verdict == PASSED


_CONTROL = """#!/bin/sh
echo "$@ $(cat) $CUDA_MPS_PIPE_DIRECTORY" >>"$MPS_LOG"
if [ "$1" = -d ] && [ -n "$MPS_REFUSES" ]; then echo "no permission"; exit 1; fi
"""


def test_mps_runs_during_a_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "import os; print(os.environ['CUDA_MPS_PIPE_DIRECTORY'])"
    shared, log = replace(step("shared", says), mps=True), tmp_path / "calls"
    monkeypatch.setenv("PATH", str(tmp_path))
    state = outcomes(tmp_path, shared)
    assert state.outcomes["shared"].detail == "no MPS: nvidia-cuda-mps-control is not installed"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(_CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("MPS_LOG", str(log))
    monkeypatch.setenv("MPS_REFUSES", "1")
    state = outcomes(tmp_path, shared)
    assert state.outcomes["shared"].verdict == SKIPPED
    assert "no permission" in state.outcomes["shared"].detail
    monkeypatch.delenv("MPS_REFUSES")
    log.unlink()
    state = outcomes(tmp_path, shared)
    assert state.outcomes["shared"].verdict == PASSED
    pipe = state.outcomes["shared"].detail
    assert pipe.startswith(str(tmp_path))
    assert [" ".join(line.split()) for line in log.read_text().splitlines()] == [
        f"-d {pipe}",
        f"quit -t 5 {pipe}",
    ]
    # A killed call has left its daemon running.
    Path(pipe, "control").touch()
    log.unlink()
    outcomes(tmp_path, shared, again=True)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["quit", "-d", "quit"]


_RUNNER = """
import sys
from pathlib import Path
from benchmarks import first_hour
from benchmarks.first_hour import State
from tests.bench.test_first_hour import _HANGS, step
folder = Path(sys.argv[1])
first_hour.STEPS = (step("hangs", _HANGS, folder),)
first_hour.describe_machine = lambda: {"gpus": ["none"]}
sys.exit(first_hour.main(["--results", str(folder)]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_call_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", _RUNNER, str(tmp_path)], cwd=ROOT)
    left = pids(tmp_path)
    assert within(10, lambda: State.of(tmp_path).running is not None)
    runner.send_signal(number)
    code = runner.wait(30)
    if number == signal.SIGTERM:
        assert code == 128 + number
        assert "not run yet" in (tmp_path / "report.txt").read_text()
    else:
        assert not any(map(ended, left))
        State.of(tmp_path).take_over()
    assert all_end(left)
    state = State.of(tmp_path)
    assert state.running is None
    assert "hangs" not in state.outcomes


def test_a_process_that_took_over_an_id_is_not_killed() -> None:
    assert not bounded.kill_group((os.getpid(), 1))


def test_every_step_fits_into_a_call_and_names_files_that_exist() -> None:
    assert len({one.name for one in STEPS}) == len(STEPS)
    for one in (*STEPS, *simulated()):
        assert one.seconds <= _CALL_SECONDS, one.name
        assert one.why
        for part in one.command:
            if part.startswith(("tests", "benchmarks", "--ignore=tests", "--deselect=tests")):
                path = part.partition("=")[2] or part
                assert (ROOT / path.partition("::")[0]).exists(), part
    cases = (ROOT / "benchmarks/cuda_suite.py").read_text()
    for one in STEPS:
        if one.name.startswith("suite-"):
            name = one.command[one.command.index("--case") + 1].split(",")[0]
            assert name in cases, one.name


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    folder = ["--results", str(tmp_path)]
    assert first_hour.main([*folder, "--list", "--only", "tune", "doctor"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in listed[::2]] == [["doctor", "-"], ["tune", "-"]]
    with pytest.raises(SystemExit, match="2"):
        first_hour.main([*folder, "--only", "nothing"])
    monkeypatch.setattr(first_hour, "describe_machine", lambda: {"gpus": []})
    assert first_hour.main(folder) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
    assert first_hour.main([*folder, "--simulated", "--only", "tune"]) == 2
    known = json.loads((tmp_path / "first_hour.json").read_text())["outcomes"]["tune"]
    assert Outcome(**known).detail == "has no form on the simulated driver"


RUN_SIMULATED = (
    *("doctor", "selftest-2", "selftest-one-connection"),
    *("loopback", "loopback-graphs"),
    *("gpu", "gpu-ranks", "ops-matmul", "ops-attention", "ops-exchange"),
)


def run_simulated(folder: Path, *arguments: str) -> str:
    line = [sys.executable, "benchmarks/first_hour.py", "--simulated", "--results", str(folder)]
    done = subprocess.run(
        [*line, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUN_SIMULATED)
def test_a_step_on_the_simulated_driver(tmp_path: Path, name: str) -> None:
    """Runs the commands here, so that their first run is not the one on a GPU."""
    run_simulated(tmp_path, "--only", name)
    assert {each: o.verdict for each, o in State.of(tmp_path).outcomes.items()} == {name: PASSED}
    if name == "loopback-graphs":
        rows = json.loads((tmp_path / "loopback-graphs.json").read_text())["rows"]
        assert all(row["replay_us"] > 0 for row in rows)
    assert run_simulated(tmp_path, "--only", name).count("passed before") == 1


def test_steps_without_a_form_on_the_simulated_driver() -> None:
    assert {each.name for each in simulated() if not each.skip} == set(RUN_SIMULATED)
