"""How many Python functions a warm call goes through: host time that no native part can hide."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.ops.test_scaled_matmuls import KERNELS


def counted(frame: FrameType) -> bool:
    """Excludes torch's functions, generated ones, and comprehensions, which Python 3.12 inlines."""
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


def walk(group: dist.ProcessGroup, rows: int, inner: int) -> list[str]:
    x, weight = torch.randn(rows, inner), torch.randn(inner, 64)
    # Without symmetric memory: ranks with some ask each other where shards lie.
    own = dist.new_group(list(range(group.size())))

    def call() -> None:
        symm_cp.all_gather_matmul(x, weight, group=own)

    for _ in range(5):
        call()
    return calls_of(call)


def walk_scaled(group: dist.ProcessGroup, rows: int, inner: int, scatters: bool) -> list[str]:
    size = group.size() if scatters else 1
    x, weight = (torch.randn(n, inner).to(torch.float8_e4m3fn) for n in (rows * size, 64))
    scales = (torch.ones(rows * size, 1), torch.ones(1, 64))
    options = {"out_dtype": torch.bfloat16}
    op = symm_cp.scaled_matmul_reduce_scatter if scatters else symm_cp.scaled_all_gather_matmul
    own = dist.new_group(list(range(group.size())))

    def call() -> None:
        op(x, weight.t(), *scales, group=own, **options)

    for _ in range(5):
        call()
    return calls_of(call)


def walk_attention(group: dist.ProcessGroup, tokens: int) -> list[str]:
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    own = dist.new_group(list(range(group.size())))

    def call() -> None:
        symm_cp.all_gather_attention(q, k, v, group=own)

    for _ in range(5):
        call()
    return calls_of(call)


@pytest.mark.parametrize(
    ("tokens", "most", "native"),
    [(16, 12, True), (512, 12, True), (1024, 220, False)],
)
def test_all_gather_attention(ranks: Ranks, tokens: int, most: int, native: bool) -> None:
    """Limits the Python functions called by a forward pass on 2 ranks."""
    for calls in ranks.run(2, walk_attention, tokens):
        assert len(calls) <= most, "\n".join(calls)
        in_python = any("_attention_kernel" in call for call in calls)
        assert in_python != native, calls


def walk_region(group: dist.ProcessGroup) -> list[str]:
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    balancer = symm_cp.HeadTail(16 * group.size(), group.size())

    def call() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer):
        for _ in range(5):
            call()
        return calls_of(call)


def test_attention_in_a_region(ranks: Ranks) -> None:
    """Limits the files and functions from the call of the user to the first command."""
    for calls in ranks.run(2, walk_region):
        assert len({call.split(":")[0] for call in calls}) <= 12, "\n".join(calls)
        assert len(calls) <= 21, "\n".join(calls)


@pytest.mark.parametrize(
    ("rows", "inner", "most", "native"),
    [(128, 256, 6, True), (8320, 1024, 6, True)],
)
def test_all_gather_matmul(ranks: Ranks, rows: int, inner: int, most: int, native: bool) -> None:
    """Limits the Python functions called by a forward pass on 2 ranks."""
    for calls in ranks.run(2, walk, rows, inner):
        assert len(calls) <= most, "\n".join(calls)
        in_python = any("all_gather_matmul_kernel" in call for call in calls)
        assert in_python != native, calls


@pytest.mark.parametrize(("rows", "inner"), [(128, 256), (1024, 1024)])
@pytest.mark.parametrize("scatters", [False, True])
def test_scaled_matmuls(ranks: Ranks, rows: int, inner: int, scatters: bool) -> None:
    """Plans serve any size."""
    for calls in ranks.run(2, walk_scaled, rows, inner, scatters):
        assert len(calls) <= 7, "\n".join(calls)
        assert not any(name in call for call in calls for name in KERNELS)
