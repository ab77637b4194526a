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
from symm_cp.doctor import accelerated


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


def test_doctor_judges_the_settings_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(**environment: str) -> dict[str, tuple[str, str]]:
        for name in ("SYMM_CP_SIGNALS", "SYMM_CP_SELFTEST"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = accelerated.cuda_settings(environment)
        assert all(bool(f.advice) == (f.state == "missing") for f in found)
        return {f.name: (f.state, f.detail) for f in found}

    by_default = judged()
    assert by_default["CUDA_MODULE_LOADING"][0] == "missing"
    assert by_default["CUDA_DEVICE_MAX_CONNECTIONS"] == ("info", "not set: 8 queues")
    assert by_default["SYMM_CP_SIGNALS"][1].startswith("not set: the first way")
    assert "SYMM_CP_SELFTEST" not in by_default
    chosen = judged(
        CUDA_MODULE_LOADING="EAGER", CUDA_DEVICE_MAX_CONNECTIONS="1", SYMM_CP_SIGNALS="kernel",
        SYMM_CP_SELFTEST="0",
    )  # fmt: skip
    assert chosen["CUDA_MODULE_LOADING"] == ("ok", "EAGER")
    assert "share a queue" in chosen["CUDA_DEVICE_MAX_CONNECTIONS"][1]
    assert chosen["SYMM_CP_SIGNALS"] == ("info", "kernel")
    assert chosen["SYMM_CP_SELFTEST"][0] == "missing"
    state, detail = judged(SYMM_CP_SIGNALS="bells")["SYMM_CP_SIGNALS"]
    assert (state, "must be 'stream', 'kernel' or 'torch'" in detail) == ("missing", True)


def test_doctor_judges_driver_and_backend() -> None:
    new = accelerated.cuda_driver(13010, "batched copies")
    assert (new.state, new.detail) == ("ok", "CUDA 13.1; batched copies; streams can signal")
    old = accelerated.cuda_driver(12040, "single copies")
    assert old.state == "missing"
    assert old.advice == "update the driver: streams signal from CUDA 12.5 on"
    states = {name: accelerated.symmetric_memory(name).state for name in ("CUDA", "NCCL", None)}
    assert states == {"CUDA": "ok", "NCCL": "info", None: "missing"}
    assert "before the first op of symm_cp" in accelerated.symmetric_memory("CUDA").detail
