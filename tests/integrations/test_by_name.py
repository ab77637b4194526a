"""Frameworks that are given the backend's name alone train as they do with gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@exhaustive
@pytest.mark.parametrize(
    ("package", "launcher"),
    [("pytorch_lightning", PYTHON), ("ray", PYTHON), ("deepspeed", TORCHRUN)],
    ids=["lightning", "ray", "deepspeed"],
)
def test_trains(package: str, launcher: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    name = package.rpartition("_")[2]
    found = {}
    for backend in ("gloo", "symm_cp"):
        output = tmp_path / f"{backend}.json"
        done = subprocess.run(
            [*launcher, "-m", "tests.integrations.by_name", name, backend, str(output)],
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found[backend] = json.loads(output.read_text())
    assert [found[backend].pop("backend") for backend in ("gloo", "symm_cp")] == list(found)
    assert found["gloo"] == found["symm_cp"]  # sums over two ranks have only one order
