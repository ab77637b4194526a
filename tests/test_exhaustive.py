"""How exhaustive cases are drawn."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.exhaustive import drawn

ROOT = Path(__file__).parents[1]


class _Case:
    """The parts of `pytest.Item` that are asked for."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> str | None:
        return None if "plain" in self.nodeid else name


def test_a_short_time_has_cases_of_all_tests() -> None:
    sizes = {"a.py::many": 400, "b.py::some": 40, "b.py::few": 20}
    names = [f"{test}[{n}]" for test, size in sizes.items() for n in range(size)]
    cases = [_Case(name) for name in ["a.py::plain", *names]]
    order = [case.nodeid for case in drawn(cases, seed=1)]  # type: ignore[arg-type]
    assert order[0] == "a.py::plain"
    assert sorted(order[1:]) == sorted(names)
    first = order[1:24]  # the first of 20 parts
    assert Counter(name.partition("[")[0] for name in first) == {
        "a.py::many": 20,
        "b.py::some": 2,
        "b.py::few": 1,
    }
    files = [name.partition("::")[0] for name in first]
    assert sum(one != other for one, other in itertools.pairwise(files)) == 1
    again = [case.nodeid for case in drawn(cases, seed=1)]  # type: ignore[arg-type]
    other = [case.nodeid for case in drawn(cases, seed=2)]  # type: ignore[arg-type]
    assert order == again
    assert set(order[1:24]) != set(other[1:24])


@pytest.mark.parametrize(("seconds", "ran"), [("0", False), ("500", True)])
def test_seconds(seconds: str, ran: bool) -> None:
    tests = ["tests/schedule/test_layout.py", "--all", "-m", "exhaustive", "--seconds", seconds]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert ("passed" in done.stdout.splitlines()[-1]) == ran
