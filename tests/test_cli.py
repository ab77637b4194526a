"""The commands `symm-cp build` and `symm-cp doctor`, and the help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from symm_cp import cli, native


def test_build_prints_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == native.library_path()
    assert path.is_file()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
def test_unknown_commands_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "doctor", "build"))


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


def test_doctor_says_what_to_install(tmp_path: Path) -> None:
    done = doctor(SYMM_CP_BUILD_DIR=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 1
    assert "apt install g++" in done.stdout
    assert "Traceback" not in done.stderr
