"""Errors that a rank raises before it calls an op, of which its peers learn at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from symm_cp.ops.common import tells_peers

P = ParamSpec("P")
R = TypeVar("R")


def _call(group: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return function(*args, **kwargs)


_telling = tells_peers(_call)


def telling_peers(group: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function; if it raises, tells the group's other ranks, which may wait for this one.

    Never waits itself.
    """
    return _telling(group, function, *args, **kwargs)
