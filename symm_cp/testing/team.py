"""Rank processes that are started together: pool.py keeps them, they execute process.py.

All are forked from one process that has imported torch and symm_cp (template.py), so that a new
rank costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from symm_cp import native
from symm_cp.testing import process as rank_process
from symm_cp.testing.accesses import Log
from symm_cp.testing.outcomes import STUCK, RankError, RankTimeout, Skip, waited_for_a_skip
from symm_cp.testing.process import Setup

# Seconds that the other ranks get to end by themselves after one rank has failed; and seconds after
# which a rank that skipped the test is killed, so that the others stop waiting for it.
GRACE = 3.0
DUMP_LIMIT = 2.0

_HERE = re.escape(str(Path(__file__).parent))
_PLUMBING = re.compile(
    rf'^  File "({_HERE}/|<|.*/multiprocessing/|.*/threading\.py).*\n', re.MULTILINE
)
_NO_FRAMES = re.compile(r"^(Current thread|Thread) 0x.*:\n+(?!  File)", re.MULTILINE)
_FORKED = multiprocessing.get_context("forkserver")
_SPAWNED = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a network namespace, if any, and variables of its environment."""

    namespace: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Process:
    handle: BaseProcess
    pipe: Connection
    log: Path
    read: int = 0  # bytes of the log that belong to earlier runs
    said: list[Any] = field(default_factory=list)

    def new_output(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.read)
            return log.read().decode(errors="replace")

    def send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the wait for its reply reports a dead process
            self.pipe.send_bytes(message)


@dataclass
class Replies:
    """The replies so far from ranks that run a function."""

    ranks: Collection[int]
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    died_at: dict[int, float] = field(default_factory=dict)
    accesses: dict[int, Log] = field(default_factory=dict)  # to symmetric memory, if noted
    skips: dict[int, Skip] = field(default_factory=dict)  # skips in `failures`, oldest first
    unusable: bool = False  # a rank has lost the groups that later calls need

    def pending(self) -> list[int]:
        """Returns the ranks that have not ended."""
        done = self.results.keys() | self.failures.keys()
        return [rank for rank in self.ranks if rank not in done]

    def failed(self) -> list[int]:
        """Returns the ranks that failed, except by waiting for a rank that skipped."""
        return [
            rank
            for rank, report in sorted(self.failures.items())
            if rank not in self.skips and not (self.skips and waited_for_a_skip(report))
        ]

    def all_skipped(self) -> bool:
        """Whether all ranks skipped, so that they are still in step."""
        return len(self.skips) == len(self.ranks) and not self.unusable


