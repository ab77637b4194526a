"""The marker `ranks`: its arguments, the tests that it may mark, and what can be sent to ranks."""

from __future__ import annotations

import inspect
import pickle
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

SIGNATURE = "ranks(world_size=None, init=True, timeout=None)"


@dataclass(frozen=True)
class Marker:
    """The arguments of `@pytest.mark.ranks`."""

    world_size: int | None = None  # None: the test's parameter of this name
    init: bool = True
    timeout: float | None = None  # in seconds; None: `--ranks-timeout`

    def check(self) -> None:
        """Raises `TypeError` or `ValueError` for invalid values."""
        size, limit = self.world_size, self.timeout
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"world_size={size!r} must be an int")
        if size is not None and size < 1:
            raise ValueError(f"world_size={size} must be positive")
        if not isinstance(self.init, bool):
            raise TypeError(f"init={self.init!r} must be True or False")
        if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool)):
            raise TypeError(f"timeout={limit!r} must be a number of seconds")
        if limit is not None and limit <= 0:
            raise ValueError(f"timeout={limit!r} must be positive")


class GroupOfRanks:
    """Stands for the default group in pytest's own process, where fixtures run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"group.{name}: the group exists on ranks only, fixtures run in pytest's process"
        )


def marker_of(item: pytest.Item) -> Marker | None:
    """Returns the marker of a test, if it has one; raises `UsageError` for wrong arguments."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        bound = inspect.signature(Marker).bind(*mark.args, **mark.kwargs)
        marker = Marker(*bound.args, **bound.kwargs)
        marker.check()
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker ranks: {error}; it is {SIGNATURE}"
        ) from None
    return marker


def check_markers(items: Sequence[pytest.Item]) -> None:
    """Raises `UsageError` for markers with wrong arguments, or on tests of `unittest`."""
    errors = []
    for item in items:
        try:
            marker = marker_of(item)
        except pytest.UsageError as error:
            errors.append(str(error))
            continue
        owner = getattr(item, "cls", None)
        if marker is not None and owner is not None and issubclass(owner, unittest.TestCase):
            errors.append(
                f"{item.nodeid}: the marker ranks is not supported in unittest.TestCase, whose "
                "tests pytest does not call itself; make it a function, or a method of a class "
                "without that base"
            )
    if errors:
        raise pytest.UsageError("\n".join(errors))


def refuse_async(function: Any) -> None:
    """Fails a test whose body would not run when it is called: a coroutine or a generator."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        pytest.fail(
            "async def functions are not supported on ranks; call asyncio.run() in a plain "
            "function, with what the test awaits",
            pytrace=False,
        )
    if inspect.isgeneratorfunction(function):
        pytest.fail("'yield' is allowed in fixtures, but not in tests", pytrace=False)


def refuse_unrun(result: Any) -> None:
    """Raises `TypeError` for the result of a test whose body did not run."""
    if inspect.iscoroutine(result):
        result.close()  # nobody will await it
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(
            f"the test returned a {type(result).__name__}, which nothing runs: its body has not "
            "run, either; async tests call asyncio.run(), and 'yield' is for fixtures"
        )


def _cannot_be_pickled(value: Any) -> str:
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuse_unpicklable(item: pytest.Function, arguments: Mapping[str, Any]) -> None:
    """Fails a test that cannot be pickled for the ranks, or whose arguments cannot; names them."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    complaints = []
    for name, value in arguments.items():
        if error := _cannot_be_pickled(value):
            kind = "parameter" if name in parameters else "fixture"
            complaints.append(f"the {kind} {name!r} cannot be pickled ({error})")
    if complaints:
        pytest.fail(
            f"{'; '.join(complaints)}: the ranks are other processes. Make such a value inside the "
            "test, or use it in a test without the marker, which calls ranks.run(world_size, "
            "function, *args)",
            pytrace=False,
        )
    if error := _cannot_be_pickled(item.obj):
        pytest.fail(
            f"the test cannot be pickled ({error}): the ranks are other processes. It must be at "
            "the top level of its module, or a method of a class there whose attributes can be "
            "pickled; decorators must use functools.wraps",
            pytrace=False,
        )
