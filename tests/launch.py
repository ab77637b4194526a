"""Ranks that a test starts for itself, to kill them or to have more than the pool has.

``with launch(world_size, function, *args) as ranks:`` runs ``function(group, say, *args)`` in new
processes; ``say(text)`` sends a line, which ``ranks.hear(rank)`` returns.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
_STORE, _TIMEOUT = "SYMM_CP_TEST_STORE", "SYMM_CP_TEST_TIMEOUT"
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what its command begins with, and variables of its environment."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Launched:
    """Running ranks."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], pipes: list[Connection]) -> None:
        self.processes = processes
        self._pipes = pipes

    def hear(self, rank: int, timeout: float = 60.0) -> str:
        """Returns the next line of a rank; fails when it ended or said nothing in time."""
        assert self._pipes[rank].poll(timeout), f"rank {rank} said nothing for {timeout} s"
        try:
            kind, text = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            code = self.processes[rank].wait()
            raise AssertionError(f"rank {rank} ended with code {code}") from None
        assert kind == "said", f"rank {rank} failed:\n{text}"
        return str(text)

    def hear_all(self, timeout: float = 60.0) -> list[str]:
        """Returns the next line of every rank."""
        return [self.hear(rank, timeout) for rank in range(len(self.processes))]

    def kill(self, *ranks: int) -> None:
        """Sends SIGKILL."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGKILL)


@contextlib.contextmanager
def launch(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    places: Sequence[Place] = (),
    timeout: datetime.timedelta = GROUP_TIMEOUT,
) -> Iterator[Launched]:
    """Starts the ranks and, at the end, kills those that still run.

    `places` says where each rank runs; without it all are on this host.
    """
    processes, pipes = [], []
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            _STORE: f"{folder}/store",
            _TIMEOUT: str(timeout.total_seconds()),
        }
        for rank in range(world_size):
            parent_end, child_end = Pipe()
            descriptor = child_end.fileno()
            numbers = [rank, world_size, descriptor, os.getpid()]
            place = places[rank] if places else Place()
            processes.append(
                subprocess.Popen(
                    [*place.prefix, sys.executable, "-m", "tests.launch", *map(str, numbers)],
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=_ROOT,
                    env={**environment, **place.environment},
                )
            )
            child_end.close()
            parent_end.send_bytes(pickle.dumps((sys.path, pickle.dumps((function, args)))))
            pipes.append(parent_end)
        try:
            yield Launched(processes, pipes)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.wait()
                pipe.close()


def _main() -> None:
    from tests.rank_process import die_with

    rank, world_size, descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    timeout = datetime.timedelta(seconds=float(os.environ[_TIMEOUT]))
    # A file: ranks in network namespaces of their own have no address in common with the parent.
    store = dist.FileStore(os.environ[_STORE], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    path, call = pickle.loads(pipe.recv_bytes())
    sys.path[:] = path
    function, args = pickle.loads(call)

    def say(text: object) -> None:
        pipe.send_bytes(pickle.dumps(("said", str(text))))

    try:
        function(dist.group.WORLD, say, *args)
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _main()
