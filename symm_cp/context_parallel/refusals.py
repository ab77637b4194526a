"""Reports errors that a rank raises before it calls an op to its peers at once."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from symm_cp.ops.attention import mesh_calls
from symm_cp.ops.error_reports import END_OF_RECOMPUTATION, refuse, report

P = ParamSpec("P")
R = TypeVar("R")


def reporting_to_peers(
    group: str | tuple[str, ...], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls a function; reports its error to the group's other ranks, which may wait for this one.

    A tuple of groups belongs to a mesh over which ranks attend. Does not wait for peers.
    """
    # torch.compiler.is_compiling(), inlined to one call: this runs in each layer.
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return function(*args, **kwargs)
    if not isinstance(group, str):
        with mesh_calls.propagates_failure(*group):
            return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except Exception as error:
        report(lambda *_: group, "sync", error, args, kwargs)
        raise


# Code that runs in the middle of a model's step: the peers are in the same step.
_STEPS = {nn.Module._call_impl.__code__, torch.autograd.backward.__code__}
# Files that call ops. Ops report to the peers themselves; native ops leave no frame in the error.
_OPS = (torch._ops.__file__, torch.autograd.graph.__file__)


@contextlib.contextmanager
def reporting_models(group: str | tuple[str, ...]) -> Iterator[None]:
    """Reports to the peers when a module or a backward pass raises: they wait for its attention.

    Does not report errors of the caller's own code outside of these: peers may have finished, and
    make no further call.
    """
    try:
        yield
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except (Exception, KeyboardInterrupt) as error:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not _STEPS.isdisjoint(codes) and codes[-1].co_filename not in _OPS:
            if not isinstance(group, str):
                mesh_calls.give_up(group, error)
            else:
                with contextlib.suppress(Exception):  # without a group there are no peers
                    refuse(group, "sync", error)
        raise
