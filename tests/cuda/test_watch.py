"""Streams that wait in vain: the process is told which op, step and rank, and does not hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import device
from tests.cuda.in_vain import SHORT_MS
from tests.cuda.simulated import build

ROOT = Path(__file__).resolve().parents[2]
DIES = ["dies:3:attention", "dies:2:background", "dies:2:matmul_scatter"]
FAILS = "fails:3:matmul_scatter"
STOPS = "stops:2:gather_matmul"
DAWDLES = "dawdles:3:matmul_scatter"
ALL = [*DIES, FAILS, STOPS, DAWDLES]
NAMES = {
    "attention": "fused_all_gather_attention",
    "background": "_low_contention_all_gather",
    "gather_matmul": "fused_all_gather_matmul",
    "matmul_scatter": "fused_matmul_reduce_scatter",
}


def run(kind: str) -> dict[str, Any]:
    """What came of all cases, which one process carries out."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.in_vain", *ALL],
        cwd=ROOT,
        env={**os.environ, device.VARIABLE: kind},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    build()
    return run(request.param)


def check(outcome: dict[str, Any], op: str, why: str) -> None:
    """All but the last rank have ended by themselves, saying why."""
    *survivors, _ = zip(outcome["outcomes"], outcome["stderr"], strict=True)
    waited = r"waiting for flag '\w+' of rank (\d) \(call \d+, seen \d+\)"
    last, causes = len(survivors), []
    for rank, (came, said) in enumerate(survivors):
        assert came.get("ended by") == signal.SIGABRT, (came, said)
        pattern = rf"symm_cp: {NAMES[op]}.* in group '.+': rank {rank} {waited}: (.*)\. A stream"
        found = re.search(pattern, said)
        assert found is not None, said
        causes.append((int(found[1]), found[2]))
    # A survivor that ended took others with it.
    assert (last, why.format(last)) in causes, causes
    for peer, cause in causes:
        assert cause in (why.format(last), f"rank {peer} died"), causes


@pytest.mark.parametrize("case", DIES)
def test_a_rank_dies(outcomes: dict[str, Any], case: str) -> None:
    check(outcomes[case], case.split(":")[2], "rank {} died")


def test_a_rank_fails_in_the_middle_of_a_call(outcomes: dict[str, Any]) -> None:
    check(outcomes[FAILS], "matmul_scatter", "rank {} aborted the call; see its stderr")
    assert outcomes[FAILS]["outcomes"][-1] == "no memory"


def test_a_rank_stops(outcomes: dict[str, Any]) -> None:
    check(outcomes[STOPS], "gather_matmul", f"timed out after {SHORT_MS} ms")


def test_who_comes_in_time_is_waited_for(outcomes: dict[str, Any]) -> None:
    assert outcomes[DAWDLES] == {"outcomes": ["done"] * 3, "stderr": [""] * 3}
