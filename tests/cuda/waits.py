"""Ranks whose streams wait for a signal that does not come, or comes late: for `ranks.own`.

A case is what the last rank does instead of an op that the others call.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import unittest.mock
from collections.abc import Callable

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.ops.common import device_kernels

#: The time-out in cases that let it elapse, or that stay within it.
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


Op = Callable[[dist.ProcessGroup], None]


def dies(group: dist.ProcessGroup, op: Op) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops(group: dist.ProcessGroup, op: Op) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fails(group: dist.ProcessGroup, op: Op) -> str:
    """Fails in the middle of the call, but survives."""
    no_memory = MemoryError("no memory")
    kind = type(cuda.device_of(torch.empty(0).device))
    with unittest.mock.patch.object(kind, "launch", side_effect=no_memory):
        try:
            op(group)
        except MemoryError as error:
            time.sleep(1.5)
            return str(error)
    return "it did not fail"


def others_wait(
    group: dist.ProcessGroup, op: Op, act: Callable[[dist.ProcessGroup, Op], str]
) -> str:
    """All ranks call the op; then the last rank acts while the others call it again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some will abort
    if act is stops:
        os.environ["SYMM_CP_TIMEOUT_MS"] = str(SHORT_MS)
    op(group)
    dist.barrier(group)
    if group.rank() == group.size() - 1:
        return act(group, op)
    for _ in range(3):  # the others can complete a call that the last rank has begun
        op(group)
    return "done"


def last_is_late(group: dist.ProcessGroup, op: Op) -> str:
    """The last rank makes its calls late, but in time; all are idle for long after them."""
    os.environ["SYMM_CP_TIMEOUT_MS"] = str(SHORT_MS)
    op(group)
    dist.barrier(group)
    for _ in range(3):
        if group.rank() == group.size() - 1:
            time.sleep(SHORT_MS / 2000)
        op(group)
    time.sleep(SHORT_MS / 700)
    return "done"
