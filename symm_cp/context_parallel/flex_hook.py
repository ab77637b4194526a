"""Redirects `flex_attention` while a region is active, however it was imported.

It is a Python function that no `TorchFunctionMode` sees, and most users import it by name. So while
a region is active, its code (not its name) is replaced by code that calls `_flex_attention` below,
which calls the original in threads without a region.

Dynamo traces the replaced code like any other, up to the call of `graph_flex_attention`: one op in
its graph. It finds the region where its guards look, on the stack of torch function modes, so a
compiled function is compiled again for another region, or for none.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from symm_cp.context_parallel.refusals import telling_peers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from symm_cp.context_parallel.guards import Watch
    from symm_cp.context_parallel.region import Region

FLEX = "flex_attention"


def _redirection(function: types.FunctionType) -> types.CodeType:
    """Code that calls `_flex_attention` with the arguments of `function`.

    It has the parameters of `function`, by name: Dynamo reads them once and keeps them with the
    function, also after its code is replaced.
    """
    plain: list[str] = []
    named: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        (named if parameter.kind is inspect.Parameter.KEYWORD_ONLY else plain).append(name)
    arguments = [*plain, *(f"{name}={name}" for name in named)]
    # It runs with the globals of torch's module, so it has to import this one.
    source = (
        f"def {function.__name__}({', '.join([*plain, '*', *named])}):\n"
        f"    from {__name__} import _flex_attention\n"
        f"    return _flex_attention({', '.join(arguments)})\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), scope)
    code: types.CodeType = scope[function.__name__].__code__
    return code


class _FlexHook:
    """Redirects `flex_attention` while it is acquired at least once."""

    def __init__(self) -> None:
        function = torch_flex.flex_attention
        self._function = function
        self._code = function.__code__
        self._redirected = _redirection(function)
        self._lock = threading.Lock()
        self._users = 0
        original = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        self.original: Callable[..., Any] = original
        self.signature = inspect.signature(function)

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            self._function.__code__ = self._redirected

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._function.__code__ = self._code


flex_hook = _FlexHook()
_original = flex_hook.original


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _traced(*args, **kwargs)
    # Frames that Dynamo gave up on, or recompiled too often, come here: Dynamo would compile what
    # they call piece by piece.
    eager = _untraced() if "torch._dynamo" in sys.modules else _eager
    return eager(*args, **kwargs)


def _eager(*args: Any, **kwargs: Any) -> Any:
    return _attend(flex_hook.original, *args, **kwargs)


def attend_compiled(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode; only torch's own function, where it is used, is compiled."""
    return _attend(torch.compile(flex_hook.original), *args, **kwargs)


@functools.cache
def _untraced() -> Callable[..., Any]:
    return torch.compiler.disable(_eager)  # type: ignore[no-any-return]


def _attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from symm_cp.context_parallel import guards
    from symm_cp.context_parallel.region import active

    region = active()
    if region is None:
        return original(*args, **kwargs)
    if (watch := guards.current()) is not None:
        watch.called = True
    return telling_peers(region.group, _attend_within, region, original, *args, **kwargs)


def _attend_within(region: Region, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    region.expect(FLEX)
    if region.load_balancer is not None and region.load_balancer.samples:
        raise NotImplementedError(
            f"{FLEX}: {region.load_balancer} within context_parallel has a layout for each sample, "
            "which is not supported: use one list of document lengths, or "
            "scaled_dot_product_attention"
        )
    bound = flex_hook.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    from symm_cp.context_parallel.flex import attend

    return attend(region, original, **bound.arguments)


# --- what Dynamo traces ----------------------------------------------------------------------


class FlexMode(TorchFunctionMode):
    """The mode of a region, where Dynamo finds the region and guards what it reads of it."""

    def __init__(self, region: Region, watch: Watch) -> None:
        super().__init__()
        self._region = region
        self._watch = watch


def _traced_mode() -> FlexMode | None:
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, FlexMode):
            return mode
    return None


def _traced(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    mode = _traced_mode()
    if mode is None:
        return _original(query, *args, **kwargs)
    region = mode._region
    region.expect(FLEX)
    mode._watch.called = True
    from symm_cp.context_parallel.flex import in_tiles
    from symm_cp.context_parallel.flex_trace import outside_graph

    if region.layout_text is None or not in_tiles(query.device):
        return outside_graph(query, *args, **kwargs)
    return _in_graph(region, query, *args, **kwargs)


def _in_graph(
    region: Region,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`flex_attention` as one op in the graph that Dynamo traces."""
    from symm_cp.context_parallel.flex_trace import graph_flex_attention

    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{FLEX}: max_scores within context_parallel")
    block_mask = getattr(block_mask, "symm_cp_global", block_mask)
    blocks: tuple[Any, ...] = (None,) * 8
    mask_mod = torch_flex.noop_mask
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
        blocks = (
            *block_mask.seq_lengths,
            *block_mask.BLOCK_SIZE,
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
    options = {
        "group_name": region.group,
        "layout": region.layout_text,
        "enable_gqa": enable_gqa,
        "scored": score_mod is not None and score_mod is not torch_flex._identity,
        "masked": mask_mod is not torch_flex.noop_mask,
    }
    score_mod = torch_flex._identity if score_mod is None else score_mod
    out, lse = graph_flex_attention(
        query, key, value, score_mod, (*blocks, mask_mod), scale, options
    )
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out
