"""Reports a call that this rank refuses to its peers, which may be making the same call."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from symm_cp import native
from symm_cp.group.memory import GroupLike, is_reported, reported, resolve
from symm_cp.ops.tensor_checks import concerns_peers

#: The exception that a checkpoint raises once it has recomputed the tensors that it needs.
END_OF_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
#: The names of the ops with a kernel for CPU tensors.
OPS_ON_CPU: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")


def reports_to_peers(
    function: Callable[P, R], group: str = "group", channel: str = "sync", op: str = ""
) -> Callable[P, R]:
    """Returns the function, with its errors reported to the peers.

    They may be making the same call, and would wait for this rank until their time-out. `group`
    names the argument that holds the group, `channel` the channel of the call. Errors that name no
    op get the name `op`.
    """
    signature = inspect.signature(function)

    def group_of_call(args: Any, kwargs: Any) -> Any:
        return signature.bind(*args, **kwargs).arguments[group]

    return reporting(function, group_of_call, channel, op, traced=True)


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that users call with `group`, with its errors reported to the peers."""
    name = function.__name__
    return reports_to_peers(function, channel=channel_of(name), op=name)


def names_op(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function's errors name the op that the user called, if they name none."""
    return lambda function: reporting(function, None, "", op, traced=True)


def reporting(
    function: Callable[P, R],
    group_of_call: Callable[[Any, Any], Any] | None,
    channel: str,
    op: str,
    *,
    traced: bool = False,
) -> Callable[P, R]:
    """Returns the function, with errors that name the op and are reported to the call's group.

    `traced`: compilers trace the function, unlike kernels and gradients.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if traced and torch.compiler.is_dynamo_compiling():  # it traces no `except`
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except END_OF_RECOMPUTATION:  # nothing failed
            raise
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            if op:
                _name_op(op, error)
            if group_of_call is not None:
                report(group_of_call, channel, error, args, kwargs)
            raise

    return call


def report(
    group_of_call: Callable[[Any, Any], Any],
    channel: str,
    error: Exception,
    args: Any,
    kwargs: Any,
) -> None:
    """Reports a call's error to the peers, if they may take part in the call."""
    with contextlib.suppress(Exception):  # no group, no peers
        if concerns_peers(tree_leaves((args, kwargs))):
            refuse(group_of_call(args, kwargs), channel, error)


def _name_op(op: str, error: Exception) -> None:
    """Puts an op's name before the text of an error that names none, such as torch's."""
    text = str(error)
    if not error.args:  # such as a MemoryError
        error.args = (f"{op}: {type(error).__name__}",)
    elif error.args == (text,) and not any(name in text for name in (op, *OPS_ON_CPU)):
        error.args = (f"{op}: {text}",)


def refuse(group: GroupLike, channel: str, error: BaseException) -> None:
    """Reports to the peers that this rank does not make the call that they may be making now.

    Does nothing when the error was already reported to them. Never waits.
    """
    state = resolve(group)
    if state.world_size == 1 or is_reported(error):
        return
    if _was_reported_natively(error):
        reported(error)
        return
    state.refuse(channel, error)
    reported(error)


def _was_reported_natively(error: BaseException) -> bool:
    """Whether a native kernel has reported the error to the peers."""
    if isinstance(error, KeyboardInterrupt):  # it replaced the kernel's own error
        return bool(native.load().symm_cp_interruption_was_reported())
    return bool(native.load().symm_cp_was_reported(str(error).encode()))


def channel_of(op: str) -> str:
    """Returns the channel on which an op makes its calls."""
    return "async" if op.removeprefix("_").startswith("low_contention") else "sync"
