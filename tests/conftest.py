"""Fixtures and options of all tests: the pool of ranks, seeds, devices, and ``--all``."""

from __future__ import annotations

import gc
import math
import random
import signal
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from symm_cp.testing import Ranks, Setup, delays, session_seed
from symm_cp.testing.process import collect_garbage_seldom
from tests.cuda import simulated
from tests.exhaustive import drawn

#: The processes that run functions of tests.
SIZE = 4
#: When the first test began.
_BEGIN = pytest.StashKey[float]()

_SETUP = Setup(
    backend="cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo",
    # Modules that many tests import at first use.
    preload=(
        *("pytest", "hypothesis", "numpy.random", "torch._inductor.compile_fx"),
        *("torch.distributed.tensor", "transformers.modeling_utils"),
        *("transformers.models.llama.modeling_llama", "symm_cp.inductor", "tests.device"),
    ),
    around="tests.device:in_use",
)


def pytest_configure(config: pytest.Config) -> None:
    # Repeats the draws of hypothesis, too, where it is installed.
    if getattr(config.option, "hypothesis_seed", 0) is None:
        config.option.hypothesis_seed = str(session_seed(config))
    # A shell that starts pytest in the background has it, and all that it starts, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked exhaustive, too")
    parser.addoption(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin exhaustive cases for so long, in an order drawn by the seed (without end)",
    )


def _has_ranks(test: Any) -> bool:
    """Whether a test runs on ranks, or runs functions on them."""
    return "ranks" in test.fixturenames or test.get_closest_marker("ranks") is not None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats a test with ranks on each device that its marker names."""
    marker = metafunc.definition.get_closest_marker("devices")
    if marker is None or not _has_ranks(metafunc.definition):
        return
    also_on_cpu = "cpu" in marker.args
    marks = {
        "cpu": (),
        "simulated": pytest.mark.exhaustive if also_on_cpu else (),
        "cuda": pytest.mark.gpu,
    }
    names = [pytest.param(name, marks=marks[name]) for name in marker.args]
    metafunc.parametrize("device_name", names, indirect=True)


def _parameter(item: pytest.Item, name: str) -> Any:
    call = getattr(item, "callspec", None)
    return call.params.get(name) if call else None


def _rare_world_sizes(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns each test's cases for all numbers of ranks but one, kept above 1 if possible.

    The kept one differs between tests, and between the values of their other parameters.
    """
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        size = _parameter(item, "world_size")
        marks = sum(1 for _ in item.iter_markers("exhaustive"))
        if isinstance(size, int) and marks == (_parameter(item, "device_name") == "simulated"):
            test, _, others = item.nodeid.partition("[")
            others = "-".join(part for part in others.strip("]").split("-") if part != str(size))
            families[f"{test} {others}"].append(item)
    rare = []
    for family, members in families.items():
        several = [item for item in members if _parameter(item, "world_size") > 1] or members
        kept = several[zlib.crc32(family.encode()) % len(several)]
        rare.extend(item for item in members if item is not kept)
    return rare


def _is_left_out(item: pytest.Item, everything: bool, rare: Collection[pytest.Item]) -> bool:
    if not everything:
        return item.get_closest_marker("exhaustive") is not None
    # The simulator repeats the cases that plain runs have on the CPU, without rare values.
    if _parameter(item, "device_name") != "simulated":
        return False
    return sum(mark.name == "exhaustive" for mark in item.callspec.marks) > 1 or item in rare  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = bool(config.getoption("--all"))
    rare = set(_rare_world_sizes(items))
    for item in rare:
        item.add_marker(pytest.mark.exhaustive)
    left_out = [item for item in items if _is_left_out(item, everything, rare)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]
    if math.isfinite(config.getoption("--seconds")):
        items[:] = drawn(items, session_seed(config))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.stash[_BEGIN] = time.monotonic()
    collect_garbage_seldom()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leaves out exhaustive cases when the time of --seconds is used up."""
    if item.get_closest_marker("exhaustive") is None:
        return None
    used = time.monotonic() - item.session.stash[_BEGIN]
    return True if used > item.config.getoption("--seconds") else None


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries check at exit that all their objects are gone


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Rank processes for multi-rank tests: ``ranks.run(world_size, function, *args)``."""
    if not all(item.get_closest_marker("gpu") for item in request.session.items):
        simulated.build()  # once, instead of by each rank
    setup = replace(_SETUP, threads=pytestconfig.getoption("--ranks-threads"))
    pool = Ranks(session_seed(pytestconfig), SIZE, setup)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def device_name(request: pytest.FixtureRequest) -> str:
    """Where the ops of the test run; parametrized by the marker `devices`."""
    name: str = getattr(request, "param", "cpu")
    if _has_ranks(request.node):
        pool = request.getfixturevalue("ranks")
        if isinstance(pool, Ranks):  # it may be a number of ranks, too
            pool.options = {"device": name}
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
    """Gives each worker neighbouring tests, which share modules and compiled functions."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)
