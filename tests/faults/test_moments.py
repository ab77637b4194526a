"""A rank that ends, stops or fails at any moment, and ranks that make different calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCALE = int(os.environ.get("SYMM_CP_TEST_SCALE", "1"))
ROOT = Path(__file__).resolve().parents[2]
OPS = re.compile(
    r"fused_\w+|_low_contention_\w+|one_shot_\w+|two_shot_\w+|reduce_scatter_out|symm_mem.rendezvous"
)
#: Seconds until each rank has heard of it.
LIMIT = 2.0


def run(module: str, count: int) -> list[dict[str, Any]]:
    seed = int.from_bytes(os.urandom(3), "big")
    command = [sys.executable, "-m", f"tests.faults.{module}", str(count), str(seed)]
    print("repeat with:", " ".join(command[1:]))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == count
    return found


def test_at_any_moment() -> None:
    """The others hear within two seconds who it was, in which op, and go on without it."""
    for found in run("moments", 16 * SCALE):
        victim = f"rank {found['ranks'] - 1}"
        # Of a rank that was stopped only those know that wait for it; others wait for them.
        named = [victim in said.get("message", "") for said in found["survivors"]]
        assert any(named) if found["event"] == "stop" else all(named), found
        for said in found["survivors"]:
            assert "message" in said, found
            assert OPS.search(said["message"]), found
            assert said["seconds"] < LIMIT, found


def test_different_calls() -> None:
    """Both ranks hear of it within two seconds, and the next call is as good as ever."""
    for found in run("mismatches", 60 * SCALE):
        for bad, good in found["ranks"]:
            assert bad["said"], found
            assert bad["seconds"] < LIMIT, found
            assert not good["said"], found
        said = [bad["said"] for bad, _ in found["ranks"]]
        if not any(spec[0] == "wrong" for spec in found["pair"]):
            assert all("ranks disagree" in text for text in said), found
