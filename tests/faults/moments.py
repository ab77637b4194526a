"""Calls of all kinds during which something happens to a rank, after its group was made."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.kills import barrier, go_on
from tests.faults.ops import ALL, backend_group, ulysses_on_a_mesh

OPS = torch.ops.symm_mem
EVENTS = ("kill", "stop", "interrupt", "raise")
TIMEOUT_MS = 700  # for ranks that wait for a stopped rank


def grow(group: dist.ProcessGroup, elements: int) -> None:
    """A call that needs a larger workspace."""
    OPS.one_shot_all_reduce(torch.ones(elements), "sum", group.group_name)


def calls(group: dist.ProcessGroup) -> None:
    """Calls all ops and grows workspaces until something raises."""
    elements = 1000
    # Not on meshes: torch waits for dead ranks when it makes their groups.
    ops = [run for run in ALL.values() if run is not ulysses_on_a_mesh]
    while True:
        for run in ops:
            run(group)
        elements = min(2 * elements, 1 << 20)
        grow(group, elements)


def strike(event: str, delay: float) -> None:
    """Sends this process the signal of an event after a delay."""

    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, fail)
    number = signals.get(event, signal.SIGUSR2)

    def send() -> None:
        """Python drops an exception that hits a destructor: then the next one counts."""
        time.sleep(delay)
        for _ in range(1 if event in ("kill", "stop") else 3):
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()


def until_told(group: dist.ProcessGroup, event: str, delay: float) -> dict[str, Any]:
    """An event hits the last rank; the others go on until they are told, then go on without it.

    Short delays hit rendezvous and tuning, longer ones hit calls, growing workspaces and the time
    between calls.
    """
    os.environ["SYMM_CP_TIMEOUT_MS"] = str(TIMEOUT_MS if event == "stop" else 30_000)
    warnings.simplefilter("ignore")  # Python drops exceptions while it prints one
    backend_group(group)
    barrier(group)
    begin = time.monotonic()
    if group.rank() == group.size() - 1:
        strike(event, delay)
        with contextlib.suppress(KeyboardInterrupt, RuntimeError):
            calls(group)
        os._exit(1)  # ends like a program that catches nothing
    try:
        calls(group)
    except RuntimeError as error:
        message, seconds = str(error), time.monotonic() - begin - delay
    del os.environ["SYMM_CP_TIMEOUT_MS"]
    go_on(group)
    return {"message": message, "seconds": seconds}
