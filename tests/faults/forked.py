"""Ranks forked from one process that has imported everything: one that is killed costs no seconds.

`python -m tests.faults.forked CASE ...`: `kill:WORLD_SIZE:OP` kills the last rank before each step
of an op, `stop:WORLD_SIZE:OP` stops it before the op, `asleep:WORLD_SIZE:WAIT` kills it while the
others sleep. Prints as JSON what those had to say.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import native
from symm_cp.runtime.probe import probing
from tests import device
from tests.faults.ops import ALL
from tests.rank_process import die_with

GROUP_TIMEOUT = datetime.timedelta(seconds=30)
LIMIT = 20.0  # for all that is asked of a rank


def fork_ranks(
    world_size: int, work: Callable[[dist.ProcessGroup], Any], *, stopped: int | None = None
) -> list[Any]:
    """What `work` returns on each rank, or when that ended without a word.

    Nobody waits for the rank `stopped`.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, pids = [], []
        for rank in range(world_size):
            mine, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                _as_rank(rank, world_size, f"{folder}/store", work, theirs)
            theirs.close()
            pipes.append(mine)
            pids.append(pid)
        outcomes: list[Any] = [{"hung": True} for _ in range(world_size)]
        deadline = time.monotonic() + LIMIT
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank != stopped}
        while left and (ready := wait(list(left), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = left.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = {"died at": time.monotonic()}
        for rank in (*left.values(), *(() if stopped is None else (stopped,))):
            os.kill(pids[rank], signal.SIGKILL)
        for pid, outcome in zip(pids, outcomes, strict=True):
            status = os.waitpid(pid, 0)[1]
            if isinstance(outcome, dict) and os.WIFSIGNALED(status):
                outcome["ended by"] = os.WTERMSIG(status)
    return outcomes


def _as_rank(
    rank: int,
    world_size: int,
    store: str,
    work: Callable[[dist.ProcessGroup], Any],
    pipe: Connection,
) -> None:
    try:
        die_with(os.getppid())
        torch.manual_seed(rank)
        dist.init_process_group(
            device.backend(),
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
        pipe.send(work(dist.group.WORLD))
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send({"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def count_steps(world_size: int, op: str) -> int:
    """How many steps the last rank takes in a call."""

    def work(group: dist.ProcessGroup) -> int:
        ALL[op](group)
        with probing() as steps:
            ALL[op](group)
        return steps.count

    outcome = fork_ranks(world_size, work)[-1]
    assert isinstance(outcome, int), outcome
    return outcome


def _seconds(survivors: list[Any], killed: Any) -> list[float | None]:
    """From the death of a rank until each of the others was told."""
    return [
        said["at"] - killed["died at"] if "at" in said and "died at" in killed else None
        for said in survivors
    ]


def kill_before(world_size: int, op: str, step: int) -> dict[str, Any]:
    """The last rank dies before a step of its call; the others go on until they are told."""
    victim = world_size - 1

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        run = ALL[op]
        run(group)
        if group.rank() == victim:
            with probing(fatal=step):
                run(group)
            return {"survived": True}
        calls, message = 0, ""
        while not message:
            try:
                run(group)
                calls += 1
            except RuntimeError as error:
                message, at = str(error), time.monotonic()
        # The same process goes on at once with those that are left.
        others = dist.new_group(list(range(victim)), use_local_synchronization=True)
        for name in ("gather_matmul", "low_contention"):
            ALL[name](others)
        return {"at": at, "calls": calls, "message": message}

    before = set(os.listdir("/dev/shm"))
    *survivors, killed = fork_ranks(world_size, work)
    return {
        "op": op,
        "ranks": world_size,
        "step": step,
        "killed": killed,
        "survivors": survivors,
        "seconds": _seconds(survivors, killed),
        "left behind": sorted(set(os.listdir("/dev/shm")) - before),
    }


def stop_before(world_size: int, op: str) -> dict[str, Any]:
    """The last rank stops instead of calling an op; the others wait for 400 ms."""
    victim = world_size - 1
    os.environ["SYMM_CP_TIMEOUT_MS"] = "400"

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        ALL[op](group)
        dist.barrier(group)
        if group.rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        start = time.monotonic()
        try:
            ALL[op](group)
        except RuntimeError as error:
            return {"seconds": time.monotonic() - start, "message": str(error)}
        return {}

    outcomes = fork_ranks(world_size, work, stopped=victim)
    del os.environ["SYMM_CP_TIMEOUT_MS"]
    *survivors, _ = outcomes
    seconds = [said.get("seconds") for said in survivors]
    return {"op": op, "ranks": world_size, "survivors": survivors, "seconds": seconds}


def _wait_for_rank(group: dist.ProcessGroup, kind: str, peer: int) -> None:
    """Waits, in one of the ways that symmetric memory has."""
    shared = symm_mem.empty(16, device="cpu")
    handle = symm_mem.rendezvous(shared, group)
    handle.barrier()
    if group.rank() == peer:
        time.sleep(0.3)  # the others are asleep by then
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "barrier":
        handle.barrier()
    elif kind == "wait_signal":
        handle.wait_signal(peer)
    else:
        symm_mem.rendezvous(symm_mem.empty(16, device="cpu"), group)


def kill_while_asleep(world_size: int, kind: str) -> dict[str, Any]:
    """The last rank dies while the others sleep."""

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        try:
            _wait_for_rank(group, kind, world_size - 1)
        except RuntimeError as error:
            said = {"at": time.monotonic(), "message": str(error)}
            time.sleep(0.5)  # alive, so that the others find that one rank alone
            return said
        return {}

    *survivors, killed = fork_ranks(world_size, work)
    seconds = _seconds(survivors, killed)
    return {"op": kind, "ranks": world_size, "survivors": survivors, "seconds": seconds}


def kill_everywhere(world_size: int, op: str) -> list[dict[str, Any]]:
    """Kills before each step."""
    return [kill_before(world_size, op, step) for step in range(count_steps(world_size, op))]


CASES: dict[str, Callable[[int, str], Any]] = {
    "kill": kill_everywhere,
    "stop": stop_before,
    "asleep": kill_while_asleep,
}


def prepare() -> None:
    """Does what ranks would otherwise each do for themselves."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    native.load()
    importlib.import_module("torch.distributed.tensor")  # with what gradients import at first use


def main() -> None:
    """Runs the cases that were named."""
    prepare()
    found = {}
    for case in sys.argv[1:]:
        what, world_size, op = case.split(":")
        found[case] = CASES[what](int(world_size), op)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
