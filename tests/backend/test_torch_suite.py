"""Torch's own suite of torch.distributed: cases that pass over gloo pass over symm_cp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[2]

#: Cases that pass over gloo and cannot over symm_cp, and why.
EXCEPT = {
    "test_ddp_logging_data_cpu": "torch calls every backend that is not its own 'custom' there",
}
#: For the name symm_cp, torch skips the cases that it has for gloo alone: monitored barriers,
#: barrier time-outs, coalesced and sparse all-reduces, and futures. Redirected, they run.
MOST_SKIPPED = 40
#: The suite is run in parts, so that CI can draw some of them.
PARTS = 4


def run(backend: str, *chosen: str) -> dict[str, dict[str, Any]]:
    """The results of all cases, by name; `chosen` are arguments of the program."""
    command = [sys.executable, "-m", "tests.backend.torch_suite", backend, *chosen]
    # With some GPUs, but fewer than ranks, torch skips all cases.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {result["case"]: result for result in results}


def which(results: dict[str, dict[str, Any]], outcome: str) -> list[str]:
    return [name for name, result in results.items() if result["outcome"] == outcome]


@exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_that_passes_over_gloo(part: int) -> None:
    results = run("redirected", "--part", f"{part}/{PARTS}")
    passed = which(results, "passed")
    assert len(passed) > 80 // PARTS
    # Cases that do not pass redirected must not pass over gloo, except those in EXCEPT.
    others = [name for name in results if name not in passed]
    ours = set(which(run("gloo", "--cases", *others), "passed")) if others else set()
    excepted = EXCEPT.keys() & results.keys()
    assert ours == excepted, "\n".join(
        f"{name}: {results[name]['report'] or 'passes now'}" for name in ours ^ excepted
    )
    by_name = run("symm_cp", "--cases", *passed, *excepted)
    assert set(which(by_name, "failed")) == excepted, by_name
    assert len(which(by_name, "skipped")) <= MOST_SKIPPED // PARTS, by_name
