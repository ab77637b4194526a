"""Starts the ranks of `symm-cp` commands and benchmarks, and ends them all when one fails.

A rank is a process that runs the same command line, with its rank in the environment and the folder
of the group's store as an argument. Under torchrun the ranks are running already.

Functions import torch only where they need it: `symm-cp --help` runs without.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_TIMEOUT = datetime.timedelta(minutes=5)  # longer than any reasonable work
#: The variables that torchrun sets for each rank. Wrappers of Slurm and Kubernetes set only some.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def counts(text: str) -> list[int]:
    """Parses a number, a list (1,2,4) or a range of doubling numbers (1..128)."""
    if ".." not in text:
        return [positive(part) for part in text.split(",")]
    first, last = (positive(part) for part in text.split(".."))
    doubling = [first]
    while doubling[-1] * 2 <= last:
        doubling.append(doubling[-1] * 2)
    return doubling


def add_rendezvous(parser: argparse.ArgumentParser) -> None:
    """Adds the hidden argument for the folder of the group's store."""
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of the ranks, not the command that starts them.

    It is a rank if RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set, as torchrun does.
    """
    environment = os.environ if environment is None else environment
    return all(environment.get(name) for name in _RANK_VARIABLES)


def started_elsewhere(rendezvous: Path | None, environment: Mapping[str, str]) -> str:
    """Returns a note for users whose environment names a rank; empty if it does not.

    The command itself starts ranks with a `rendezvous`; torchrun and others start them without.
    """
    if rendezvous is not None or "RANK" not in environment:
        return ""
    if is_rank(environment):
        if environment["WORLD_SIZE"] != "1":
            return ""
        return (
            f"running as the only rank, since {', '.join(_RANK_VARIABLES)} say so: unset RANK to "
            "have this command start ranks"
        )
    missing = [name for name in _RANK_VARIABLES if not environment.get(name)]
    return (
        f"RANK={environment['RANK']} is ignored, as {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set (torchrun sets all): starting ranks here"
    )


def check_device(device: str) -> None:
    """Raises `ValueError` for `--device cuda` if no CUDA device is available."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; see symm-cp doctor")


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def exit_as_rank(
    work: Callable[[dist.ProcessGroup], int], rendezvous: Path | None, backend: str | None = None
) -> NoReturn:
    """Runs `work` as one of the ranks, and ends the process with the exit code that it returns.

    The default backend is gloo for CPU, and NCCL for CUDA if each rank has a GPU.
    """
    if rendezvous is not None:  # started here, not by torchrun
        die_with(os.getppid())
    try:
        code = _run_as_rank(work, rendezvous, backend)
    except KeyboardInterrupt:  # torchrun, which started this rank, reports it
        code = 128 + signal.SIGINT
    # Skips the interpreter's shutdown: gloo's threads that hold tensors sometimes abort it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_as_rank(
    work: Callable[[dist.ProcessGroup], int], rendezvous: Path | None, backend: str | None
) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend or _default_backend(world_size),
        init_method=f"file://{rendezvous / 'store'}" if rendezvous is not None else "env://",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    assert dist.group.WORLD is not None
    code = work(dist.group.WORLD)
    dist.destroy_process_group()
    return code


def _default_backend(world_size: int) -> str:
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    # NCCL requires a GPU for each rank.
    one_each = torch.cuda.device_count() >= world_size
    return "cpu:gloo,cuda:nccl" if one_each else "cpu:gloo,cuda:gloo"


def threads_of(world_size: int) -> int:
    """Returns how many cores `world_size` single-threaded ranks keep busy on this machine."""
    return min(world_size, len(os.sched_getaffinity(0)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Makes torch use this many threads in the `with` block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quick_barrier(group: dist.ProcessGroup) -> Callable[[], None]:
    """Returns a barrier in shared memory, which ranks leave within microseconds. Collective.

    Ranks leave gloo's barrier half a millisecond apart, which is longer than many ops take.
    """
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    word = symm_mem.empty(1, dtype=torch.int32, device="cpu")
    return symm_mem.rendezvous(word, group).barrier


def run_ranks(command: str, world_size: int, arguments: Sequence[str]) -> int:
    """Runs `symm-cp` with these arguments on `world_size` ranks; returns the worst exit code.

    Returns 2 if a rank ended with a code other than 0 or 1, and prints that as a failure of
    `command`.
    """
    return run_program(f"symm-cp {command}", world_size, ["-m", "symm_cp", *arguments])


def run_program(name: str, world_size: int, arguments: Sequence[str]) -> int:
    """Like `run_ranks`, for a program that Python runs with these arguments."""
    with tempfile.TemporaryDirectory(prefix="symm-cp-") as folder:
        # argparse takes the last of two --rendezvous.
        processes, _ = _run([*arguments, "--rendezvous", folder], world_size)
        codes = [process.wait() for process in processes]
    failed = {rank: code for rank, code in enumerate(codes) if code not in (0, 1)}
    for rank, code in failed.items():
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        print(f"{name}: rank {rank} {reason}", file=sys.stderr)
    return 2 if failed else max(codes)


def run_limited(
    arguments: Sequence[str],
    world_size: int,
    *,
    seconds: float,
    variables: Mapping[str, str],
) -> list[int | None]:
    """Runs ranks for at most `seconds`, with these variables in their environment.

    Returns their exit codes: None for ranks killed because the time was over. Their output goes to
    stderr. Returns a little later at most, even if a rank cannot be killed.
    """
    processes, late = _run(arguments, world_size, seconds, variables)
    return [None if was_late else p.poll() for p, was_late in zip(processes, late, strict=True)]


def _start(
    rank: int,
    world_size: int,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    import torch

    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",  # unused: ranks meet in the folder of their store
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        **(variables or {}),
    }
    if 0 < torch.cuda.device_count() < world_size:
        # Lets torch allocate symmetric memory for ranks that share a GPU.
        env.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with _blocked(signal.SIGINT):
        return subprocess.Popen(
            [sys.executable, *arguments], env=env, stdout=None if variables is None else sys.stderr
        )


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Delivers a signal only after the body, and never to the processes that the body starts.

    A terminal sends Ctrl-C to the ranks, too; each would print a traceback, also while Python
    starts. The command that started them ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    arguments: Sequence[str],
    world_size: int,
    seconds: float = math.inf,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[subprocess.Popen[bytes]], list[bool]]:
    """Returns the processes, killed if they did not end, and whether the time was over for each."""
    deadline = time.monotonic() + seconds
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [_start(rank, world_size, arguments, variables) for rank in range(world_size)]
        while time.monotonic() < deadline and any(p.poll() is None for p in started):
            if any(p.poll() for p in started):
                # Peers of a failed rank fail by themselves, with an error that names it.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        late = [p.poll() is None for p in started]
    finally:
        _kill(started)
        _wait(started, _GRACE_SECONDS / 5)
    return started, late


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills processes; stops all of them first, else peers would report the first one's death."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            process.send_signal(number)  # does nothing once the process has ended


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(_POLL_SECONDS)
