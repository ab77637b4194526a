"""The plugin `pytest -p symm_cp.testing`: fixtures, a marker and options for tests on ranks."""

from __future__ import annotations

import contextlib
import copyreg
import datetime
import os
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest

from symm_cp.ranks import positive
from symm_cp.testing import delays, marker, state
from symm_cp.testing.gpu_programs import cuda_on_cpu
from symm_cp.testing.outcomes import SEED_VARIABLE, RankError, Skip, needs_a_gpu
from symm_cp.testing.pool import Ranks
from symm_cp.testing.process import Setup

# Fresh inputs in every session; the seed of a failure is in its message and in the summary.
_DRAWN = int.from_bytes(os.urandom(4), "little")
#: The names of failed tests that the command to repeat them has; more make a long line.
_REPEATED = 10
_CUDA_ON_CPU = pytest.StashKey[contextlib.ExitStack]()


def session_seed(config: pytest.Config) -> int:
    """Returns the seed of all tests; workers of pytest-xdist share the main process's."""
    sent = getattr(config, "workerinput", {}).get(SEED_VARIABLE)
    return int(sent or os.environ.get(SEED_VARIABLE) or _DRAWN)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the command line, and of pyproject.toml."""
    group = parser.getgroup("ranks", "tests on several ranks (symm_cp.testing)")
    group.addoption(
        "--ranks-backend", default="symm_cp", help="backend of the default group (symm_cp)"
    )
    group.addoption(
        "--ranks-timeout", type=float, default=120.0, help="seconds for a test on ranks (120)"
    )
    group.addoption(
        "--ranks-delays",
        type=int,
        metavar="US",
        help="random delays of up to US microseconds around waits and signals",
    )
    group.addoption(
        "--ranks-threads", type=positive, default=1, help="threads of torch in each rank (1)"
    )
    group.addoption("--cuda-on-cpu", action="store_true", help='"cuda" in programs means the CPU')
    group.addoption(
        "--ranks-races",
        action="store_true",
        help="fail tests whose ranks use symmetric memory without an order between them",
    )
    parser.addini(
        "ranks_preload", "modules that are imported once, before ranks are forked", "args"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Adds the marker."""
    config.addinivalue_line(
        "markers",
        f"{marker.SIGNATURE}: run the test on world_size ranks at once, "
        "by default the test's parameter of that name; init=False: the test calls "
        "init_process_group itself; timeout: seconds, instead of --ranks-timeout",
    )
    copyreg.pickle(pytest.MonkeyPatch, state.reduce_monkeypatch)  # type: ignore[arg-type]
    if longest := config.getoption("--ranks-delays"):
        os.environ[delays.VARIABLE] = str(longest)
    if config.getoption("--cuda-on-cpu"):  # tests may ask for devices while they are collected
        config.stash[_CUDA_ON_CPU] = stack = contextlib.ExitStack()
        stack.enter_context(cuda_on_cpu(world_size=8))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Refuses markers with wrong arguments, or on tests that cannot run on ranks."""
    if not hasattr(config, "workerinput"):  # pytest-xdist would say that a worker crashed
        marker.check_markers(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses wrong markers in workers of pytest-xdist, too."""
    marker.check_markers([item])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restores torch's own functions."""
    copyreg.dispatch_table.pop(pytest.MonkeyPatch, None)
    if stack := config.stash.get(_CUDA_ON_CPU, None):
        stack.close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Sends the seed to a worker of pytest-xdist."""
    node.workerinput[SEED_VARIABLE] = session_seed(node.config)


def pytest_report_header(config: pytest.Config) -> str:
    """Returns the line with the seed of this session."""
    return f"seed: {SEED_VARIABLE}={session_seed(config)}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Prints last how to repeat failures."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    if names := list(dict.fromkeys(report.nodeid for report in failed)):
        given = [str(argument) for argument in session.config.invocation_params.args]
        options = [argument for argument in given if argument not in session.config.args]
        command = shlex.join(["pytest", *options, *names[:_REPEATED]])
        reporter.write_line(f"repeat: {SEED_VARIABLE}={session_seed(session.config)} {command}")


@contextlib.contextmanager
def _skips_reported() -> Iterator[None]:
    """Raises pytest's own exception for a `RankError` if ranks skipped the function."""
    __tracebackhide__ = True
    try:
        yield
        return
    except RankError as error:
        reason = needs_a_gpu(error.reports.values())
        skip = Skip(False, reason) if reason else error.skip
        if skip is None:
            raise
    raise skip.exception()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Makes pytest's summary name the cause of a failure on ranks."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, RankError) and hasattr(report.longrepr, "reprcrash"):
        report.longrepr.reprcrash.message = error.cause
    return report


