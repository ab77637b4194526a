"""Passes for torch.compile that fuse collectives with the matmuls and attention next to them.

symm_cp.inductor.enable()
model = torch.compile(model)  # functional collectives or DTensor, as usual
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.utils._pytree import tree_leaves

from symm_cp import tuning
from symm_cp.inductor.options import Options
from symm_cp.inductor.passes import UnfusedError, install, passes_for
from symm_cp.inductor.report import Decision, Report, recording

__all__ = [
    "Decision",
    "Options",
    "Report",
    "UnfusedError",
    "compile_options",
    "disable",
    "enable",
    "explain",
]

_remove: Callable[[], None] | None = None
_options: Options | None = None


class Enabled:
    """What `enable` returns: as a context manager, it puts back at the end what was before."""

    def __init__(self, before: Options | None) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _set(self._before)


def _set(options: Options | None) -> None:
    global _remove, _options
    if _remove is not None:
        _remove()
    _remove, _options = (None if options is None else install(options)), options


def enable(
    *,
    async_tp: bool = True,
    context_parallel: bool = True,
    low_contention: bool = False,
    strict: bool = False,
    min_flops: float | None = None,
    min_bytes: int = Options.min_bytes,
) -> Enabled:
    """Lets torch.compile fuse collectives with what is next to them; also a context manager.

    Args:
        async_tp: all-gathers that feed matmuls (`mm`, `addmm`, `_scaled_mm`), through any views and
            casts (float8 gathered as bytes, too), become `fused_all_gather_(scaled_)matmul`;
            matmuls whose product is reduce-scattered become `fused_matmul_reduce_scatter`.
        context_parallel: all-gathers of keys and values that feed scaled-dot-product attention
            become `fused_all_gather_attention`, with its backward.
        low_contention: other large all-gathers and reduce-scatters with independent matmuls to hide
            behind become `_low_contention_*`, waited for as late as possible.
        strict: compiling raises `UnfusedError` when a collective next to a matmul or attention is
            left alone. Next to a matmul is what only moves or casts separate from it; this
            includes collectives that have no fused form, such as the all-reduce of a product.
        min_flops: matmuls of fewer floating-point operations are left alone (default: 0 on CPU, 1e9
            on CUDA, where the parts of a small matmul fill no GPU).
        min_bytes: smaller collectives are not made low-contention ones.

    A pass only does what leaves results as they are; `explain` tells what was done and what was
    not, and why. Passes that are in Inductor's configuration already run first. Calling it again
    changes the options. What was compiled before stays as it is. Source: torch's micro-pipeline TP
    pass.
    """
    before = _options
    _set(Options(async_tp, context_parallel, low_contention, strict, min_flops, min_bytes))
    return Enabled(before)


def compile_options(options: Options | None = None) -> dict[str, Any]:
    """Returns the passes as `options` of one `torch.compile`, where they should not hold for all.

    torch.compile(model, options=symm_cp.inductor.compile_options())
    """
    return passes_for(options or Options())


def disable() -> None:
    """Takes the passes out of Inductor's configuration again."""
    _set(None)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compiles a function or module for some arguments, and tells what became of each collective.

    With the options of `enable`, or the default ones. The function is run once and, where its
    result needs gradients of the arguments or of its parameters, so is its backward pass (no
    `.grad` changes). Collective: call it on all ranks. Returns a `Report`; print it.
    """
    with ExitStack() as stack:
        if _options is None:
            stack.enter_context(enable())
        # What comes out of a cache is not compiled, so that nothing would be told of it. The passes
        # do not care which kernels come after them: torch's own need no compiler, and no minute.
        stack.enter_context(
            inductor_config.patch(force_disable_caches=True, fallback_by_default=True)
        )
        report = stack.enter_context(recording())
        report.ways = stack.enter_context(tuning.listening())
        torch._dynamo.reset()
        results = torch.compile(fn)(*args, **kwargs)
        outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        outputs = [t.sum() for t in outputs if t.requires_grad]
        given = [*tree_leaves((args, kwargs))]
        if isinstance(fn, torch.nn.Module):
            given += fn.parameters()
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, allow_unused=True)
        torch._dynamo.reset()
    return report
