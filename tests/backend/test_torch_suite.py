"""Torch's own suite of torch.distributed: what passes over gloo passes over symm_cp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[2]

#: Cases that pass over gloo and cannot over symm_cp, and why.
EXCEPT = {
    "test_ddp_logging_data_cpu": "torch calls every backend that is not its own 'custom' there",
}
#: By its own name, torch skips the cases that it has for gloo alone: of monitored barriers,
#: time-outs of barriers, coalesced and sparse all-reduces, and of futures. Redirected, they run.
MOST_SKIPPED = 40


def run(backend: str, cases: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What became of each case, by name."""
    chosen = ["--cases", *cases] if cases else []
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
def test_every_case_that_passes_over_gloo() -> None:
    results = run("redirected")
    passed = which(results, "passed")
    assert len(passed) > 80
    # Neither those that fail here nor those that are skipped may pass there.
    over_gloo = run("gloo", [name for name in results if name not in passed])
    ours = set(which(over_gloo, "passed"))
    assert ours == set(EXCEPT), "\n".join(
        f"{name}: {results[name]['report'] or 'passes now'}" for name in ours ^ set(EXCEPT)
    )
    by_name = run("symm_cp", [*passed, *EXCEPT])
    assert set(which(by_name, "failed")) == set(EXCEPT), by_name
    assert len(which(by_name, "skipped")) <= MOST_SKIPPED, by_name
