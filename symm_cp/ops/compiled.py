"""What `torch.compile` has to be told of ops that torch defines for CUDA alone.

Inductor places the input of an all-reduce in symmetric memory, which it cannot do on CPU and which
the op does not need there. And it must not see `get_remote_tensors`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

_ops = torch.ops.symm_mem


def no_fake_remote_tensors(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    """A fake kernel that makes the compiler break its graph.

    What the op returns is memory of the peers. Its schema does not say so, and Inductor would use
    that memory again for results of its own, as it does with any tensor that is not needed anymore.
    """
    raise UnsupportedOperatorException(_ops.get_remote_tensors.default)


def _all_reduce_lowering(input: Any, reduce_op: str, group_name: str) -> Any:
    from torch._inductor.lowering import fallback_handler

    if input.get_device().type != "cpu":
        return None
    # The op itself would be lowered to `one_shot_all_reduce_out`, for fixed shapes only.
    op = _ops._one_shot_all_reduce.default
    return fallback_handler(op, add_to_fallback_set=False)(input, reduce_op, group_name)


def teach_inductor() -> None:
    """Tells Inductor, where it has been imported, to leave an all-reduce on CPU as it is.

    Called by the fake kernel, which a compiler runs before it lowers the op, because importing
    Inductor takes seconds.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    op = _ops.one_shot_all_reduce.default
    if lowering is None:
        return
    if hasattr(lowering, "user_lowerings"):
        lowering.user_lowerings.setdefault(op, _all_reduce_lowering)
        return
    known = lowering.lowerings.get(op)
    if known is not None and not hasattr(known, "symm_cp"):

        def lowered(*args: Any) -> Any:
            on_cpu = _all_reduce_lowering(*args)
            return known(*args) if on_cpu is None else on_cpu

        lowered.symm_cp = True  # type: ignore[attr-defined]
        lowering.lowerings[op] = lowered
