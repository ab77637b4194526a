"""What a rank process executes: it joins the other ranks, then answers calls, until it is ended.

The tests start rank processes by `tests/pool.py`; `say` is for what they run.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import symm_cp  # noqa: F401 - as a user does; registers the CPU backend
from symm_cp import env, native, tuning
from symm_cp.context_parallel import layouts
from tests import delays, device

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_MAX_LOCAL = 400
_FIRST_GROUP = 1000
_GROUPS_OF_A_RUN = 1000


@dataclass(frozen=True)
class Member:
    """One of the rank processes that are started together."""

    rank: int
    world_size: int
    store: int | str  # the port of a TCPStore, or the path of a FileStore
    backend: str
    timeout: datetime.timedelta
    log: str  # the file that takes stdout and stderr
    environment: Mapping[str, str]
    namespace: str  # of the network, as `ip netns` calls it
    subgroups: bool  # whether ranks 0..W-1 form a group for every W


@dataclass(frozen=True)
class Call:
    """A function to run on some ranks."""

    world_size: int
    seed: int
    number: int  # of the runs so far
    device: str
    path: list[str]
    function: bytes  # pickled, with its arguments: `path` has to be set before it is unpickled


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def collect_garbage_seldom() -> None:
    """Has Python look for garbage less often, and never among the objects that there are now.

    With its usual threshold, 700 new objects, compilers spend up to a fifth of their time on it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


_pipe: Connection | None = None


def say(value: object) -> None:
    """Sends a value to the test, which hears it before the function returns."""
    assert _pipe is not None, "only a rank process can say something"
    _pipe.send_bytes(pickle.dumps(("said", value)))


def describe(error: BaseException) -> str:
    """Formats an error with the local variables of each frame of the tests."""
    summary = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in summary.stack:
        if frame.locals is not None:
            in_tests = f"{os.sep}tests{os.sep}" in frame.filename and frame.filename != __file__
            frame.locals = {
                name: text if len(text) <= _MAX_LOCAL else f"{text[:_MAX_LOCAL]}..."
                for name, text in frame.locals.items()
                if in_tests
            }
    return "".join(summary.format())


def _settle(member: Member) -> None:
    """Takes on what is particular to this process: output, environment, network."""
    log = os.open(member.log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # of crashes
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(member.environment)
    _forget_the_machine(Path(member.log).parent)
    if member.namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", member.namespace).open() as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns: {member.namespace}")


def _forget_the_machine(folder: Path) -> None:
    """Passes over what the user has measured, by which ops would choose other schedules."""
    users = env.build_dir()

    def elsewhere(path: Path) -> Path:
        return folder / path.name if path.parent == users else path

    for name in ("machine_path", "tuned_path"):
        usual = getattr(tuning, name)
        setattr(tuning, name, lambda ranks, usual=usual: elsewhere(usual(ranks)))


def _join(member: Member) -> dict[int, dist.ProcessGroup]:
    """Returns the groups of ranks 0..W-1 that this rank is in, by W."""
    store: dist.Store
    if isinstance(member.store, int):
        store = dist.TCPStore("127.0.0.1", member.store, is_master=False, timeout=member.timeout)
    else:
        store = dist.FileStore(member.store, member.world_size)
    dist.init_process_group(
        member.backend,
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=member.timeout,
    )
    assert dist.group.WORLD is not None
    groups = {member.world_size: dist.group.WORLD}
    for world_size in range(1, member.world_size) if member.subgroups else ():
        # Collective over all processes, the ones outside the group too.
        group = dist.new_group(list(range(world_size)), timeout=member.timeout)
        if member.rank < world_size:
            groups[world_size] = group
    return groups


def _answer(call: Call, groups: dict[int, dist.ProcessGroup]) -> bytes:
    """Runs one call and returns the pickled reply."""
    try:
        # torch names groups by a counter of the process. A run with fewer ranks that makes groups
        # would leave the counters apart, and the next groups of all ranks would not find together.
        dist.distributed_c10d._world.group_count = _FIRST_GROUP + _GROUPS_OF_A_RUN * call.number
        sys.path[:] = call.path
        function, args, kwargs = pickle.loads(call.function)
        random.seed(call.seed)
        np.random.seed(call.seed)
        torch.manual_seed(call.seed)
        group = groups[call.world_size]
        delays.begin(call.seed + group.rank())
        # Groups outlive tests: how an earlier one cut its sequences says nothing about this one.
        for records in (layouts._used, layouts._last_cut, layouts._cuts):
            records.clear()
        with device.in_use(call.device, group.rank()):
            reply: tuple[str, Any] = ("result", function(group, *args, **kwargs))
        return pickle.dumps(reply)
    except BaseException as error:  # pytest's own outcomes are no Exceptions
        return pickle.dumps(("failure", describe(error)))


def main(pipe: Connection, member: Member) -> None:
    """Sends a "result" when it is ready; then answers calls until the other end closes the pipe."""
    global _pipe
    _pipe = pipe
    die_with(os.getppid())
    try:
        _settle(member)
        torch.set_num_threads(1)
        native.load()  # says why when it cannot be built
        groups = _join(member)
        pipe.send_bytes(pickle.dumps(("result", None)))
        while message := pipe.recv_bytes():
            pipe.send_bytes(_answer(pickle.loads(message), groups))
    except (EOFError, ConnectionError):
        os._exit(0)  # no clean-up that could wait for peers
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(("failure", describe(error))))
        os._exit(1)
    os._exit(0)
