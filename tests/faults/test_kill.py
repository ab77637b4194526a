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


#: Schedules of all kinds; with SYMM_CP_TEST_SCALE above 1 all ops on 2, 3 and 4 ranks: 451 kills.
KILLS = [
    *(f"kill:2:{op}" for op in ("gather_in_place", "matmul_scatter", "low_contention")),
    "kill:2:two_shot_in_place",
    "kill:3:attention_ring",
]
if SCALE > 1:
    KILLS = [f"kill:{world_size}:{op}" for world_size in (2, 3, 4) for op in ALL]
ASLEEP = [f"asleep:3:{kind}" for kind in ("barrier", "wait_signal", "rendezvous")]
STOPPED = "stop:3:gather_matmul"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What came of all cases, which one process carries out."""
    command = [sys.executable, "-m", "tests.faults.forked", *KILLS, *ASLEEP, STOPPED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", KILLS)
def test_a_rank_that_is_killed(outcomes: dict[str, Any], case: str) -> None:
    assert set(NAMES) == set(ALL)
    assert outcomes[case]
    for found in outcomes[case]:
        victim = found["ranks"] - 1
        assert "died at" in found["killed"], found
        assert found["left behind"] == [], found
        for said, seconds in zip(found["survivors"], found["seconds"], strict=True):
            assert "message" in said, found
            assert NAMES[found["op"]] in said["message"], found
            assert re.search(rf"rank {victim}\b.*(ended|died|gone|killed)", said["message"]), found
            assert seconds <= LIMIT, found


@pytest.mark.parametrize("case", ASLEEP)
def test_a_rank_that_is_killed_while_the_others_sleep(outcomes: dict[str, Any], case: str) -> None:
    found = outcomes[case]
    for said, seconds in zip(found["survivors"], found["seconds"], strict=True):
        assert re.search(r"rank 2 (died|left|is gone)", said["message"]), found
        assert seconds < 1.0, found


def test_a_rank_that_is_stopped_is_no_dead_one(outcomes: dict[str, Any]) -> None:
    """It may go on: the others' time is over, and their error says so."""
    found = outcomes[STOPPED]
    for said, seconds in zip(found["survivors"], found["seconds"], strict=True):
        assert "fused_all_gather_matmul" in said["message"], found
        assert "400 ms" in said["message"], found
        assert "died" not in said["message"], found
        assert 0.3 < seconds < LIMIT, found
