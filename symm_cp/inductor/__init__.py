"""Passes for torch.compile that fuse collectives with the matmuls and attention next to them.

symm_cp.inductor.enable()
model = torch.compile(model)  # functional collectives or DTensor, as usual
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from symm_cp import tuning
from symm_cp.inductor.decisions import Decision, Report, graph_breaks, printing_rank, recording
from symm_cp.inductor.options import Options
from symm_cp.inductor.passes import UnfusedError, install, passes_for

__all__ = [
    "Decision",
    "Options",
    "Report",
    "UnfusedError",
    "compile_options",
    "disable",
    "enable",
    "enabled",
    "explain",
]

_remove: Callable[[], None] | None = None
_options: Options | None = None


class Enabled:
    """Returned by `enable`; as a context manager, it restores the earlier options at the end."""

    def __init__(self, before: Options | None) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
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
    all_reduce: bool = True,
) -> Enabled:
    """Lets torch.compile fuse collectives with adjacent matmuls and attention.

    Args:
        async_tp: all-gathers that feed matmuls (`mm`, `addmm`, `_scaled_mm`), through any views and
            casts (float8 gathered as bytes, too), become `fused_all_gather_(scaled_)matmul`;
            matmuls whose product is reduce-scattered become `fused_matmul_reduce_scatter`; on CPU,
            matmuls whose product is all-reduced become `fused_matmul_all_reduce`.
        context_parallel: all-gathers of keys and values that feed scaled-dot-product attention
            become `fused_all_gather_attention`, with its backward; next to projections,
            `exchange_heads` and all-to-alls that do the same become `project_to_heads` or
            `project_from_heads`.
        low_contention: other large all-gathers and reduce-scatters with independent matmuls to hide
            behind become `_low_contention_*`, waited for as late as possible.
        strict: compiling raises `UnfusedError` when a collective next to a matmul or attention is
            not fused. It is next to a matmul if only ops that move or cast elements lie between
            them; this includes collectives without a fused form, such as an all-to-all of tokens.
        min_flops: matmuls of fewer floating-point operations are left alone (default: 0 on CPU; on
            CUDA 2e11, or 3e10 in CUDA graphs: parts of a smaller matmul do not fill a GPU).
        min_bytes: smaller collectives do not become low-contention ones.
        all_reduce: other all-reduces of CPU tensors run as a native op, which blocks until the sum
            is complete. Turn it off where ranks have idle cores, and other work of the graph hides
            asynchronous all-reduces.

    The result can be used as a context manager, which restores the earlier options at its end.
    The passes keep results unchanged; `explain` reports what was fused, what was not, and why.
    Passes that are already in Inductor's configuration run first. Another call replaces the
    options. Graphs that were compiled before stay as they are. Source: torch's micro-pipeline TP
    pass.
    """
    before = _options
    _set(
        Options(
            async_tp, context_parallel, low_contention, strict, min_flops, min_bytes, all_reduce
        )
    )
    return Enabled(before)


def compile_options(options: Options | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the passes as `options` of a single `torch.compile`.

    torch.compile(model, options=symm_cp.inductor.compile_options(strict=True))

    `changes` are keyword arguments of `enable`. Raises `TypeError` for unknown ones.
    """
    known = {field.name for field in fields(Options)}
    if unknown := sorted(changes.keys() - known):
        raise TypeError(
            f"compile_options: unknown {', '.join(unknown)}; must be of {', '.join(sorted(known))}"
        )
    return passes_for(replace(options or Options(), **changes))


def enabled() -> bool:
    """Whether the passes are in Inductor's configuration."""
    return _options is not None


def disable() -> None:
    """Removes the passes from Inductor's configuration."""
    _set(None)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compiles a function or module, and returns a `Report` on each of its collectives; print it.

    Printed on all ranks, it is one report: the first rank's. It also has the reasons of graph
    breaks, where code ran uncompiled.

    Uses the options of `enable`, or the defaults. Runs the function once and, where its result
    needs gradients of the arguments or of its parameters, the backward pass as well (no `.grad`
    changes). Collective: call it on all ranks.
    """
    with ExitStack() as stack:
        if _options is None:
            stack.enter_context(enable())
        # Loading a graph from a cache runs no passes, so it would record no decision. The passes do
        # not depend on the kernels generated later: fall back to torch's, which need no compiling.
        stack.enter_context(
            inductor_config.patch(force_disable_caches=True, fallback_by_default=True)
        )
        report = stack.enter_context(recording())
        report.algorithms = stack.enter_context(tuning.listening())
        torch._dynamo.reset()
        broken_before = dict(counters["graph_break"])
        results = torch.compile(fn)(*args, **kwargs)
        inputs = [*tree_leaves((args, kwargs))]
        if isinstance(fn, torch.nn.Module):
            inputs += fn.parameters()
        leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        totals = [t.sum() for t in outputs if t.requires_grad]
        if totals and leaves:
            torch.autograd.grad(totals, leaves, allow_unused=True)
        report.breaks = graph_breaks(broken_before)
        report.printed_by = printing_rank(report)
        torch._dynamo.reset()
    return report
