"""A rank that is killed, stopped or interrupted, or raises, at any moment after its group was made.

`python -m tests.faults.moments COUNT SEED` does so COUNT times, with ranks forked from one process,
and prints as JSON what the others had to say. The first moments fall into rendezvous and tuning,
later ones into calls, growth of workspaces and the time between calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.forked import fork_ranks, prepare
from tests.faults.ops import ALL

OPS = torch.ops.symm_mem
EVENTS = ("kill", "stop", "interrupt", "raise")
TIMEOUT_MS = 700  # for those who wait for a rank that was stopped


def grow(group: dist.ProcessGroup, elements: int) -> None:
    """A call that needs a larger workspace."""
    OPS.one_shot_all_reduce(torch.ones(elements), "sum", group.group_name)


def calls(group: dist.ProcessGroup) -> None:
    """All ops, and workspaces that grow, until something raises."""
    elements = 1000
    while True:
        for run in ALL.values():
            run(group)
        elements = min(2 * elements, 1 << 20)
        grow(group, elements)


def strike(event: str, delay: float) -> None:
    """Lets something happen to this process after a while."""

    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, fail)
    number = signals.get(event, signal.SIGUSR2)
    threading.Timer(delay, lambda: os.kill(os.getpid(), number)).start()


def moment(random_: random.Random) -> dict[str, Any]:
    """Something happens to the last rank; the others go on until they are told."""
    world_size, event = random_.randint(2, 4), random_.choice(EVENTS)
    delay = random_.choice((0.02, 0.1, 0.4)) * random_.random()
    victim = world_size - 1
    os.environ["SYMM_CP_TIMEOUT_MS"] = str(TIMEOUT_MS if event == "stop" else 30_000)

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        store = dist.distributed_c10d._get_default_store()
        store.add("made", 1)
        while store.add("made", 0) < world_size:  # the groups of all ranks
            time.sleep(0.001)
        begin = time.monotonic()
        if group.rank() == victim:
            strike(event, delay)
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                calls(group)
            os._exit(1)  # as a program ends that catches nothing
        try:
            calls(group)
        except RuntimeError as error:
            message, seconds = str(error), time.monotonic() - begin - delay
        del os.environ["SYMM_CP_TIMEOUT_MS"]
        # The same process goes on at once with those that are left.
        others = dist.new_group(list(range(victim)), use_local_synchronization=True)
        for name in ("gather_matmul", "low_contention"):
            ALL[name](others)
        return {"message": message, "seconds": seconds}

    found = fork_ranks(world_size, work, stopped=victim if event == "stop" else None)
    return {
        "ranks": world_size,
        "event": event,
        "delay": delay,
        "survivors": found[:-1],
    }


def main() -> None:
    prepare()
    random_ = random.Random(int(sys.argv[2]))
    print(json.dumps([moment(random_) for _ in range(int(sys.argv[1]))]))


if __name__ == "__main__":
    main()
