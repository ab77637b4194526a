"""Rank processes that live for the whole test session, and run functions of the tests.

Starting a process that imports torch takes seconds, so four are started once, in parallel, and
reused: ``ranks.run(world_size, function, *args)`` calls ``function(group, *args)`` on ranks 0 to
``world_size - 1`` and returns their results. A failure or a hang costs the pool its processes
(their groups may be out of step); the next run starts new ones.

The parent half is here; `tests/rank_process.py` is what a child executes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

SIZE = 4
SEED_VARIABLE = "SYMM_CP_TEST_SEED"
START_LIMIT = 600.0  # the first start may build the native part
GRACE = 3.0  # after one rank failed, how long the others may take to end or fail by themselves
DUMP_LIMIT = 2.0
GROUP_TIMEOUT = datetime.timedelta(seconds=60)  # shorter than a run's: its errors say more

_ROOT = Path(__file__).resolve().parent.parent


class RankError(AssertionError):
    """Some ranks of a run failed; the message holds every failing rank's traceback."""

    def __init__(self, what: str, reports: Mapping[int, str], seed: int) -> None:
        lines = [f"{what} (repeat with {SEED_VARIABLE}={seed})"]
        for rank, report in sorted(reports.items()):
            lines += [f"--- rank {rank} ---", report.rstrip()]
        super().__init__("\n".join(lines))
        self.reports = dict(reports)


class RankTimeout(RankError):
    """Some ranks did not end in time; the message says where each of them was."""


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    pipe: Connection
    log: IO[bytes]
    read: int = 0  # bytes of the log that belong to earlier runs

    # The process has the file's position in common with us: we never move it.
    def new_output(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        output = os.pread(self.log.fileno(), size - self.read, self.read)
        return output.decode(errors="replace")

    def mark(self) -> None:
        self.read = os.fstat(self.log.fileno()).st_size


@dataclass
class _Run:
    """What has come back so far from the ranks of one run."""

    world_size: int
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def pending(self) -> list[int]:
        done = self.results.keys() | self.failures.keys()
        return [rank for rank in range(self.world_size) if rank not in done]


class Ranks:
    """A pool of `size` rank processes, started when first needed."""

    def __init__(self, session_seed: int, size: int = SIZE) -> None:
        self.session_seed = session_seed
        self.size = size
        self._runs = 0
        self._processes: list[_Process] = []
        self._store: dist.TCPStore | None = None
        self._test = ""
        self._calls = 0

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``function(group, *args, **kwargs)`` on ranks 0..world_size-1; returns results.

        The function must be at the top level of its module; arguments and results are pickled.
        Every rank's generators (torch, numpy, random) start from the same seed: by default one
        that follows from the session's seed, the test's name and the number of the call.
        """
        __tracebackhide__ = True  # pytest shows the ranks' tracebacks, not this frame
        if not 1 <= world_size <= self.size:
            raise ValueError(f"{world_size=} is not in 1 to {self.size}")
        seed = self._next_seed() if seed is None else seed
        self._runs += 1
        self.start()
        call = pickle.dumps((function, args, kwargs))
        for process in self._processes[:world_size]:
            process.mark()
            process.pipe.send_bytes(pickle.dumps((world_size, seed, self._runs, sys.path, call)))
        name = f"{function.__module__}.{function.__qualname__}, {world_size} ranks"
        run = self._collect(world_size, timeout)
        if not run.failures and not run.pending():
            return [run.results[rank] for rank in range(world_size)]
        error = self._error(name, run, timeout)
        self.close()
        raise error

    def start(self) -> None:
        """Starts the processes unless they run."""
        if self._processes and all(p.popen.poll() is None for p in self._processes):
            return
        self.close()
        # Hosted here and not by rank 0, so that it listens before the first rank looks for it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = [_spawn(rank, self.size, self._store.port) for rank in range(self.size)]
        run = self._collect(self.size, START_LIMIT)
        if run.failures or run.pending():
            error = self._error("the rank processes did not start", run, START_LIMIT)
            self.close()
            raise error

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.pipe.close()  # an idle child ends by itself; the others are killed
            process.popen.kill()
        for process in self._processes:
            process.popen.wait()
            process.log.close()
        self._processes = []
        self._store = None

    def pids(self) -> list[int]:
        """Returns the process ids, in rank order."""
        return [process.popen.pid for process in self._processes]

    def _next_seed(self) -> int:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self._calls = self._calls + 1 if test == self._test else 0
        self._test = test
        return zlib.crc32(f"{self.session_seed} {test} {self._calls}".encode())

    def _collect(self, world_size: int, timeout: float) -> _Run:
        run = _Run(world_size)
        deadline = time.monotonic() + timeout
        while pending := run.pending():
            if run.failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            pipes = {self._processes[rank].pipe: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                self._receive(run, pipes[pipe])  # type: ignore[index]
        return run

    def _receive(self, run: _Run, rank: int) -> None:
        process = self._processes[rank]
        try:
            kind, value = pickle.loads(process.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            run.failures[rank] = f"the process ended with code {process.popen.wait()}"
            return
        (run.results if kind == "result" else run.failures)[rank] = value

    def _error(self, what: str, run: _Run, timeout: float) -> RankError:
        pending = run.pending()
        stuck = self._where(pending)
        reports = {**run.failures, **{rank: f"was still here:\n{stuck[rank]}" for rank in pending}}
        for rank in run.failures:
            if output := self._processes[rank].new_output().strip():
                reports[rank] += f"\n(output)\n{output}"
        if run.failures:
            return RankError(
                f"{what}: failed on ranks {sorted(run.failures)}", reports, self.session_seed
            )
        message = f"{what}: ranks {pending} did not end within {timeout} s"
        return RankTimeout(message, reports, self.session_seed)

    def _where(self, pending: Sequence[int]) -> dict[int, str]:
        """Has the ranks dump the stacks of all their threads, and returns their output."""
        for rank in pending:
            with contextlib.suppress(ProcessLookupError):
                self._processes[rank].popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_LIMIT
        marker = "most recent call first"
        while time.monotonic() < deadline:
            outputs = {rank: self._processes[rank].new_output() for rank in pending}
            if all(marker in output for output in outputs.values()):
                break
            time.sleep(0.05)
        time.sleep(0.1)  # the dump is written line by line
        return {rank: self._processes[rank].new_output() for rank in pending}


def _spawn(rank: int, size: int, port: int) -> _Process:
    parent_end, child_end = Pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
    # One thread a rank: the tests run on small machines, and sums come out in one order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks share GPUs
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    command = [sys.executable, "-u", "-m", "tests.rank_process"]
    popen = subprocess.Popen(
        [*command, str(rank), str(size), str(port), str(child_end.fileno()), str(os.getpid())],
        pass_fds=[child_end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=_ROOT,
        env=environment,
    )
    child_end.close()
    return _Process(popen, parent_end, log)