class _PluginsRanks(Ranks):
    """Ranks whose functions may skip the test that calls them, also without the marker."""

    def run_test(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Like `Ranks.run_test`, but skips the test where ranks skip the function."""
        __tracebackhide__ = True
        with _skips_reported():
            return super().run_test(*args, **kwargs)


def _pool(config: pytest.Config, backend: str) -> Ranks:
    setup = Setup(
        backend=backend,
        timeout=_group_timeout(config.getoption("--ranks-timeout")),
        preload=(*config.getini("ranks_preload"), "pytest"),
        cuda_on_cpu=config.getoption("--cuda-on-cpu"),
        races=config.getoption("--ranks-races"),
        threads=config.getoption("--ranks-threads"),
    )
    return _PluginsRanks(session_seed(config), setup=setup)


def _group_timeout(limit: float) -> datetime.timedelta:
    """Returns a shorter time-out than the test's, since the group's errors are more specific."""
    return datetime.timedelta(seconds=limit / 2)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Rank processes: ``ranks.run(world_size, function, *args)``."""
    pool = _pool(pytestconfig, pytestconfig.getoption("--ranks-backend"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def uninitialized_ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Like `ranks`, without a default group: functions call ``init_process_group()``."""
    pool = _pool(pytestconfig, "")
    yield pool
    pool.close()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> marker.GroupOfRanks:
    """On a rank, the default group of a test that is marked with `ranks`."""
    found = marker.marker_of(request.node)
    if found is None or not found.init:
        instead = "mark the test with" if found is None else "without init=False, use"
        pytest.fail(
            f"the fixture 'group' exists on ranks only: {instead} @pytest.mark.ranks(world_size)",
            pytrace=False,
        )
    return marker.GroupOfRanks()


def _call(
    group: Any, function: Callable[..., Any], arguments: dict[str, Any], run_xfail: bool
) -> None:
    if "group" in arguments:
        arguments["group"] = group
    if run_xfail:
        _ignore_xfail()
    marker.refuse_unrun(function(**arguments))


def _ignore_xfail() -> None:
    """Makes `pytest.xfail` do nothing, as --runxfail does in the process of pytest."""

    def xfail(*args: Any, **kwargs: Any) -> None: ...

    xfail.Exception = pytest.xfail.Exception  # type: ignore[attr-defined]
    pytest.xfail = xfail  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on ranks instead of here."""
    __tracebackhide__ = True  # the ranks' tracebacks show the failure
    found = marker.marker_of(pyfuncitem)
    if found is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    world_size = found.world_size or arguments.get("world_size")
    if not isinstance(world_size, int):
        raise pytest.UsageError(
            f"{pyfuncitem.nodeid}: the marker ranks needs a number of ranks, or a parameter "
            "world_size of the test"
        )
    marker.refuse_async(pyfuncitem.obj)
    marker.refuse_unpicklable(pyfuncitem, arguments)
    pool: Ranks = pyfuncitem._request.getfixturevalue(
        "ranks" if found.init else "uninitialized_ranks"
    )
    pool.renew()
    options = pyfuncitem.config.option
    with _skips_reported():  # `ranks` may be a fixture of the user's
        pool.run_test(
            pyfuncitem.name,
            world_size,
            _call,
            (pyfuncitem.obj, arguments, options.runxfail),
            {},
            found.timeout or options.ranks_timeout,
            group_timeout=_group_timeout(found.timeout) if found.init and found.timeout else None,
        )
    return True
