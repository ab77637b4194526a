"""The commands `symm-cp build` and `symm-cp doctor`, the help, and how commands end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from symm_cp import cli, native, ranks
from symm_cp.commands import doctor as doctor_module
from symm_cp.parsing import STDOUT


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
    commands = ("demo", "run", "doctor", "bench", "trace", "tune", "build")
    assert all(f"\n    {command}" in shown for command in commands)


#: The command's script as pip writes it.
SCRIPT = """import sys
from symm_cp.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
REPOSITORY = str(Path(__file__).resolve().parents[1])


def over_torch(
    folder: Path, torch: str, *arguments: str, script: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command where torch is a file with this content, and nothing was ever built."""
    (folder / "torch.py").write_text(torch)
    (folder / "symm-cp").write_text(SCRIPT)
    program = [str(folder / "symm-cp")] if script else ["-m", "symm_cp"]
    path = os.pathsep.join([str(folder), REPOSITORY])
    env = {**os.environ, "PYTHONPATH": path, "SYMM_CP_BUILD_DIR": str(folder / "built")}
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip


HELP = [
    ["--version"], ["--help"], ["doctor", "-h"], ["demo", "--help"], ["bench", "--help"],
    ["trace", "--help"], ["tune", "--help"], ["selftest", "--help"], ["build", "--help"],
]  # fmt: skip


@pytest.mark.parametrize("script", [False, True])
def test_help_takes_neither_torch_nor_a_build(script: bool, tmp_path: Path) -> None:
    for arguments in HELP if not script else HELP[:3]:
        done = over_torch(tmp_path, "raise ImportError", *arguments, script=script)
        assert (done.returncode, done.stderr) == (0, ""), (arguments, done.stderr)
        assert done.stdout.startswith("symm_cp 0." if "version" in arguments[0] else "usage: ")
    wrong = over_torch(tmp_path, "raise ImportError", "bench", "--nonsense", script=script)
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    # Other commands do import torch.
    assert "ImportError" in over_torch(tmp_path, "raise ImportError", "tune").stderr
    assert not (tmp_path / "built").exists()


@pytest.mark.exhaustive
def test_help_of_run_takes_no_build(tmp_path: Path) -> None:
    """The help is torchrun's."""
    done = subprocess.run(
        [sys.executable, "-m", "symm_cp", "run", "--help"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "SYMM_CP_BUILD_DIR": str(tmp_path / "built")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node" in done.stdout
    assert not (tmp_path / "built").exists()


def test_an_interrupt_while_torch_is_imported(tmp_path: Path) -> None:
    done = over_torch(tmp_path, "raise KeyboardInterrupt", "doctor")
    assert (done.returncode, done.stderr) == (130, "\nsymm-cp: interrupted\n")


def interrupted(arguments: Sequence[str], begun: str) -> tuple[int, str]:
    """Sends Ctrl-C to a command and its ranks once it prints `begun`; returns code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "symm_cp", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    while begun not in (line := process.stdout.readline()):
        assert line, process.communicate()
    sent = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - sent < 15
    return process.returncode, error


@pytest.mark.exhaustive
def test_an_interrupt_ends_a_command_and_its_ranks_in_a_line() -> None:
    code, error = interrupted(["bench", "collectives", "--seconds", "0.1"], "all-reduce")
    assert code == 130, error
    assert [line for line in error.splitlines() if line] == ["symm-cp: interrupted"], error


def test_a_terminal_interrupts_no_rank(tmp_path: Path) -> None:
    """Else each rank prints a traceback, even while Python starts; the command ends its ranks."""
    program = (
        "import os, pathlib, signal, sys\n"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(signal.SIGINT in blocked))\n"
    )
    assert ranks.run_limited(["-c", program, str(tmp_path)], 2, seconds=60, variables={}) == [0, 0]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["True", "True"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


WAITING_RANKS = """import os, pathlib, sys, time
from symm_cp import ranks

folder = pathlib.Path(sys.argv[1])

def wait(group):
    (folder / f"{os.getpid()}").touch()
    time.sleep(60)
    return 0

if ranks.is_rank():
    ranks.exit_as_rank(wait, pathlib.Path(sys.argv[3]))
sys.exit(ranks.run_program("waiting", 2, sys.argv[:2]))
"""


def test_ranks_end_with_the_command_that_started_them(tmp_path: Path) -> None:
    """Even if it is killed: else ranks keep the cores busy, or wait for each other."""
    program, pids = tmp_path / "waiting.py", tmp_path / "pids"
    program.write_text(WAITING_RANKS)
    pids.mkdir()
    command = subprocess.Popen(
        [sys.executable, str(program), str(pids)], env={**os.environ, "PYTHONPATH": REPOSITORY}
    )
    deadline = time.monotonic() + 60
    while len(found := [int(path.name) for path in pids.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    command.kill()
    command.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_a_reader_that_stops_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "symm_cp", "doctor"],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


def test_only_all_variables_together_make_a_rank() -> None:
    assert ranks.is_rank(RANK)
    for name in RANK:
        assert not ranks.is_rank({n: v for n, v in RANK.items() if n != name})
        assert not ranks.is_rank({**RANK, name: ""})
    assert ranks.started_elsewhere(None, RANK) == ranks.started_elsewhere(None, {}) == ""
    assert ranks.started_elsewhere(Path("folder"), {"RANK": "0"}) == ""
    assert "running as the only rank" in ranks.started_elsewhere(None, {**RANK, "WORLD_SIZE": "1"})


@pytest.mark.parametrize("command", ["demo", "bench", "trace", "tune"])
def test_a_wrappers_rank_is_ignored(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrappers of Slurm and Kubernetes set RANK in processes that are not ranks."""
    started: list[object] = []
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    for module in ("bench.command", "harness.start"):
        monkeypatch.setattr(
            f"symm_cp.commands.{module}.run_ranks", lambda *args: started.append(args) or 1
        )
    assert cli.main([command, *(["attention"] if command == "trace" else [])]) == 1
    assert [(args[0], args[1]) for args in started] == [(command, 2)]  # type: ignore[index]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"symm-cp {command}: RANK=3 is ignored, as WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not "
        "set (torchrun sets all): starting ranks here"
    )


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "symm_cp", "doctor", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.exhaustive
def test_doctor_finds_a_working_backend() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert findings["CPU"]["state"] == "ok"
    assert findings["compiler"]["state"] == "ok"
    assert "fused_all_gather_matmul" in findings["for CPU, CUDA, gradients"]["detail"]
    for finding in findings.values():
        assert bool(finding["advice"]) == (finding["state"] == "missing"), finding


def test_json_goes_to_a_file_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = doctor_module.Finding("backends", "CPU", "ok", "works")
    monkeypatch.setattr(doctor_module, "examine", lambda: [finding])
    for arguments, shows_text in (
        (["--json", str(tmp_path / "a" / "b.json")], True),
        (["--json"], False),
    ):
        assert cli.main(["doctor", *arguments]) == 0
        shown = capsys.readouterr().out
        assert ("+ CPU" in shown) == shows_text
        text = Path(arguments[1]).read_text() if shows_text else shown
        assert json.loads(text)[0]["name"] == "CPU"


def test_json_is_an_option_of_all_reports_alike() -> None:
    (commands,) = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    options = {
        name: option
        for name, parser in commands.choices.items()  # type: ignore[union-attr]
        for option in parser._actions
        if "--json" in option.option_strings
    }
    assert {"bench", "demo", "doctor", "explain", "selftest"} <= set(options)
    for name, option in options.items():
        assert (option.nargs, option.const, option.type) == ("?", STDOUT, Path), name


def test_doctor_lists_ops_by_their_kernels() -> None:
    ops = {finding.name: finding.detail.split(", ") for finding in doctor_module.ops()}
    assert "nvshmem_put" in ops["for CPU"]
    assert "fused_all_gather_matmul" in ops["for CPU, CUDA, gradients"]


@pytest.mark.exhaustive
def test_doctor_says_what_to_install(tmp_path: Path) -> None:
    done = doctor(SYMM_CP_BUILD_DIR=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 1
    assert "apt install g++" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_judges_the_settings_of_cuda() -> None:
    def judged(backend: str | None = "CUDA", **environment: str) -> dict[str, str]:
        found = list(doctor_module.cuda_settings(environment, backend))
        assert all(bool(f.advice) == (f.state == "missing") for f in found)
        return {f.name: f.state for f in found}

    assert judged() == {"CUDA_MODULE_LOADING": "missing", "torch's symmetric memory": "ok"}
    assert judged(None, CUDA_MODULE_LOADING="EAGER") == {"torch's symmetric memory": "missing"}
    assert judged("NCCL", CUDA_DEVICE_MAX_CONNECTIONS="1", SYMM_CP_SELFTEST="0") == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "info",
        "CUDA_MODULE_LOADING": "missing",
        "SYMM_CP_SELFTEST": "missing",
        "torch's symmetric memory": "info",
    }


def test_doctor_judges_the_driver() -> None:
    new = doctor_module.cuda_driver(13010)
    assert (new.state, new.detail) == ("ok", "CUDA 13.1; streams can signal peers")
    old = doctor_module.cuda_driver(12040)
    assert (old.state, old.advice) == ("missing", "update it: they can from CUDA 12.5 on")
