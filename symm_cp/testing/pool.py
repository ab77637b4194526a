"""Ranks for tests: processes that are started once, and run functions.

``ranks.run(world_size, function, *args)`` calls ``function(group, *args)`` on every rank, in
processes that live for the whole session, and returns the results in rank order. A failure or a
hang costs the pool its processes (their groups may be out of step); the next run starts new ones.

``with ranks.own(world_size, function, *args) as running:`` does so in new processes that run just
this: there may be more of them than in the pool, they may be killed, stopped, or run in network
namespaces. ``running.hear(rank)`` returns what the function sends by ``say(value)``,
and ``running.outcomes()`` what became of each rank.

Functions must be at the top level of their modules; arguments and results are pickled. Generators
(torch, numpy, random) start from one seed on all ranks, which follows from the session's seed, the
test's name and the number of the call.

All processes are forked from one that has imported torch and symm_cp (template.py), so that a new
rank costs a fraction of a second. What a rank executes is process.py.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from symm_cp.testing.process import Setup
from symm_cp.testing.races import check_races

SEED_VARIABLE = "SYMM_CP_TEST_SEED"
#: After as many, new processes serve the next test: threads and objects of torch pile up, and
#: compilers take ten times as long in old processes.
RUNS_OF_A_POOL = 50
START_LIMIT = 600.0  # the first start may build the native part
GRACE = 3.0  # after one rank failed, how long the others may take to end or fail by themselves
DUMP_LIMIT = 2.0

_FORKED = multiprocessing.get_context("forkserver")
_SPAWNED = multiprocessing.get_context("spawn")


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


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a network namespace, if any, and variables of its environment."""

    namespace: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a rank that ran a function in a process of its own."""

    result: Any = None
    failure: str = ""  # what the function raised, or that it did not end
    died_at: float | None = None  # by time.monotonic(), if it ended without a result
    signal: int = 0  # that ended it
    output: str = ""  # what it wrote to stdout and stderr


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
        with contextlib.suppress(ConnectionError):  # that it has ended is seen where one waits
            self.pipe.send_bytes(message)


@dataclass
class _Replies:
    """What has come back so far from some ranks that run a function."""

    ranks: Collection[int]
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    died_at: dict[int, float] = field(default_factory=dict)
    accesses: dict[int, Log] = field(default_factory=dict)  # to symmetric memory, if noted

    def pending(self) -> list[int]:
        done = self.results.keys() | self.failures.keys()
        return [rank for rank in self.ranks if rank not in done]


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
        self._folder = tempfile.TemporaryDirectory(prefix="symm-cp-ranks-")
        # As torchrun's, but hosted here and not by rank 0, so that it listens before the first rank
        # looks for it, and answers when a rank is stopped (a FileStore's lock may be what that one
        # holds). Ranks in namespaces of their own have no address in common with us.
        self._store = (
            None
            if any(place.namespace for place in places)
            else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        self._processes: list[_Process] = []
        # Once, instead of by each rank, and before anything that has to end within a time.
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
                environment={**_environment(), **place.environment},
                namespace=place.namespace,
            )
            self._processes.append(_begin(member, log, _FORKED if forked else _SPAWNED))

    def alive(self) -> bool:
        """Tells whether no process has ended."""
        return all(process.handle.is_alive() for process in self._processes)

    def pids(self) -> list[int]:
        """Returns the process ids, in rank order."""
        return [process.handle.pid or 0 for process in self._processes]

    def begin(self, call: rank_process.Call, *, last: bool = False) -> None:
        """Has ranks 0..world_size-1 run a function; `last`: and end."""
        for process in self._processes[: call.world_size]:
            process.read = process.log.stat().st_size
            process.send(pickle.dumps(call))
            if last:
                process.send(b"")

    def collect(
        self, ranks: Collection[int], timeout: float, grace: float | None = GRACE
    ) -> _Replies:
        """Waits for replies; once a rank has failed, only for `grace` seconds more."""
        replies = _Replies(ranks)
        deadline = time.monotonic() + timeout
        while pending := replies.pending():
            if replies.failures and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)
            pipes = {self._processes[rank].pipe: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                self._receive(replies, pipes[pipe])  # type: ignore[index]
        return replies

    def _receive(self, replies: _Replies, rank: int) -> None:
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
            replies.results[rank], replies.accesses[rank] = value
        else:
            replies.failures[rank] = value

    def error(self, what: str, replies: _Replies, timeout: float, seed: int) -> RankError:
        """What to raise when not all ranks have sent a result."""
        pending = replies.pending()
        stuck = self.where(pending)
        reports = {rank: f"was still here:\n{stuck[rank]}" for rank in pending}
        for rank, report in replies.failures.items():
            output = self.output(rank).strip()
            reports[rank] = f"{report}\n(output)\n{output}" if output else report
        if replies.failures:
            return RankError(f"{what}: failed on ranks {sorted(replies.failures)}", reports, seed)
        return RankTimeout(f"{what}: ranks {pending} did not end within {timeout} s", reports, seed)

    def output(self, rank: int) -> str:
        """Returns what a rank wrote since the function began."""
        return self._processes[rank].new_output()

    def where(self, pending: Sequence[int]) -> dict[int, str]:
        """Has the ranks dump the stacks of all their threads, and returns their output."""
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
        return {rank: self.output(rank) for rank in pending}

    def hear(self, rank: int, timeout: float) -> Any:
        """Returns the next value that a rank says; fails when it ends or says nothing in time."""
        process = self._processes[rank]
        deadline = time.monotonic() + timeout
        while not process.said:
            left = max(0.0, deadline - time.monotonic())
            assert process.pipe.poll(left), f"rank {rank} said nothing for {timeout} s"
            replies = _Replies([rank])
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
        """Returns the exit code of a process, once it has ended; the negative of a signal."""
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


class Running:
    """Ranks that run one function in processes of their own."""

    def __init__(self, team: Team, world_size: int) -> None:
        self._team, self._world_size = team, world_size

    def hear(self, rank: int, timeout: float = 60.0) -> Any:
        """Returns the next value that a rank says; fails when it ends or says nothing in time."""
        return self._team.hear(rank, timeout)

    def hear_all(self, timeout: float = 60.0) -> list[Any]:
        """Returns the next value of every rank."""
        return [self._team.hear(rank, timeout) for rank in range(self._world_size)]

    def kill(self, *ranks: int) -> None:
        """Sends SIGKILL, and returns when these ranks have ended."""
        self._team.kill(*ranks)

    def outcomes(self, timeout: float = 30.0, *, apart_from: Collection[int] = ()) -> list[Outcome]:
        """What became of every rank; some may be left out, which were stopped.

        Ranks that do not end in time, or were left out, are killed.
        """
        everyone = range(self._world_size)
        replies = self._team.collect(set(everyone) - set(apart_from), timeout, grace=None)
        for rank, stacks in self._team.where(replies.pending()).items():
            replies.failures[rank] = f"rank {rank} did not end within {timeout} s:\n{stacks}"
            self._team.kill(rank)
        self._team.kill(*apart_from)
        return [
            Outcome(
                replies.results.get(rank),
                replies.failures.get(rank, ""),
                replies.died_at.get(rank),
                max(0, -self._team.exit_code(rank)),
                self._team.output(rank),
            )
            for rank in everyone
        ]


class Ranks:
    """Rank processes for functions, started when first needed, and others besides."""

    def __init__(self, session_seed: int, size: int = 0, setup: Setup | None = None) -> None:
        """Without `size` every number of ranks has processes of its own, and a default group.

        With `size` there are as many processes, of which functions run on the first ones; the
        default group has all ranks.
        """
        self.session_seed = session_seed
        self.size = size
        self.setup = replace(setup or Setup(), subgroups=size > 0, launched=size == 0)
        self.options: dict[str, Any] = {}  # of the next calls: see `Setup.around`
        self._teams: dict[int, Team] = {}
        self._runs = 0
        self._started_at = 0  # of the runs
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

        Raises `RankError` with the tracebacks of all ranks that failed, `RankTimeout` with the
        stacks of ranks that have not ended after `timeout` seconds, `RaceError` where races are
        looked for (`Setup.races`) and found. `seed`: of the ranks' random
        generators, by default another one for each test and call.
        """
        __tracebackhide__ = True  # pytest shows the ranks' tracebacks, not this frame
        name = f"{function.__module__}.{function.__qualname__}"
        return self.run_test(name, world_size, function, args, kwargs, timeout, seed)

    def run_test(
        self,
        name: str,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        seed: int | None = None,
    ) -> list[Any]:
        """As `run`; errors call the function `name`."""
        __tracebackhide__ = True
        if world_size < 1 or 0 < self.size < world_size:
            required = f"in 1 to {self.size}" if self.size else "positive"
            raise ValueError(f"{world_size=} is not {required}")
        call = self._call(world_size, seed, function, args, kwargs)
        team = self.start(world_size)
        team.begin(call)
        replies = team.collect(range(world_size), timeout)
        if len(replies.results) == world_size:
            check_races(replies.accesses)
            return [replies.results[rank] for rank in range(world_size)]
        error = team.error(f"{name}, {world_size} ranks", replies, timeout, self.session_seed)
        self.close()
        raise error

    @contextlib.contextmanager
    def own(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        places: Sequence[Place] = (),
        group_timeout: datetime.timedelta | None = None,
        forked: bool = True,
    ) -> Iterator[Running]:
        """Inside, ``function(group, *args)`` runs in new processes; those left are killed.

        `places` says where each rank runs; without it all are on this host. Unless `forked`, the
        processes have imported nothing that process.py does not.
        """
        call = self._call(world_size, None, function, args, {})
        setup = replace(self.setup, subgroups=False, timeout=group_timeout or self.setup.timeout)
        team = Team(world_size, setup, places=places, forked=forked)
        try:
            self._await(team, world_size)
            team.begin(call, last=True)
            yield Running(team, world_size)
        finally:
            team.close()

    def renew(self) -> None:
        """Ends the processes if they have run much: groups, threads and garbage pile up."""
        if self._runs - self._started_at >= RUNS_OF_A_POOL:
            self.close()

    def start(self, world_size: int = 0) -> Team:
        """Starts the processes for runs of so many ranks, unless they run."""
        size = self.size or world_size
        team = self._teams.get(size)
        if team is not None and team.alive():
            return team
        if team is not None:
            self.close()
        if not self._teams:
            self._started_at = self._runs
        team = self._teams[size] = Team(size, self.setup)
        try:
            self._await(team, size)
        except RankError:
            self.close()
            raise
        return team

    def close(self) -> None:
        """Ends the processes."""
        for team in self._teams.values():
            team.close()
        self._teams = {}

    def pids(self) -> list[int]:
        """Returns the process ids, those of the ranks of one group in rank order."""
        return [pid for team in self._teams.values() for pid in team.pids()]

    def _await(self, team: Team, size: int) -> None:
        ready = team.collect(range(size), START_LIMIT)
        if len(ready.results) < size:
            what = "the rank processes did not start"
            raise team.error(what, ready, START_LIMIT, self.session_seed)

    def _call(
        self,
        world_size: int,
        seed: int | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> rank_process.Call:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self._calls = self._calls + 1 if test == self._test else 0
        self._test = test
        self._runs += 1
        if seed is None:
            seed = zlib.crc32(f"{self.session_seed} {test} {self._calls}".encode())
        pickled = pickle.dumps((function, args, kwargs))
        path, options = list(sys.path), dict(self.options)
        return rank_process.Call(world_size, seed, self._runs, path, pickled, options)


def _environment() -> dict[str, str]:
    # One thread a rank: tests run on small machines, and sums come out in one order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    defaults = {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # ranks share GPUs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms
        "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",  # nor otherwise: see process.py
    }
    return defaults | environment


def _start_template(preload: Sequence[str]) -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    environment = _environment()
    # Python 3.11's does not take our sys.path over.
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
