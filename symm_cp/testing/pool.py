"""Ranks for tests: processes that are started once, and run functions.

``ranks.run(world_size, function, *args)`` calls ``function(group, *args)`` on every rank, in
processes that live for the whole session, and returns the results in rank order. A failure or a
hang ends the pool's processes (their groups may be out of step); the next run starts new ones.

``with ranks.own(world_size, function, *args) as running:`` does so in new processes that run just
this: there may be more of them than in the pool, they may be killed, stopped, or run in network
namespaces. ``running.hear(rank)`` returns the next value that the function sends by ``say(value)``,
and ``running.outcomes()`` the outcome of each rank.

Functions must be at the top level of their modules; arguments and results are pickled. Generators
(torch, numpy, random) start from one seed on all ranks, derived from the session's seed, the test's
name and the number of the call.

team.py starts the processes; a rank executes process.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from symm_cp.testing import process as rank_process
from symm_cp.testing.outcomes import RankError
from symm_cp.testing.process import Setup
from symm_cp.testing.races import check_races
from symm_cp.testing.team import Place, Team

#: After this many runs, the next test gets new processes: threads and objects of torch pile up, and
#: compilers take ten times as long in old processes.
RUNS_OF_A_POOL = 50
START_LIMIT = 600.0  # the first start may build the native part


@dataclass(frozen=True)
class Outcome:
    """The outcome of a rank that ran a function in a process of its own."""

    result: Any = None
    failure: str = ""  # the function's error, or a note that it did not end
    died_at: float | None = None  # by time.monotonic(), if it ended without a result
    signal: int = 0  # the signal that ended it
    output: str = ""  # its stdout and stderr


class Running:
    """Ranks that run one function in processes of their own."""

    def __init__(self, team: Team, world_size: int) -> None:
        self._team, self._world_size = team, world_size

    def hear(self, rank: int, timeout: float = 60.0) -> Any:
        """Returns a rank's next value of `say`; fails when it ends or says nothing in time."""
        return self._team.hear(rank, timeout)

    def hear_all(self, timeout: float = 60.0) -> list[Any]:
        """Returns the next value of every rank."""
        return [self._team.hear(rank, timeout) for rank in range(self._world_size)]

    def kill(self, *ranks: int) -> None:
        """Sends SIGKILL, and returns when these ranks have ended."""
        self._team.kill(*ranks)

    def outcomes(self, timeout: float = 30.0, *, apart_from: Collection[int] = ()) -> list[Outcome]:
        """Returns the outcome of every rank; does not wait for ranks in `apart_from`.

        Kills ranks that do not end in time, and ranks in `apart_from`.
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
    """Rank processes for functions, started when first needed; `own` starts others."""

    def __init__(self, session_seed: int, size: int = 0, setup: Setup | None = None) -> None:
        """Without `size`, each world size has its own processes and default group.

        With it there are `size` processes, and functions run on the first ones; the default group
        has all ranks.
        """
        self.session_seed = session_seed
        self.size = size
        self.setup = replace(setup or Setup(), subgroups=size > 0, launched=size == 0)
        self.options: dict[str, Any] = {}  # for the next calls: see `Setup.around`
        # Keyed by the number of ranks, and by whether their groups have the pool's time-out.
        self._teams: dict[tuple[int, bool], Team] = {}
        self._runs = 0
        self._started_at = 0  # the number of runs at the start
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
        stacks of ranks that have not ended after `timeout` seconds, `RaceError` for races if
        `Setup.races`. `seed` is the seed of the ranks' random generators, by default another one
        for each test and call.
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
        group_timeout: datetime.timedelta | None = None,
    ) -> list[Any]:
        """Like `run`; errors call the function `name`; `group_timeout` is the default group's."""
        __tracebackhide__ = True
        if world_size < 1 or 0 < self.size < world_size:
            required = f"in 1 to {self.size}" if self.size else "positive"
            raise ValueError(f"{world_size=} is not {required}")
        call = self._call(world_size, seed, function, args, kwargs)
        team = self.start(world_size, group_timeout)
        team.begin(call)
        replies = team.collect(range(world_size), timeout)
        if len(replies.results) == world_size:
            if replies.unusable:
                self.close()
            check_races(replies.accesses)
            return [replies.results[rank] for rank in range(world_size)]
        error = team.error(f"{name}, {world_size} ranks", replies, timeout, self.session_seed)
        if not replies.all_skipped():
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
        """Runs ``function(group, *args)`` in new processes; finally kills the remaining ones.

        `places` says where each rank runs; without it all are on this host. Unless `forked`, the
        processes import only what process.py does.
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
        """Ends the processes after many runs: groups, threads and garbage pile up."""
        if self._runs - self._started_at >= RUNS_OF_A_POOL:
            self.close()

    def start(self, world_size: int = 0, group_timeout: datetime.timedelta | None = None) -> Team:
        """Starts the processes for runs on `world_size` ranks, unless they run already."""
        size = self.size or world_size
        setup = replace(self.setup, timeout=group_timeout or self.setup.timeout)
        key = size, setup == self.setup
        team = self._teams.get(key)
        if team is not None and not team.alive():
            self.close()
            team = None
        if team is not None and team.setup == setup:
            return team
        if team is not None:  # its time-out is not the pool's: one such team at a time
            team.close()
        if not self._teams:
            self._started_at = self._runs
        team = self._teams[key] = Team(size, setup)
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
        """Returns the process ids; within a group, in rank order."""
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
    ) -> rank_process.RankTask:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self._calls = self._calls + 1 if test == self._test else 0
        self._test = test
        self._runs += 1
        if seed is None:
            seed = zlib.crc32(f"{self.session_seed} {test} {self._calls}".encode())
        pickled = pickle.dumps((function, args, kwargs))
        path, options = list(sys.path), dict(self.options)
        return rank_process.RankTask(world_size, seed, self._runs, path, pickled, options)
