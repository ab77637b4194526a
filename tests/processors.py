"""Runs the tests of bits and of all ops as on other processors: `python -m tests.processors`.

What torch and its matrix libraries do differs between processors: vectors of 128, 256 or 512 bits,
and whether MKL's sums depend on addresses (float32 ones do with `MKL_ENABLE_INSTRUCTIONS=SSE4_2`,
and on AMD processors). The settings apply to every x86-64 processor; one that asks for a feature
which the processor lacks is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

#: The tests that multiply, attend or compare bits.
TESTS = ("tests/bits", "tests/ops/test_random.py")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
#: Settings, and the features that they need.
SETTINGS: tuple[tuple[dict[str, str], frozenset[str]], ...] = (
    ({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default"}, frozenset()),
    ({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"}, frozenset({"avx2", "fma"})),
    ({"MKL_CBWR": "AUTO", "ATEN_CPU_CAPABILITY": "avx512"}, _AVX512),
)


def features() -> set[str]:
    """Returns the processor's features, as the kernel names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def main() -> int:
    """Runs the tests under each setting; returns an exit code."""
    here, failed = features(), False
    for seed, (settings, needed) in enumerate(SETTINGS, 1):
        described = " ".join(f"{name}={value}" for name, value in settings.items())
        if missing := needed - here:
            print(f"{described}: left out, no {' '.join(sorted(missing))}", flush=True)
            continue
        start = time.monotonic()
        # Each setting also places the buffers elsewhere.
        environment = {**os.environ, **settings, "SYMM_CP_DEBUG_OFFSETS": str(seed)}
        # The exhaustive cases, with other world sizes and devices, run once.
        command = [sys.executable, "-m", "pytest", "-n", "2", *TESTS]
        if seed == 1:
            command.append("--all")
        code = subprocess.run(command, env=environment, check=False).returncode
        result = "failed" if code else "passed"
        print(f"{described}: {result}, {time.monotonic() - start:.0f} s", flush=True)
        failed = failed or code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
