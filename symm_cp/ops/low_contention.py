"""Low-contention collectives: they return at once, and a copy engine moves the bytes.

`torch.ops._c10d_functional.wait_tensor` waits for one. The caller may overwrite a plain input as
soon as the call has returned, a symmetric one (which peers read in place) after the wait.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp import runtime
from symm_cp.memory import GroupLike, group_name, resolve
from symm_cp.ops.common import (
    PLANS,
    Plans,
    check_divisible,
    check_reduce_op,
    in_test_mode,
    lib,
    register_kernel,
    unfused_all_gather,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)

_GATHER = "_low_contention_all_gather"
_SCATTER = "_low_contention_reduce_scatter"


def _check_gather(tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{_GATHER}: tensor must have at least 1 dimension, has none")


def _check_scatter(tensor: torch.Tensor, reduce_op: str, world_size: int) -> bool:
    if tensor.dim() == 0:
        raise ValueError(f"{_SCATTER}: tensor must have at least 1 dimension, has none")
    check_divisible(_SCATTER, "dim", 0, tensor.shape[0], world_size)
    return check_reduce_op(_SCATTER, "tensor", tensor.dtype, reduce_op)


def _all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    if in_test_mode():
        return unfused_all_gather(tensor, 0, group_name)
    group = resolve(group_name)
    on = runtime.of(tensor, group)
    plans = group.state(PLANS, Plans)
    key = (_GATHER, on, tensor.shape, tensor.dtype)
    plan = plans.get(key)
    if plan is None:
        _check_gather(tensor)
        plan = plans.keep(key, on.prepare_all_gather(group, tensor, what_is(_GATHER, tensor)))
    return plan.start(group, tensor)


def _reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    group = resolve(group_name)
    if in_test_mode():
        _check_scatter(tensor, reduce_op, group.world_size)
        return unfused_reduce_scatter(tensor, reduce_op, 0, group_name)
    on = runtime.of(tensor, group)
    plans = group.state(PLANS, Plans)
    key = (_SCATTER, on, tensor.shape, tensor.dtype, reduce_op)
    plan = plans.get(key)
    if plan is None:
        mean = _check_scatter(tensor, reduce_op, group.world_size)
        name = what_is(_SCATTER, tensor, detail=reduce_op)
        plan = plans.keep(key, on.prepare_reduce_scatter(group, tensor, name, mean=mean))
    return plan.start(group, tensor)


def _all_gather_fake(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    _check_gather(tensor)
    return tensor.new_empty((tensor.shape[0] * world_size_of(group_name), *tensor.shape[1:]))


def _reduce_scatter_fake(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    world_size = world_size_of(group_name)
    _check_scatter(tensor, reduce_op, world_size)
    return tensor.new_empty((tensor.shape[0] // world_size, *tensor.shape[1:]))


def register() -> None:
    """Adds CPU kernels, and fake kernels (torch's average, which integers lack, and check less).

    The gradients are registered by csrc/gradients.cpp.
    """
    register_kernel(_GATHER, _all_gather, replaces_torch=True)
    register_kernel(_SCATTER, _reduce_scatter, replaces_torch=True)
    lib.impl(_GATHER, _all_gather_fake, "Meta", allow_override=True)
    lib.impl(_SCATTER, _reduce_scatter_fake, "Meta", allow_override=True)


def low_contention_all_gather(shard: torch.Tensor, *, group: GroupLike) -> torch.Tensor:
    """All-gathers along the first dimension in the background.

    Same result as::

        all_gather_tensor(shard, 0, group)

    Args:
        shard: (M, ...), equal shapes on all ranks, any dtype.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns a tensor of shape (W * M, ...) that, like those of torch's functional collectives, waits
    for the transfer when it is first used. Differentiable. A contiguous shard in symmetric memory
    that was rendezvoused with the group is read in place: leave it alone until then. Raises
    `ValueError` for a 0-D shard, `RuntimeError` when a peer fails or disagrees. Source: torch's
    `symm_mem::_low_contention_all_gather`.
    """
    gathered = torch.ops.symm_mem._low_contention_all_gather(shard, group_name(group))
    return funcol._maybe_wrap_tensor(gathered)


def low_contention_reduce_scatter(
    tensor: torch.Tensor, *, reduce_op: str = "sum", group: GroupLike
) -> torch.Tensor:
    """Reduce-scatters along the first dimension in the background.

    Same result as::

        reduce_scatter_tensor(tensor, reduce_op, 0, group)

    Args:
        tensor: (W * M, ...), equal shapes on all ranks; integers for "sum" only.
        reduce_op: "sum" or "avg"; added in rank order, in float32 for 16-bit types.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.

    Returns a tensor of shape (M, ...) that waits when it is first used. Differentiable. Memory and
    errors as for `low_contention_all_gather`; `TypeError` for a dtype that cannot be reduced.
    Source: torch's `symm_mem::_low_contention_reduce_scatter`.
    """
    name = group_name(group)
    scattered = torch.ops.symm_mem._low_contention_reduce_scatter(tensor, reduce_op, name)
    return funcol._maybe_wrap_tensor(scattered)
