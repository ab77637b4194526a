"""The Triton kernels, in Triton's interpreter, against torch in float64.

The interpreter is chosen when Triton is imported, so the tests run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

NAMES = [
    "add_rows",
    "merge_attention",
    "arrival_matmul",
    "late_shards",
    "counted_matmul",
]


@pytest.fixture(scope="module")
def checked() -> subprocess.CompletedProcess[str]:
    """The ended process that ran all cases, one after the other."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cuda.kernel_cases", *NAMES]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.exhaustive
def test_kernel(checked: subprocess.CompletedProcess[str], name: str) -> None:
    assert re.search(rf"^{name}: [1-9]\d* cases checked$", checked.stdout, re.MULTILINE), (
        checked.stdout + checked.stderr
    )
