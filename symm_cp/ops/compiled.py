"""How `torch.compile` must treat the ops.

- Ranks make the same calls in the same order. Inductor keeps the order of torch's collectives, but
  moves other ops to save memory, by sizes that may differ between ranks: two calls of one op could
  change places on some ranks only, and each would take the data of the other. It also drops a
  call whose result only kernels of empty tensors use, on the rank that has no elements.
  unused_results.py keeps the calls whose results nobody uses.
- Inductor places the input of an all-reduce in symmetric memory, which it cannot do on CPU and
  which the op does not need there. It must not see `get_remote_tensors`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from symm_cp.ops.op import Op

P = ParamSpec("P")
R = TypeVar("R")

_ops = torch.ops.symm_mem
_ordered: dict[str, Op] = {}  # by full names, the ops that ranks call together


def breaks_graph(name: str) -> Callable[..., Any]:
    """Returns a fake kernel that makes the compiler break its graph, so that the op runs eagerly.

    For ops whose memory the compiler would treat as its own: `get_remote_tensors` returns peers'
    memory, which Inductor would reuse for results; others write to symmetric memory, which
    the compiler replaces by copies in ordinary memory.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOperatorException(getattr(_ops, name).default)

    refuse.breaks_graph = True  # type: ignore[attr-defined]
    return refuse


def _lowering_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Leaves an op on CPU tensors as it is; returns None for others.

    torch's lowerings would place its inputs in symmetric memory. An all-reduce would be lowered to
    `one_shot_all_reduce_out`, for fixed shapes only.
    """
    from torch._inductor.lowering import fallback_handler

    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if first.get_device().type != "cpu":
        return None
    op = _ops._one_shot_all_reduce.default if op is _ops.one_shot_all_reduce.default else op
    return fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def _lowering_in_order(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Lowers an op as usual, to run after the op that this function lowered before."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    graph, result = V.graph, None
    before = len(graph.operations)
    if _ordered[op._schema.name].cpu_only:
        result = _lowering_on_cpu(op, *args, **kwargs)
    if result is None:
        result = lowering.lowerings[op](*args, **kwargs)
    for operation in graph.operations[before:]:
        if isinstance(operation, ir.ExternKernel) and not isinstance(operation, ir.MultiOutput):
            last = getattr(graph, "symm_cp_last", None)
            if last is not None:
                graph.additional_buffer_deps[operation.get_operation_name()].add(last)
            graph.symm_cp_last = operation.get_name()
            if not _ordered[op._schema.name].one_sided:
                # Kernels of empty tensors read nothing: the call would be dropped where the peers
                # have elements, and wait for it.
                operation.has_side_effects = lambda: True
    return result


def called_in_order(op: Op, fake: Callable[P, R]) -> Callable[P, R]:
    """Returns the fake kernel of an op that all ranks of a group call together.

    Compiled programs make such calls in the order in which they were written, whatever the shapes.
    """
    _ordered[op.full_name] = op

    @functools.wraps(fake)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        teach_inductor()
        return fake(*args, **kwargs)

    return call


def teach_inductor() -> None:
    """Makes Inductor, if it is imported, leave an all-reduce on CPU as it is.

    From torch 2.13 on, also makes it keep the ops of `called_in_order`, and their order. The fake
    kernels call this, as a compiler runs them before it lowers the ops: importing Inductor takes
    seconds.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    op = _ops.one_shot_all_reduce.default
    if lowering is None:
        return
    if hasattr(lowering, "user_lowerings"):
        for each in [op.overload for op in _ordered.values()]:
            if each not in lowering.user_lowerings:
                lowering.user_lowerings[each] = functools.partial(_lowering_in_order, each)
        return
    known = lowering.lowerings.get(op)
    if known is not None and not hasattr(known, "symm_cp"):

        def lowered(*args: Any) -> Any:
            on_cpu = _lowering_on_cpu(op, *args)
            return known(*args) if on_cpu is None else on_cpu

        lowered.symm_cp = True  # type: ignore[attr-defined]
        lowering.lowerings[op] = lowered
