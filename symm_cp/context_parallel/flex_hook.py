"""Redirects `flex_attention` while a region is active, however it was imported.

`flex_attention` is a Python function that no `TorchFunctionMode` sees, and most users import it by
name. So while a region is active, its code (not its name) is replaced by code that calls
`_flex_attention` below, which calls the original in threads without a region.

Dynamo traces the replaced code like any other, up to one op in its graph (flex_trace.py). It finds
the region on the stack of torch function modes, which its guards check, so a function is compiled
again for another region, or outside of regions.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from symm_cp.context_parallel import flex
from symm_cp.context_parallel.gathered_keys import compiled_flex, in_tiles, original
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.region import ParallelRegion, outside_graph, untraced
from symm_cp.context_parallel.while_used import WhileUsed

P = ParamSpec("P")
R = TypeVar("R")


def _redirection(function: types.FunctionType) -> types.CodeType:
    """Returns code that calls `_flex_attention` with the arguments of `function`.

    The code has the parameter names of `function`: Dynamo reads these once and keeps them with the
    function, even after its code is replaced.
    """
    plain: list[str] = []
    named: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        (named if parameter.kind is inspect.Parameter.KEYWORD_ONLY else plain).append(name)
    arguments = [*plain, *(f"{name}={name}" for name in named)]
    # The code runs with the globals of torch's module, so it must import this module.
    source = (
        f"def {function.__name__}({', '.join([*plain, '*', *named])}):\n"
        f"    from {__name__} import _flex_attention\n"
        f"    return _flex_attention({', '.join(arguments)})\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), scope)
    code: types.CodeType = scope[function.__name__].__code__
    return code


_FUNCTION = torch_flex.flex_attention
_ORIGINAL, _REDIRECTED = _FUNCTION.__code__, _redirection(_FUNCTION)


def _redirect() -> Callable[[], None]:
    _FUNCTION.__code__ = _REDIRECTED
    return _restore


def _restore() -> None:
    _FUNCTION.__code__ = _ORIGINAL


#: Redirects `flex_attention` while it is acquired.
flex_hook = WhileUsed(_redirect)


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _traced(*args, **kwargs)
    # Called by frames that Dynamo could not trace, or recompiled too often. It must not compile the
    # functions that they call piece by piece.
    return untraced(flex.attend)(*args, **kwargs)


# --- traced by Dynamo ------------------------------------------------------------------------


class FlexMode(TorchFunctionMode):
    """The mode of a region: Dynamo finds the region in it, and guards the attributes it reads."""

    def __init__(self, region: ParallelRegion, watch: Watch) -> None:
        super().__init__()
        self.region = region
        self.watch = watch

    #: Whether the region was entered outside of graphs, where default generators can be changed.
    entered: bool = False

    def again(self) -> AbstractContextManager[None]:
        """Runs code as in the region, even after the region was left."""
        raise NotImplementedError


def current_modes() -> list[FlexMode]:
    """Returns the modes of the caller's regions, also when traced."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, FlexMode)]


def current_mode() -> FlexMode | None:
    """Returns the mode of the caller's innermost region, also when traced."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, FlexMode):
            return mode
    return None


def handled(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function as torch calls a mode's handler: without the mode of the innermost region.

    Otherwise the mode would see each function call, and ops would take the slow path through it.
    """
    depth = 0 if torch.compiler.is_dynamo_compiling() else torch._C._len_torch_function_stack()
    if depth == 0 or not isinstance(torch._C._get_function_stack_at(depth - 1), FlexMode):
        return function(*args, **kwargs)
    mode = torch._C._pop_torch_function_stack()
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._push_on_torch_function_stack(mode)


def spread_region() -> ParallelRegion | None:
    """Returns the caller's innermost region; None if it has one rank, where nothing is spread."""
    mode = current_mode()
    return None if mode is None or mode.region.world_size == 1 else mode.region


def _traced(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    mode = current_mode()
    if mode is None:
        return original(query, *args, **kwargs)
    region = mode.region
    mode.watch.called = True
    # Masks are cut outside of the graph if torch's kernels attend to gathered keys. A rank without
    # a position has not been tried in a graph.
    if region.layouts is None or region.holds_none or not in_tiles(query.device):
        return outside_graph(flex.attend_compiled, query, *args, **kwargs)
    return flex.attend_within(region, compiled_flex, query, *args, **kwargs)
