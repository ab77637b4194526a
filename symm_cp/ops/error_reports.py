"""Reports a call that this rank refuses to its peers, which may be making the same call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from symm_cp import native
from symm_cp.group.memory import GroupLike, is_reported, reported, resolve
from symm_cp.ops.op import shows_types
from symm_cp.ops.tensor_checks import concerns_peers

#: The exception that a checkpoint raises once it has recomputed the tensors that it needs.
END_OF_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
#: The names of the ops with a kernel for CPU tensors.
OPS_ON_CPU: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")
#: Changes the text of a call's error, given the call's arguments.
_Improve: TypeAlias = Callable[[Exception, Any, Any], None]


def reports_to_peers(
    function: Callable[P, R],
    group: str = "group",
    channel: str = "sync",
    op: str = "",
    words: Mapping[str, str] | None = None,
) -> Callable[P, R]:
    """Returns the function, with its errors reported to the peers.

    They may be making the same call, and would wait for this rank until their time-out. `group`
    names the argument that holds the group, `channel` the channel of the call. Errors that name no
    op get the name `op`; in this rank's error `words` replace others afterwards.
    """
    signature = inspect.signature(function)

    def group_of_call(args: Any, kwargs: Any) -> Any:
        return signature.bind(*args, **kwargs).arguments[group]

    improve = None if words is None else _improve(words, signature)
    return reporting(function, group_of_call, channel, op, improve, traced=True)


def entry_point(
    op: str = "", words: Mapping[str, str] = MappingProxyType({}), **fixed: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that users call with `group`: its errors are reported to the peers.

    They name the function, not the `op` that it calls; `words` has the function's names of
    arguments, by the op's. The op's types are added to the docstring, for the `fixed` arguments.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        named = {op or name: name, **words}
        shows_types(op or name, words, **fixed)(function)
        return reports_to_peers(function, channel=channel_of(name), op=name, words=named)

    return decorated


def _improve(words: Mapping[str, str], signature: inspect.Signature) -> _Improve:
    """Returns a function that puts the user's words into an error, and advice."""
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    pattern = re.compile(rf"(?<!\w)(?<!the )(?<!\d )_?({longest_first})(?:_split)?(\[\d+\])?(?!\w)")

    def improve(error: Exception, args: Any, kwargs: Any) -> None:
        text = str(error)
        if error.args != (text,):
            return
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group", "")
        if not isinstance(group, str):  # the program still has it
            text = _UNKNOWN.sub(r"\1 \2 was destroyed", text)
        if "sizes" in signature.parameters and given.get("sizes") is None:
            text += _advice(text, group)

        def word(found: re.Match[str]) -> str:
            name = words[found[1]]
            several = name.endswith("s") or isinstance(given.get(name), list | tuple)
            return name + (found[2] or "" if several else "")

        error.args = (pattern.sub(word, text),)

    return improve


_UNKNOWN = re.compile("there is no (process group) named ('.*?')")
_CALL = r"rank (\d+) calls (\w+(?: \w+\[[\d, ]+\])+ [^,]*?(?<!scatter_)dim=(\d+))"
_TWO_CALLS = re.compile(rf"ranks disagree: {_CALL}[^,]*, {_CALL}")


def _advice(text: str, group: GroupLike) -> str:
    """Returns what to do if only the lengths of the ranks' shards differ; empty otherwise."""
    found = _TWO_CALLS.search(text)
    if found is None:
        return ""
    lengths: dict[int, int] = {}
    rests = set()
    for rank, call, dim in (found.groups()[:3], found.groups()[3:]):
        shapes = [shape.split(", ") for shape in re.findall(r"\[(.*?)\]", call)]
        if len(shapes[0]) <= int(dim):
            return ""
        lengths[int(rank)] = int(shapes[0][int(dim)])
        rests.add((call.split("[")[0], str([s[: int(dim)] + s[int(dim) + 1 :] for s in shapes])))
    if len(rests) > 1 or len(set(lengths.values())) == 1:
        return ""
    in_order = [lengths[rank] for rank in sorted(lengths)]
    if resolve(group).world_size == len(in_order):
        return f": shards of unequal lengths need sizes={in_order}"
    ranks = " and ".join(f"{lengths[rank]} on rank {rank}" for rank in sorted(lengths))
    return f": shards of unequal lengths need sizes, the length on each rank ({ranks})"


def names_op(op: str, *instead_of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function's errors name what the user called, if they name nothing, or other ops."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        words = dict.fromkeys(instead_of or (op,), op)
        improve = _improve(words, inspect.signature(function))
        return reporting(function, None, "", op, improve, traced=True)

    return decorated


def reporting(
    function: Callable[P, R],
    group_of_call: Callable[[Any, Any], Any] | None,
    channel: str,
    op: str,
    improve: _Improve | None = None,
    *,
    traced: bool = False,
) -> Callable[P, R]:
    """Returns the function, with errors that name the op and are reported to the call's group.

    `improve` changes an error's text, after it was reported. `traced`: compilers trace the
    function, unlike kernels and gradients.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if traced and torch.compiler.is_dynamo_compiling():  # it traces no `except`
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except END_OF_RECOMPUTATION:  # nothing failed
            raise
        except KeyboardInterrupt as error:
            if group_of_call is not None and getattr(error, "_symm_cp_before_call", False):
                report(group_of_call, channel, error, args, kwargs)
            raise
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            if op:
                _name_op(op, error)
            if group_of_call is not None:
                report(group_of_call, channel, error, args, kwargs)
            if improve is not None:
                with contextlib.suppress(Exception):  # the error itself matters more
                    improve(error, args, kwargs)
            raise

    return call


def report(
    group_of_call: Callable[[Any, Any], Any],
    channel: str,
    error: BaseException,
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
