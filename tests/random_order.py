"""A plugin of pytest: tests in a random order, and a record of each, for `python -m tests.repeat`.

The files come in random order, and so do the tests of each file. Tests of a file stay together,
as fixtures of a module are made once.
"""

from __future__ import annotations

import ctypes
import json
import random
import signal
from pathlib import Path

import pytest

_PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, help="draw the order of the tests from this seed")
    parser.addoption("--record", type=Path, help="write a line for each phase of a test to a file")


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Returns the tests in another order; those of a file stay together."""
    draw = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    names = list(files)
    draw.shuffle(names)
    for name in names:
        draw.shuffle(files[name])
    return [item for name in names for item in files[name]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--order-seed")
    if seed is not None:
        items[:] = shuffled(items, seed)


class _Record:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, *entry: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call":
            self._write(report.outcome, report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("ended", nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path and not hasattr(config, "workerinput"):  # the workers of pytest-xdist report to it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives tests.repeat
        config.pluginmanager.register(_Record(path))
