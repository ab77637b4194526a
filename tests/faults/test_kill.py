"""A rank is killed before each step of each op: the others are told, and go on without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ops import ALL

SCALE = int(os.environ.get("SYMM_CP_TEST_SCALE", "1"))
ROOT = Path(__file__).resolve().parents[2]
#: What the errors call the ops.
NAMES = {
    "gather_matmul": "fused_all_gather_matmul",
    "gather_matmul_whole": "fused_all_gather_matmul",
    "matmul_scatter": "fused_matmul_reduce_scatter",
    "attention": "fused_all_gather_attention",
    "attention_backward": "fused_all_gather_attention",
    "attention_ring": "fused_all_gather_attention",
    "low_contention": "_low_contention_",
    "one_shot": "one_shot_all_reduce",
    "two_shot": "two_shot_all_reduce_",
    "scatter_out": "reduce_scatter_out",
    "two_shot_in_place": "two_shot_all_reduce_",
    "gather_in_place": "fused_all_gather_matmul",
}
#: Seconds from a death to the last survivor's error. Sleepers look around every 50 ms.
LIMIT = 2.0


def run(what: str, world_size: int, *ops: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.forked", what, str(world_size), *ops]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(case: dict[str, Any]) -> None:
    victim = case["ranks"] - 1
    assert "died at" in case["killed"], case
    assert case["left behind"] == [], case
    for said, seconds in zip(case["survivors"], case["seconds"], strict=True):
        assert "message" in said, case
        assert NAMES[case["op"]] in said["message"], case
        assert re.search(rf"rank {victim}\b.*(ended|died|gone|killed)", said["message"]), case
        assert seconds <= LIMIT, case


#: Schedules of all kinds; with SYMM_CP_TEST_SCALE above 1 all ops on 2, 3 and 4 ranks: 451 kills.
CASES: list[tuple[int, tuple[str, ...]]] = [
    (2, ("gather_in_place", "matmul_scatter", "low_contention", "two_shot_in_place")),
    (3, ("attention_ring",)),
]
if SCALE > 1:
    CASES = [(world_size, tuple(ALL)) for world_size in (2, 3, 4)]


@pytest.mark.parametrize(("world_size", "ops"), CASES, ids=lambda value: str(value)[:7])
def test_a_rank_that_is_killed(world_size: int, ops: tuple[str, ...]) -> None:
    assert set(NAMES) == set(ALL)
    cases = run("kill", world_size, *ops)
    assert {case["op"] for case in cases} == set(ops)
    for case in cases:
        check(case)


def test_a_rank_that_is_stopped_is_no_dead_one() -> None:
    """It may go on: the others' time is over, and their error says so."""
    (case,) = run("stop", 3, "gather_matmul")
    for said, seconds in zip(case["survivors"], case["seconds"], strict=True):
        assert "fused_all_gather_matmul" in said["message"], case
        assert "400 ms" in said["message"], case
        assert "died" not in said["message"], case
        assert 0.3 < seconds < LIMIT, case
