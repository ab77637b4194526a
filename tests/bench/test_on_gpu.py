"""The runner of on_gpu.py: verdicts, limits, resumption, claims."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import FAILED, KILLED, PASSED, SKIPPED, State
from benchmarks.on_gpu_steps import CLAIMS, FIRST, STEPS, Claim, Item, Step

ROOT = Path(__file__).resolve().parents[2]


def step(name: str, program: str, *arguments: object, seconds: float = 30.0) -> Step:
    return Step(name, "", seconds, (sys.executable, "-c", program, *map(str, arguments)))


def outcomes(folder: Path, *steps: Step, minutes: float = 10.0, again: bool = False) -> State:
    on_gpu.run(steps, State.of(folder), minutes=minutes, again=again)
    return State.of(folder)  # as another call reads it


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_verdicts(tmp_path: Path) -> None:
    passes = step("passes", "print('12 passed')")
    no_tests = replace(passes, name="no-tests", command=(*passes.command, "pytest"))
    fails = step("fails", "import sys; print('an error\\n'); sys.exit(3)")
    dies = step("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    absent = Step("absent", "", 9.0, (str(tmp_path / "nothing"),))
    state = outcomes(tmp_path, passes, no_tests, fails, dies, absent)
    found = {name: (o.verdict, o.detail) for name, o in state.outcomes.items()}
    assert found["passes"] == (PASSED, "12 passed")
    assert found["no-tests"] == (FAILED, "no test ran; last line: 12 passed")
    assert found["fails"] == (FAILED, "exit code 3; last line: an error")
    assert found["dies"][0] == FAILED
    assert found["dies"][1].startswith("ended by SIGSEGV")
    assert found["absent"][0] == FAILED
    assert "does not start" in found["absent"][1]
    assert (tmp_path / "fails.txt").read_text() == "an error\n\n"
    assert on_gpu.exit_code([passes], state.outcomes) == 0
    assert on_gpu.exit_code([passes, fails], state.outcomes) == 1
    assert on_gpu.exit_code([step("later", "")], state.outcomes) == 2


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


def all_ended(folder: Path) -> bool:
    """Tells whether both processes of `_HANGS` have started, and end within a few seconds."""
    paths = [folder / f"{name}.pid" for name in ("parent", "child")]
    assert all(path.read_text() for path in paths)

    def ended(path: Path) -> bool:
        status = Path("/proc", path.read_text(), "status")
        return not status.exists() or "State:\tZ" in status.read_text()

    return within(5, lambda: all(map(ended, paths)))


def test_a_step_that_hangs_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    began = time.monotonic()
    hangs = step("hangs", _HANGS, tmp_path, seconds=2.0)
    state = outcomes(tmp_path, hangs, step("next", ""))
    assert time.monotonic() - began < 30
    outcome = state.outcomes["hangs"]
    assert outcome.verdict == KILLED
    assert outcome.detail.startswith("killed after ")
    # Where it hung.
    assert "the_function_that_hangs" in (tmp_path / "hangs.txt").read_text()
    assert all_ended(tmp_path)
    assert state.outcomes["next"].verdict == PASSED
    assert on_gpu.exit_code([hangs], state.outcomes) == 1


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
    works = step("works", "", seconds=100.0)  # begins with more than half of it left
    absent = replace(works, name="absent", program="a-program-that-is-not-there")
    long = replace(works, name="long", seconds=150.0)
    state = outcomes(tmp_path, absent, long, works, minutes=1.0)
    assert {name: o.verdict for name, o in state.outcomes.items()} == {
        "absent": SKIPPED,
        "long": SKIPPED,
        "works": PASSED,
    }
    assert state.outcomes["absent"].detail == "a-program-that-is-not-there is not installed"
    assert state.outcomes["long"].detail.startswith("takes 150 s, ")
    # A skipped step is tried again; a step with a result keeps it.
    state = outcomes(tmp_path, long, minutes=2.0)
    assert state.outcomes["long"].verdict == PASSED
    state = outcomes(tmp_path, long, minutes=1.0, again=True)
    assert state.outcomes["long"].verdict == PASSED


_RUNNER = """
import sys
from pathlib import Path
from benchmarks import on_gpu
from tests.bench.test_on_gpu import _HANGS, step
folder = Path(sys.argv[1])
on_gpu.STEPS = (step("hangs", _HANGS, folder),)
on_gpu.describe_machine = lambda: {"gpus": ["none"]}
sys.exit(on_gpu.main(["--results", str(folder)]))
"""


def test_an_interrupted_call_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", _RUNNER, str(tmp_path)], cwd=ROOT)
    assert within(20, (tmp_path / "child.pid").exists)
    time.sleep(0.1)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(30) == 128 + signal.SIGTERM
    assert "not run" in (tmp_path / "report.txt").read_text()
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"report.txt", "on_gpu.json", "hangs.txt"} <= set(archive.getnames())
    assert all_ended(tmp_path)


def test_the_first_list_takes_nine_minutes_and_names_files_that_exist() -> None:
    assert sum(one.seconds for one in FIRST) == 540
    assert all(one.simulated is not None for one in FIRST)
    assert len({one.name for one in STEPS}) == len(STEPS)
    for one in STEPS:
        assert one.why
        for part in (*one.command, *(one.simulated or ((), {}))[0]):
            if part.startswith(("tests/", "benchmarks/")):
                assert (ROOT / part.partition("::")[0]).exists(), part


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu.main(["--list", "--only", "tune", "build"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[::2]] == ["build", "tune"]
    monkeypatch.setattr(on_gpu, "describe_machine", lambda: {"gpus": []})
    assert on_gpu.main(["--results", str(tmp_path)]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


# --- claims ----------------------------------------------------------------------------------


def row(case: str, algorithm: str = "shards", **times: Any) -> dict[str, Any]:
    return {"case": case, "algorithm": algorithm, "by_size": True} | times


def verdicts(*rows: dict[str, Any], step: str = "loopback") -> dict[str, tuple[str, str]]:
    items = [Item(step, f"{r['case']} {r['algorithm']}", True, "", r) for r in rows]
    names = {"ahead": "host issues", "torch": "torch's pipelines", "gaps": "gaps"}
    names |= {"by size": "by size", "tiles": "0.95"}
    return {
        short: claim.verdict(items)
        for short, part in names.items()
        for claim in CLAIMS
        if part in claim.name
    }


def test_figures_decide_on_claims() -> None:
    name = "all-gather-matmul"
    good = row(name, host_us=20, device_us=100, torch_device_us=110, gap_us=4)
    other = row(name, "whole", by_size=False, device_us=99)
    held = verdicts(good, other)
    assert {held[k][0] for k in ("ahead", "torch", "gaps", "by size")} == {"held"}
    assert held["tiles"] == ("not run", "")
    bad = row(name, host_us=120, device_us=100, torch_device_us=90, gap_us=14)
    found = verdicts(bad, {**other, "device_us": 80})
    assert {found[k][0] for k in ("ahead", "torch", "gaps", "by size")} == {"not held"}
    assert found["torch"][1] == "all-gather-matmul shards: 1.11 of torch's"
    assert found["by size"][1] == "all-gather-matmul: shards takes 1.25 of the fastest"
    alone = row("tiles alone, polling", "tiles", device_us=100, alone_us=96)
    assert verdicts(alone, step="tiles")["tiles"][0] == "held"
    assert verdicts({**alone, "alone_us": 94}, step="tiles")["tiles"][0] == "not held"


def test_results_decide_on_claims(tmp_path: Path) -> None:
    tests = "<testcase name='right'/><testcase name='left out'><skipped/></testcase>"
    wrong = "<testcase name='wrong'><failure message='1 != 2'/></testcase>"
    (tmp_path / "tests.xml").write_text(f"<testsuite>{tests}{wrong}</testsuite>")
    parts = [{"items": [{"name": "symmetric", "state": "hung", "detail": "rank 1"}]}]
    (tmp_path / "self.json").write_text(json.dumps({"parts": parts}))
    (tmp_path / "half.json").write_text('{"rows": [')
    names = ("tests", "self", "half")
    items = [i for name in names for i in on_gpu.items_of(step(name, ""), tmp_path)]
    assert [(i.name, i.passed) for i in items] == [
        ("right", True), ("wrong", False), ("symmetric", False),
    ]  # fmt: skip
    assert Claim("", "tests", "right").verdict(items) == ("held", "1 of 1")
    assert Claim("", "tests").verdict(items) == ("not held", "wrong 1 != 2")
    assert Claim("", "tests", "left").verdict(items) == ("not run", "")
    assert Claim("", "self").verdict(items) == ("not held", "symmetric rank 1")


def test_a_step_that_crashes_holds_no_claim(tmp_path: Path) -> None:
    state = State.of(tmp_path)
    (tmp_path / "selftest.json").write_text('{"parts": []}')
    state.outcomes["selftest"] = on_gpu.Outcome(FAILED, "ended by SIGABRT", "")
    assert f"not held  {CLAIMS[0].name}: selftest ended by SIGABRT" in on_gpu.report(state)


def test_claims_are_the_table_of_the_readme() -> None:
    text = (ROOT / "symm_cp/cuda/README.md").read_text()
    table = text[text.index("| claim |") :].split("\n\n")[0]
    assert re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:] == [c.name for c in CLAIMS]


_NEEDS = {
    "test_a.py": "import a_package_that_is_not_there\n",
    "test_b.py": "from importlib import metadata\nmetadata.files('a_package_that_is_not_there')\n",
    "test_c.py": "def test_c(): pass\n",
    "test_d.py": "import tests.a_module_that_is_not_there\n",
}


def test_missing_packages_skip_modules(tmp_path: Path) -> None:
    for name, text in _NEEDS.items():
        (tmp_path / name).write_text(text)

    def ran(*arguments: str) -> str:
        line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
        done = subprocess.run(
            [*line, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.stdout

    plugin = ("-p", "tests.missing")
    assert "3 errors" in ran(*_NEEDS)
    assert "1 passed, 2 skipped" in ran(*plugin, "test_a.py", "test_b.py", "test_c.py")
    assert "1 error" in ran(*plugin, "test_d.py")  # ours
