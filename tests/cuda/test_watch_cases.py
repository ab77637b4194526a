"""The judge and the reader of stream waits, on a driver that can be made to hang."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from symm_cp import native

SOURCES = [
    Path(__file__).with_name("watch_cases.cpp"),
    *(
        native.source_dir() / name
        for name in ("cuda/watch.cpp", "cuda/driver.cpp", "memory/segment.cpp", "base/team.cpp")
    ),
]


@pytest.mark.exhaustive
def test_waits_are_judged_without_the_driver(tmp_path: Path) -> None:
    command = [*shlex.split(native.find_compiler()), "-std=c++20", "-O1", "-g", "-pthread"]
    command += [f"-I{native.source_dir()}", "-fsanitize=thread"]
    program = tmp_path / "cases"
    subprocess.run([*command, "-o", str(program), *map(str, SOURCES), "-ldl"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("ok\n", "", 0)
