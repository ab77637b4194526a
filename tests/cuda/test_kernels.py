"""The Triton kernels, in Triton's interpreter, against torch in float64.

The interpreter is chosen when Triton is imported, so the tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")
NAMES = ["add_rows", "merge_attention", "arrival_attention", "late_arrivals"]


@pytest.mark.parametrize("name", NAMES)
def test_kernel(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cuda.kernel_cases", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked" in done.stdout
