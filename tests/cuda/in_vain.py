"""Ranks whose streams wait in vain: `python -m tests.cuda.in_vain CASE ...`.

A case is what the last rank does in the place of an op that the others call, the number of ranks
and the op. Prints as JSON what became of each rank, and what it wrote to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import devices, native
from symm_cp.ops.common import device_kernels
from tests import device
from tests.faults.forked import fork_ranks

#: How long ranks wait for each other, where they are to wait in vain or not at all.
SHORT_MS = 500


def attention(group: dist.ProcessGroup) -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 64).bfloat16()
    symm_cp.all_gather_attention(q, k, v, group=group, is_causal=True).float().sum().item()


def background(group: dist.ProcessGroup) -> None:
    gather = device_kernels["_low_contention_all_gather"]
    out = gather(torch.randn(64, 4), group.group_name)
    torch.ops._c10d_functional.wait_tensor(out).sum().item()


def gather_matmul(group: dist.ProcessGroup) -> None:
    symm_cp.all_gather_matmul(torch.randn(8, 4), torch.randn(4, 4), group=group).sum().item()


def matmul_scatter(group: dist.ProcessGroup) -> None:
    x = torch.randn(8 * group.size(), 4)
    symm_cp.matmul_reduce_scatter(x, torch.randn(4, 4), group=group).sum().item()


OPS = {run.__name__: run for run in (attention, background, gather_matmul, matmul_scatter)}


def dies(group: dist.ProcessGroup, run: Callable[[dist.ProcessGroup], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops(group: dist.ProcessGroup, run: Callable[[dist.ProcessGroup], None]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fails(group: dist.ProcessGroup, run: Callable[[dist.ProcessGroup], None]) -> str:
    """In the middle of the call, and lives on."""
    no_memory = MemoryError("no memory")
    kind = type(devices.device_of(torch.empty(0).device))
    with unittest.mock.patch.object(kind, "launch", side_effect=no_memory):
        try:
            run(group)
        except MemoryError as error:
            time.sleep(1.5)
            return str(error)
    return "it did not fail"


def dawdles(group: dist.ProcessGroup, run: Callable[[dist.ProcessGroup], None]) -> str:
    """Makes its calls late, but in time; all are idle for long after them."""
    for _ in range(3):
        if group.rank() == group.size() - 1:
            time.sleep(SHORT_MS / 2000)
        run(group)
    time.sleep(SHORT_MS / 700)
    return "done"


LAST = {act.__name__: act for act in (dies, stops, fails, dawdles)}


def case(act: str, world_size: int, op: str) -> dict[str, Any]:
    """All ranks call the op, then all but the last, which acts (or all act)."""
    last, run = world_size - 1, OPS[op]
    with tempfile.TemporaryDirectory() as folder:

        def work(group: dist.ProcessGroup) -> Any:
            log = os.open(f"{folder}/{group.rank()}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 2)
            if act in ("stops", "dawdles"):
                os.environ["SYMM_CP_TIMEOUT_MS"] = str(SHORT_MS)
            with device.in_use(group.rank()):
                run(group)
                dist.barrier(group)
                if group.rank() == last or act == "dawdles":
                    return LAST[act](group, run)
                for _ in range(3):  # what a rank has begun the others can complete
                    run(group)
            return "done"

        found = fork_ranks(world_size, work, stopped=last if act == "stops" else None)
        said = [Path(folder, str(rank)).read_text() for rank in range(world_size)]
    return {"outcomes": found, "stderr": said}


def main() -> None:
    """Runs the cases that were named."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    native.load()
    found = {}
    for name in sys.argv[1:]:
        act, world_size, op = name.split(":")
        found[name] = case(act, int(world_size), op)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
