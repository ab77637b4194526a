"""Fixtures of all tests: the pool of rank processes, seeds, and the `gpu` marker."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests import device
from tests.pool import SEED_VARIABLE, Ranks

# Fresh inputs in every session; the seed of a failure is in its message and in the summary.
SESSION_SEED = int(os.environ.get(SEED_VARIABLE) or int.from_bytes(os.urandom(4), "little"))


# What runs with --device cuda or simulated; the rest is about the CPU's own backend, or about no
# device at all.
_ON_DEVICES = (
    "ops/test_random",
    "ops/test_gradients",
    "ops/test_attention.py",
    "ops/test_gather_kv",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=device.CHOICES, default="cpu", help=device.__doc__)


def pytest_configure(config: pytest.Config) -> None:
    os.environ[device.VARIABLE] = config.getoption("--device")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes for multi-rank tests: ``ranks.run(world_size, function, *args)``."""
    pool = Ranks(SESSION_SEED)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(f"{SESSION_SEED} {request.node.nodeid}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_report_header() -> str:
    return f"seed: {SEED_VARIABLE}={SESSION_SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat these inputs with {SEED_VARIABLE}={SESSION_SEED}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device.chosen() != "cpu":
        here = [item for item in items if any(part in item.nodeid for part in _ON_DEVICES)]
        here += [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=[item for item in items if item not in here])
        items[:] = here
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
