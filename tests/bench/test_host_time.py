"""The benchmark of the host's time to issue ops, over a driver that does nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/host_time.py"


@pytest.mark.exhaustive
def test_every_op_is_issued_without_a_gpu(tmp_path: Path) -> None:
    result = tmp_path / "host_time.json"
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "4", "--seconds", "0"]
    subprocess.run([*command, "--json", str(result)], check=True, timeout=300)
    rows = {(row["case"], row["ranks"]): row for row in json.loads(result.read_text())["rows"]}
    assert len(rows) == 2 * 14
    assert all(row["us"] > 0 and row["driver_calls"] > 0 for row in rows.values())
    for ranks in (2, 4):
        gather = rows["all-gather-matmul", ranks]
        # One matmul per shard; torch's pipeline also copies each shard with a kernel.
        assert gather["kernels"] == ranks
        assert gather["torch_kernels"] == 2 * ranks
        assert gather["torch_barriers"] == 3
        # Streams copy; the one kernel adds the scattered parts.
        assert rows["low-contention all-gather", ranks]["kernels"] == 0
        assert rows["low-contention reduce-scatter", ranks]["kernels"] == 1
        # One kernel for this rank's keys, one for all peers' keys, and one that merges.
        assert rows["attention", ranks]["kernels"] == 3
