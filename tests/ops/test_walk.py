"""How many Python functions a warm call goes through: host time that no native part can hide."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import symm_cp
from tests.pool import Ranks

#: Of `all_gather_matmul`, forward, at 2 ranks.
MOST_CALLS = 45


def counted(frame: FrameType) -> bool:
    """Not torch's functions, generated ones, and comprehensions, which Python 3.12 inlines."""
    code = frame.f_code
    return not code.co_name.startswith("<") and not any(
        part in code.co_filename for part in ("/torch/", "<string>", "tests/")
    )


def calls_of(run: Any) -> list[str]:
    found: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and counted(frame):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def walk(group: dist.ProcessGroup) -> list[str]:
    x, weight = torch.randn(1024, 256), torch.randn(256, 64)  # more than native kernels serve
    # Without symmetric memory: ranks with some ask each other where shards lie.
    own = dist.new_group(list(range(group.size())))

    def call() -> None:
        symm_cp.all_gather_matmul(x, weight, group=own)

    for _ in range(5):
        call()
    return calls_of(call)


def test_all_gather_matmul(ranks: Ranks) -> None:
    for calls in ranks.run(2, walk):
        assert len(calls) <= MOST_CALLS, "\n".join(calls)
        assert any("all_gather_matmul_kernel" in call for call in calls)  # it does count
