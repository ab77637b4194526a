"""Commands that end in time, and NVIDIA's MPS while one runs: for first_hour.py."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Seconds between the signal on which Python writes its stacks and the one that kills.
_STACKS_SECONDS = 3.0
# And then for the other processes of the session, which write theirs at the same time.
_OTHERS_SECONDS = 0.3
_MPS = "nvidia-cuda-mps-control"
_MPS_SECONDS = 20.0

#: The id of a process, and when it started: ids are used again.
Started = tuple[int, int]


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *others = text[text.rindex(")") + 2 :].split()
    return None if state == "Z" else int(others[18])


def kill_group(leader: Started) -> bool:
    """Kills the processes of a session that `run` has started; returns whether it was there."""
    pid, began = leader
    if _start_time(pid) != began:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return True


def run(
    command: Sequence[str],
    *,
    seconds: float,
    variables: Mapping[str, str],
    output: Path,
    folder: Path,
    on_start: Callable[[Started], object] = lambda _: None,
) -> int | None:
    """Runs a command in a session of its own, which is killed when the time is over.

    Returns its exit code; None if it was killed. Python processes write their stacks to `output`
    before. No process of the session is left, whatever happens here.
    """
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **variables}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            on_start((process.pid, _start_time(process.pid) or 0))
            return _wait(process, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STACKS_SECONDS)
        time.sleep(_OTHERS_SECONDS)
        return None


def without_core_files() -> None:
    """Has this process and its children write none: a hung step would leave gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


class MpsError(RuntimeError):
    """MPS cannot be used here."""


def _mps_variables() -> dict[str, str]:
    # Not in the folder of the results: paths of sockets must be short. The same place in each run,
    # so that a run finds the daemon of a killed run.
    place = Path(tempfile.gettempdir(), f"symm_cp_mps_{os.getuid()}")
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(place / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(place / "log"),
    }


def _control(variables: Mapping[str, str], *arguments: str, text: str = "") -> str:
    """Calls the control program; returns its output, or raises `MpsError`."""
    try:
        done = subprocess.run(
            [_MPS, *arguments], input=text, env={**os.environ, **variables}, text=True,
            capture_output=True, check=False, timeout=_MPS_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"{_MPS} did not answer within {_MPS_SECONDS:g} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise MpsError(f"{_MPS}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _stop_mps(variables: Mapping[str, str]) -> None:
    """Stops the daemon, first by asking it."""
    number = Path(variables["CUDA_MPS_PIPE_DIRECTORY"], f"{_MPS}.pid")
    try:
        _control(variables, text="quit -t 5\n")
    except MpsError:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(number.read_text()), signal.SIGTERM)


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Runs a daemon of MPS in a pipe directory of its own; gives its clients' variables.

    Processes that share a GPU then run at the same time, not in turns. Raises `MpsError` where the
    machine does not allow it.
    """
    if shutil.which(_MPS) is None:
        raise MpsError(f"{_MPS} is not installed")
    variables = _mps_variables()
    for place in variables.values():
        Path(place).mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).iterdir()):
        _stop_mps(variables)  # left by a killed run
    _control(variables, "-d")
    try:
        yield variables
    finally:
        _stop_mps(variables)
