"""What a process of the pool in `tests/pool.py` executes: waits for calls and answers them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import symm_cp  # noqa: F401 - as a user does; registers the CPU backend
from symm_cp import native
from tests import device
from tests.pool import GROUP_TIMEOUT

_PR_SET_PDEATHSIG = 1
_MAX_LOCAL = 400


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


_FIRST_GROUP = 1000
_GROUPS_OF_A_RUN = 1000


def make_groups(rank: int, size: int, port: int) -> dict[int, dist.ProcessGroup]:
    """Returns the groups of ranks 0..W-1 that this rank is in, by W."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group(
        device.backend(), store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    groups = {}
    for world_size in range(1, size):
        # Collective over all processes, the ones outside the group too.
        group = dist.new_group(list(range(world_size)), timeout=GROUP_TIMEOUT)
        if rank < world_size:
            groups[world_size] = group
    assert dist.group.WORLD is not None
    groups[size] = dist.group.WORLD
    return groups


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


def answer(message: bytes, groups: dict[int, dist.ProcessGroup]) -> bytes:
    """Runs one call and returns the pickled reply."""
    try:
        world_size, seed, run, path, call = pickle.loads(message)
        # torch names groups by a counter of the process. A run with fewer ranks that makes groups
        # would leave the counters apart, and the next groups of all ranks would not find together.
        dist.distributed_c10d._world.group_count = _FIRST_GROUP + _GROUPS_OF_A_RUN * run
        sys.path[:] = path
        function, args, kwargs = pickle.loads(call)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        group = groups[world_size]
        with device.in_use(group.rank()):
            reply: tuple[str, Any] = ("result", function(group, *args, **kwargs))
        return pickle.dumps(reply)
    except BaseException as error:  # pytest's own outcomes are no Exceptions
        return pickle.dumps(("failure", describe(error)))


def main() -> None:
    """Answers calls until the parent closes the pipe."""
    rank, size, port, descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    native.load()  # once, before the first run's time starts; says why when it cannot be built
    pipe = Connection(descriptor)
    groups = make_groups(rank, size, port)
    pipe.send_bytes(pickle.dumps(("result", None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # no clean-up that could wait for peers
        pipe.send_bytes(answer(message, groups))


if __name__ == "__main__":
    main()
