"""The commands `symm-cp build` and `symm-cp doctor`, and the help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from symm_cp import cli, native
from symm_cp import doctor as doctor_module


def test_build_prints_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build"]) == 0
    library, glue = map(Path, capsys.readouterr().out.split())
    assert library == native.library_path()
    assert glue.parent == library.parent
    assert library.is_file()
    assert glue.is_file()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
def test_unknown_commands_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    commands = ("demo", "run", "doctor", "plan", "bench", "trace", "calibrate", "tune", "build")
    assert all(f"\n    {command}" in shown for command in commands)


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "symm_cp", "doctor", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_doctor_finds_a_working_backend() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert findings["CPU"]["state"] == "ok"
    assert findings["compiler"]["state"] == "ok"
    assert "Autograd" in findings["fused_all_gather_matmul"]["detail"]
    for finding in findings.values():
        assert bool(finding["advice"]) == (finding["state"] == "missing"), finding


def test_doctor_lists_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    calibrated, tuned = doctor_module.measured()
    assert (calibrated.state, tuned.state) == ("missing", "missing")
    assert "symm-cp calibrate --ranks" in calibrated.advice
    assert "symm-cp tune --ranks" in tuned.advice
    for name in ("machine_2.toml", "machine_4.toml", "tuned_2.json"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
        os.utime(tmp_path / name, (0, 86400 * 366))
    (tmp_path / "machine_4.toml").chmod(0o666)
    two, four, tuned = doctor_module.measured()
    assert two.state == tuned.state == "ok"
    assert f"{tmp_path / 'machine_2.toml'}, 1971-01-0" in two.detail
    assert "symm-cp calibrate --ranks 2" in two.detail
    assert "others can write" in four.detail
    assert "symm-cp calibrate --ranks 4" in four.advice


def test_doctor_lists_unneeded_ops_on_one_line() -> None:
    findings = doctor_module.op_findings()
    assert not [finding for finding in findings if finding.detail in ("none", "Meta")]
    (others,) = (finding for finding in findings if finding.name == "others")
    assert "as expected" in others.detail
    assert "multimem_*" in others.detail


@pytest.mark.exhaustive
def test_doctor_says_what_to_install(tmp_path: Path) -> None:
    done = doctor(SYMM_CP_BUILD_DIR=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 1
    assert "apt install g++" in done.stdout
    assert "Traceback" not in done.stderr