class Team:
    """Rank processes that were started together, and find each other by a store of their own."""

    def __init__(
        self,
        size: int,
        setup: Setup,
        *,
        places: Sequence[Place] = (),
        forked: bool = True,
    ) -> None:
        self.setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="symm-cp-ranks-")
        # Like torchrun's store, but hosted here and not by rank 0: it listens before the first rank
        # looks for it, and answers while a rank is stopped (a stopped rank may hold a FileStore's
        # lock). Ranks in their own namespaces have no address in common with this process.
        self._store = (
            None
            if any(place.namespace for place in places)
            else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        self._processes: list[_Process] = []
        # Build once, not in each rank, and before anything with a time-out.
        native.build()
        native.build_glue()
        _start_template(setup.preload)
        for rank in range(size):
            place = places[rank] if places else Place()
            log = Path(self._folder.name, f"rank {rank}")
            log.touch()
            member = rank_process.Member(
                rank=rank,
                world_size=size,
                store=self._store.port if self._store else f"{self._folder.name}/store",
                setup=setup,
                log=str(log),
                environment={**_environment(setup.threads), **place.environment},
                namespace=place.namespace,
            )
            self._processes.append(_begin(member, log, _FORKED if forked else _SPAWNED))

    def alive(self) -> bool:
        """Tells whether all processes are still running."""
        return all(process.handle.is_alive() for process in self._processes)

    def pids(self) -> list[int]:
        """Returns the process ids, in rank order."""
        return [process.handle.pid or 0 for process in self._processes]

    def begin(self, call: rank_process.RankTask, *, last: bool = False) -> None:
        """Makes ranks 0..world_size-1 run a function and, if `last`, end."""
        for process in self._processes[: call.world_size]:
            process.read = process.log.stat().st_size
            process.send(pickle.dumps(call))
            if last:
                process.send(b"")

    def collect(
        self, ranks: Collection[int], timeout: float, grace: float | None = GRACE
    ) -> Replies:
        """Waits for replies; once a rank has failed, only for `grace` seconds more.

        If other ranks have not ended `grace` seconds after a skip, it kills the ranks that skipped,
        so that the others stop waiting for them.
        """
        replies = Replies(ranks)
        deadline = time.monotonic() + timeout
        ended = False
        while pending := replies.pending():
            until = deadline
            if grace is not None and replies.failed():
                until = deadline = min(deadline, time.monotonic() + grace)
            elif grace is not None and replies.skips and not ended:
                until = min(deadline, time.monotonic() + grace)
            pipes = {self._processes[rank].pipe: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, until - time.monotonic()))
            if not ready and until < deadline:
                self.kill(*replies.skips)
                ended = True
                continue
            if not ready:
                break
            for pipe in ready:
                self._receive(replies, pipes[pipe])  # type: ignore[index]
        return replies

    def _receive(self, replies: Replies, rank: int) -> None:
        process = self._processes[rank]
        try:
            kind, value = pickle.loads(process.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            replies.died_at[rank] = time.monotonic()
            process.handle.join()
            replies.failures[rank] = f"the process ended with code {process.handle.exitcode}"
            return
        if kind == "said":
            process.said.append(value)
        elif kind == "result":
            replies.results[rank], replies.accesses[rank], usable = value
            replies.unusable |= not usable
        elif kind == "skip":
            skip, report, usable = value
            replies.unusable |= not usable
            if not replies.failed():  # a rank that failed earlier did not wait for this one
                replies.skips[rank] = skip
            replies.failures[rank] = report
        else:
            replies.failures[rank] = value

    def error(self, what: str, replies: Replies, timeout: float, seed: int) -> RankError:
        """Returns the error to raise when not all ranks have sent a result."""
        pending, failed = replies.pending(), replies.failed()
        stuck = self.where(pending)
        reports = {rank: f"{STUCK}\n{stuck[rank]}" for rank in pending}
        for rank, report in replies.failures.items():
            output = self.output(rank).strip()
            reports[rank] = f"{report}\n(output)\n{output}" if output else report
        if replies.skips and not failed and all(waited_for_a_skip(reports[r]) for r in pending):
            skip = next(iter(replies.skips.values()))
            return RankError(
                f"{what}: skipped on ranks {sorted(replies.skips)}", reports, seed, skip
            )
        if failed:
            return RankError(f"{what}: failed on ranks {failed}", reports, seed, failed=failed)
        return RankTimeout(f"{what}: ranks {pending} did not end within {timeout} s", reports, seed)

    def output(self, rank: int) -> str:
        """Returns what a rank wrote since the function began."""
        return self._processes[rank].new_output()

    def where(self, pending: Sequence[int]) -> dict[int, str]:
        """Makes the ranks dump the stacks of all their threads, and returns their output."""
        for rank in pending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids()[rank], signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_LIMIT
        marker = "most recent call first"
        while time.monotonic() < deadline:
            if all(marker in self.output(rank) for rank in pending):
                break
            time.sleep(0.05)
        time.sleep(0.1)  # the dump is written line by line
        return {rank: _without_plumbing(self.output(rank)) for rank in pending}

    def hear(self, rank: int, timeout: float) -> Any:
        """Returns a rank's next value of `say`; fails when it ends or says nothing in time."""
        process = self._processes[rank]
        deadline = time.monotonic() + timeout
        while not process.said:
            left = max(0.0, deadline - time.monotonic())
            assert process.pipe.poll(left), f"rank {rank} said nothing for {timeout} s"
            replies = Replies([rank])
            self._receive(replies, rank)
            assert not replies.failures, f"rank {rank} failed:\n{replies.failures[rank]}"
            assert process.said, f"rank {rank} has ended"
        return process.said.pop(0)

    def kill(self, *ranks: int) -> None:
        """Sends SIGKILL, and returns when these processes have ended."""
        for rank in ranks:
            self._processes[rank].handle.kill()
        for rank in ranks:
            self._processes[rank].handle.join()

    def exit_code(self, rank: int) -> int:
        """Returns the exit code of a process, once it has ended; for a signal, its negative."""
        self._processes[rank].handle.join()
        code = self._processes[rank].handle.exitcode
        assert code is not None
        return code

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.pipe.close()  # an idle one ends by itself; the others are killed
        self.kill(*range(len(self._processes)))
        self._processes = []
        self._store = None
        self._folder.cleanup()


def _without_plumbing(stacks: str) -> str:
    """Returns the stacks of threads without frames that lead to the test, and without idle threads.

    These are threads that have only such frames.
    """
    return _NO_FRAMES.sub("", _PLUMBING.sub("", stacks))


def _environment(threads: int) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    defaults = {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # ranks share GPUs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms
        "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",  # see collect_garbage_seldom
    }
    return defaults | environment


def _start_template(preload: Sequence[str]) -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    environment = _environment(threads=1)
    # Python 3.11's fork server does not take over our sys.path.
    path = [folder for folder in sys.path if folder]
    environment["PYTHONPATH"] = os.pathsep.join([*path, environment.get("PYTHONPATH", "")])
    _FORKED.set_forkserver_preload([*preload, "symm_cp.testing.template"])
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()


def _begin(member: rank_process.Member, log: Path, context: Any) -> _Process:
    ours, theirs = Pipe()
    with theirs:
        handle = context.Process(target=rank_process.main, args=(theirs, member), daemon=True)
        handle.start()
    return _Process(handle, ours, log)
