"""Functions for `ranks.own` in which one rank is killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _get_process_group_store

from symm_cp.group import memory
from symm_cp.testing.delays import probing
from tests.faults.ops import ALL

TIMEOUT_MS = 400  # for ranks that wait for a stopped rank


def count_steps(group: dist.ProcessGroup, op: str) -> int:
    """How many steps this rank takes in a call."""
    ALL[op](group)
    with probing() as steps:
        ALL[op](group)
    return steps.count


def go_on(group: dist.ProcessGroup) -> None:
    """All but the last rank make a group of their own, at once, and use it."""
    others = dist.new_group(list(range(group.size() - 1)), use_local_synchronization=True)
    for name in ("gather_matmul", "low_contention"):
        ALL[name](others)


def barrier(group: dist.ProcessGroup) -> None:
    """A barrier that the last rank leaves after all others have left it: it may then stop."""
    store = _get_process_group_store(group)
    dist.barrier(group)
    store.set(f"left the barrier/{group.rank()}", "")
    if group.rank() == group.size() - 1:
        store.wait([f"left the barrier/{rank}" for rank in range(group.size())])


def killed_before(group: dist.ProcessGroup, op: str, step: int) -> dict[str, Any]:
    """The last rank dies before a step of its call; the others go on until they are told."""
    run = ALL[op]
    run(group)
    if group.rank() == group.size() - 1:
        with probing(fatal=step):
            run(group)
        return {"survived": True}
    message = ""
    while not message:
        try:
            run(group)
        except RuntimeError as error:
            message, at = str(error), time.monotonic()
    go_on(group)
    return {"at": at, "message": message}


def stopped(group: dist.ProcessGroup, op: str) -> dict[str, Any]:
    """The last rank stops instead of calling an op; the others wait."""
    ALL[op](group)
    # Set only now: the first call may take longer, as ranks do not start it together.
    memory.resolve(group).set_timeout(TIMEOUT_MS)
    barrier(group)
    if group.rank() == group.size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        ALL[op](group)
    except RuntimeError as error:
        return {"seconds": time.monotonic() - start, "message": str(error)}
    return {}


def killed_while_others_sleep(group: dist.ProcessGroup, kind: str) -> dict[str, Any]:
    """The last rank dies while the others wait in a barrier, for a signal, or in a rendezvous."""
    peer = group.size() - 1
    shared = symm_mem.empty(16, device="cpu")
    handle = symm_mem.rendezvous(shared, group)
    handle.barrier()
    if group.rank() == peer:
        time.sleep(0.3)  # the others are asleep by then
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if kind == "barrier":
            handle.barrier()
        elif kind == "wait_signal":
            handle.wait_signal(peer)
        else:
            symm_mem.rendezvous(symm_mem.empty(16, device="cpu"), group)
    except RuntimeError as error:
        said = {"at": time.monotonic(), "message": str(error)}
        time.sleep(0.5)  # stays alive, so that the others find only one dead rank
        return said
    return {}
