"""Fixtures and options of all tests: the pool of ranks, seeds, devices, and ``--all``."""

from __future__ import annotations

import gc
import os
import random
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests import delays
from tests.pool import SEED_VARIABLE, Ranks
from tests.rank_process import GARBAGE

# Fresh inputs in every session; the seed of a failure is in its message and in the summary.
_DRAWN = int.from_bytes(os.urandom(4), "little")


def session_seed(config: pytest.Config) -> int:
    """Returns the seed of all tests; workers of pytest-xdist have that of the main process."""
    sent = getattr(config, "workerinput", {}).get(SEED_VARIABLE)
    return int(sent or os.environ.get(SEED_VARIABLE) or _DRAWN)


def pytest_configure() -> None:
    # A shell that starts pytest in the background has it, and all that it starts, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hands the seed to a worker of pytest-xdist."""
    node.workerinput[SEED_VARIABLE] = session_seed(node.config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked exhaustive, too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats a test with ranks on each device that its marker names."""
    marker = metafunc.definition.get_closest_marker("devices")
    if marker is None or "ranks" not in metafunc.fixturenames:
        return
    also_on_cpu = "cpu" in marker.args
    marks = {
        "cpu": (),
        "simulated": pytest.mark.exhaustive if also_on_cpu else (),
        "cuda": pytest.mark.gpu,
    }
    names = [pytest.param(name, marks=marks[name]) for name in marker.args]
    metafunc.parametrize("device_name", names, indirect=True)


def _is_left_out(item: pytest.Item, everything: bool) -> bool:
    if not everything:
        return item.get_closest_marker("exhaustive") is not None
    # The simulator repeats what plain runs have on the CPU, and not each rare value besides.
    call = getattr(item, "callspec", None)
    if call is None or call.params.get("device_name") != "simulated":
        return False
    return sum(mark.name == "exhaustive" for mark in call.marks) > 1


def _mark_world_sizes(items: list[pytest.Item]) -> None:
    """Of a test on each of 1 to 4 ranks, plain runs take two: few ranks, and several.

    Which two is another choice for each test and each of its other parameters.
    """
    families: dict[tuple[str, str], list[tuple[int, pytest.Item]]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        size = call.params.get("world_size") if call else None
        if isinstance(size, int) and item.get_closest_marker("exhaustive") is None:
            others = [part for part in call.id.split("-") if part != str(size)]
            family = (item.nodeid.partition("[")[0], "-".join(others))
            families.setdefault(family, []).append((size, item))
    for family, members in families.items():
        few = [item for size, item in members if size <= 2]
        several = [item for size, item in members if size > 2]
        for kin in (few, several):
            kept = zlib.crc32("".join(family).encode()) % max(1, len(kin))
            for number, item in enumerate(kin):
                if number != kept:
                    item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_world_sizes(items)
    everything = bool(config.getoption("--all"))
    left_out = [item for item in items if _is_left_out(item, everything)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at the end whether all their objects have gone


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Rank processes for multi-rank tests: ``ranks.run(world_size, function, *args)``."""
    pool = Ranks(session_seed(pytestconfig))
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def device_name(request: pytest.FixtureRequest) -> str:
    """Where the ops of the test run; parametrized by the marker `devices`."""
    name: str = getattr(request, "param", "cpu")
    if "ranks" in request.fixturenames:
        pool = request.getfixturevalue("ranks")
        if isinstance(pool, Ranks):  # it may be a number of ranks, too
            pool.device = name
            pool.renew()
    return name


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(f"{session_seed(request.config)} {request.node.nodeid}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    delays.begin(seed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives workers tests that stand together: they share modules and compiled functions."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {SEED_VARIABLE}={session_seed(config)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        seed = session_seed(terminalreporter.config)
        terminalreporter.write_line(f"repeat these inputs with {SEED_VARIABLE}={seed}")
