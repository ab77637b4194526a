"""Low-contention collectives: they return at once, and a copy engine moves the bytes.

`torch.ops._c10d_functional.wait_tensor` waits for a result. The caller may overwrite a plain input
as soon as the call has returned, a symmetric input (which peers read in place) after the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from symm_cp import runtime
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.common import (
    PREPARED,
    SIZES,
    WITH_SIZES,
    PreparedCalls,
    call_op,
    call_signature,
    check_out,
    check_reduce_op,
    gather_split,
    group_of,
    into_output,
    scatter_split,
    uneven_of,
    uneven_parts,
    world_size_of,
)
from symm_cp.ops.error_reports import reports_to_peers
from symm_cp.ops.op import (
    LEFT_TO_TORCH,
    ONE_BY_ONE,
    TORCHS,
    BackwardOp,
    Elsewhere,
    Op,
    arguments,
    declare,
    shows_types,
    untouched,
)
from symm_cp.ops.spmd import checks_types
from symm_cp.runtime import exchange
from symm_cp.tensors.shards import Split

_GATHER = "_low_contention_all_gather"
_SCATTER = "_low_contention_reduce_scatter"
_GATHER_BACKWARD = f"{_GATHER}_backward"
_SCATTER_BACKWARD = f"{_SCATTER}_backward"
_GATHER_OUT = f"{_GATHER}_out"
_SCATTER_OUT = f"{_SCATTER}_out"


def _check_gather(
    shard: torch.Tensor, sizes: Sequence[int] | None, rank: int | None, world_size: int
) -> Split:
    if shard.dim() == 0:
        raise ValueError(f"{_GATHER}: tensor must have at least 1 dimension, has none")
    return gather_split(_GATHER, "dim", 0, shard, sizes, rank, world_size)


def _check_scatter(
    tensor: torch.Tensor, reduce_op: str, sizes: Sequence[int] | None, world_size: int
) -> tuple[Split, bool]:
    if tensor.dim() == 0:
        raise ValueError(f"{_SCATTER}: tensor must have at least 1 dimension, has none")
    split = scatter_split(_SCATTER, "dim", 0, tensor.shape[0], sizes, world_size)
    return split, check_reduce_op(_SCATTER, "tensor", tensor.dtype, reduce_op)


def _all_gather(
    shard: torch.Tensor,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group = group_of(group_name, rank)
    on = runtime.background_of(shard, group)
    known = group.state(PREPARED, PreparedCalls)
    key = (_GATHER, on, shard.shape, shard.dtype, None if sizes is None else tuple(sizes))
    prepared = known.get(key)
    if prepared is None:
        split = _check_gather(shard, sizes, group.rank, group.world_size)
        name = call_signature(_GATHER, shard, split=split)
        prepared = known.keep(key, on.prepare_all_gather(group, shard, split, name))
    return prepared.start(group, shard, out)


def _reduce_scatter(
    tensor: torch.Tensor,
    reduce_op: str,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group = group_of(group_name, rank)
    on = runtime.background_of(tensor, group)
    known = group.state(PREPARED, PreparedCalls)
    key = (
        _SCATTER,
        on,
        tensor.shape,
        tensor.dtype,
        reduce_op,
        None if sizes is None else tuple(sizes),
    )
    prepared = known.get(key)
    if prepared is None:
        split, mean = _check_scatter(tensor, reduce_op, sizes, group.world_size)
        name = call_signature(_SCATTER, tensor, split=split, detail=reduce_op)
        prepared = known.keep(key, on.prepare_reduce_scatter(group, tensor, split, name, mean=mean))
    return prepared.start(group, tensor, out)


def _all_gather_out(shard: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    shape = _check_gather(shard, None, None, world_size_of(group_name)).whole_shape(shard.shape)
    check_out(_GATHER_OUT, "out", out, shape, shard.dtype)
    return _all_gather(shard, group_name, out=out)


def _reduce_scatter_out(
    tensor: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    split, _ = _check_scatter(tensor, reduce_op, None, world_size_of(group_name))
    check_out(_SCATTER_OUT, "out", out, split.shape_of(0, tensor.shape), tensor.dtype)
    return _reduce_scatter(tensor, reduce_op, group_name, out=out)


def _all_gather_fake(
    shard: torch.Tensor,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    split = _check_gather(shard, sizes, rank, world_size_of(group_name))
    return shard.new_empty(split.whole_shape(shard.shape))


def _reduce_scatter_fake(
    tensor: torch.Tensor,
    reduce_op: str,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    world_size = world_size_of(group_name)
    split, _ = _check_scatter(tensor, reduce_op, sizes, world_size)
    return tensor.new_empty(split.shape_of(rank or 0, tensor.shape))


def _gathered(*args: Any) -> torch.Tensor:
    return funcol.wait_tensor(torch.ops.symm_mem._low_contention_all_gather(*args))


def _scattered(*args: Any) -> torch.Tensor:
    return funcol.wait_tensor(torch.ops.symm_mem._low_contention_reduce_scatter(*args))


def _waited(started: torch.Tensor) -> torch.Tensor:
    with exchange.exchanged():
        return funcol.wait_tensor(started)


def _all_gather_backward(
    grad: torch.Tensor,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    uneven = uneven_of((sizes, rank))
    return _waited(call_op(_SCATTER, grad, "sum", group_name, uneven=uneven))


def _reduce_scatter_backward(
    grad: torch.Tensor,
    reduce_op: str,
    group_name: str,
    sizes: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    uneven = uneven_of((sizes, rank))
    gathered = _waited(call_op(_GATHER, grad, group_name, uneven=uneven))
    return gathered / world_size_of(group_name) if reduce_op == "avg" else gathered


def _gather_types(t: Any, tensor: Any, **rest: Any) -> Any:
    t.ignore(rest)
    return t.all_gather(tensor, 0)


def _scatter_types(t: Any, tensor: Any, reduce_op: Any, **rest: Any) -> Any:
    t.ignore(rest)
    return t.reduce_scatter(tensor, 0, reduce_op)


_GATHER_OP = Op(
    types=_gather_types,
    name=_GATHER,
    schema=TORCHS,
    kernel=_all_gather,  # csrc/ops/low_contention.cpp serves CPU tensors
    fake=_all_gather_fake,
    gradient=BackwardOp(_GATHER_BACKWARD),
    autocast=untouched,
    vmap=ONE_BY_ONE,
    complete=torch.ops._c10d_functional.wait_tensor,
    example=lambda on: arguments(on.rand(4, 6), on.group_name),
    native=True,
    replaces_torch=True,
)
_SCATTER_OP = replace(
    _GATHER_OP,
    types=_scatter_types,
    name=_SCATTER,
    kernel=_reduce_scatter,
    fake=_reduce_scatter_fake,  # torch's fake kernel averages, which fails for integers
    gradient=BackwardOp(_SCATTER_BACKWARD),
    example=lambda on: arguments(on.rand(4 * on.world_size, 6), "sum", on.group_name),
)


def _into_out(op: Op, name: str, schema: str, **parts: Any) -> Op:
    """Returns the op that writes to given memory, in which the shard may already be in place."""
    return replace(
        op,
        name=name,
        schema=schema,
        gradient=Elsewhere("csrc/ops/gradients.cpp refuses", differentiable=False),
        vmap=LEFT_TO_TORCH,
        replaces_torch=False,
        **parts,
    )


declare(
    _GATHER_OP,
    _SCATTER_OP,
    Op.backward(
        _GATHER_BACKWARD,
        f"(Tensor grad, str group_name, {SIZES}) -> Tensor tensor",
        _all_gather_backward,
        lambda on: arguments(on.rand(4 * on.world_size, 6), on.group_name),
    ),
    Op.backward(
        _SCATTER_BACKWARD,
        f"(Tensor grad, str reduce_op, str group_name, {SIZES}) -> Tensor tensor",
        _reduce_scatter_backward,
        lambda on: arguments(on.rand(4, 6), "avg", on.group_name),
    ),
    _GATHER_OP.with_sizes(
        WITH_SIZES[_GATHER],
        f"(Tensor tensor, str group_name, {SIZES}) -> Tensor",
        lambda on: arguments(on.rand(on.rows, 6), on.group_name, *on.uneven),
    ),
    _SCATTER_OP.with_sizes(
        WITH_SIZES[_SCATTER],
        f"(Tensor tensor, str reduce_op, str group_name, {SIZES}) -> Tensor",
        lambda on: arguments(on.rand(sum(on.sizes), 6), "avg", on.group_name, *on.uneven),
    ),
    _into_out(
        _GATHER_OP,
        _GATHER_OUT,
        "(Tensor tensor, str group_name, Tensor(a!) out) -> Tensor(a!)",
        kernel=_all_gather_out,
        **into_output(_GATHER_OUT, "out", _all_gather_fake, _gathered),
        example=lambda on: arguments(
            on.rand(4, 6), on.group_name, torch.empty(4 * on.world_size, 6)
        ),
    ),
    _into_out(
        _SCATTER_OP,
        _SCATTER_OUT,
        "(Tensor tensor, str reduce_op, str group_name, Tensor(a!) out) -> Tensor(a!)",
        kernel=_reduce_scatter_out,
        **into_output(_SCATTER_OUT, "out", _reduce_scatter_fake, _scattered),
        example=lambda on: arguments(
            on.rand(4 * on.world_size, 6), "sum", on.group_name, torch.empty(4, 6)
        ),
    ),
)


# These functions report their errors to the peers. Code after them must not: it makes no call.
@partial(reports_to_peers, channel="async", op=_GATHER, words={_GATHER: _GATHER[1:]})
def _start_gather(
    shard: torch.Tensor, group: GroupLike, sizes: Sequence[int] | None
) -> torch.Tensor:
    name = group_name(group)
    gathered: torch.Tensor = call_op(_GATHER, shard, name, uneven=uneven_parts(sizes, name))
    return gathered


@partial(reports_to_peers, channel="async", op=_SCATTER, words={_SCATTER: _SCATTER[1:]})
def _start_scatter(
    tensor: torch.Tensor, reduce_op: str, group: GroupLike, sizes: Sequence[int] | None
) -> torch.Tensor:
    name = group_name(group)
    uneven = uneven_parts(sizes, name)
    scattered: torch.Tensor = call_op(_SCATTER, tensor, reduce_op, name, uneven=uneven)
    return scattered


def _waiting(started: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that waits at its first use; one with types has been waited for."""
    return started if checks_types() else funcol._maybe_wrap_tensor(started)


@shows_types(_GATHER, {"tensor": "shard"})
def low_contention_all_gather(
    shard: torch.Tensor, *, group: GroupLike, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """All-gathers along the first dimension in the background.

    Same result as::

        all_gather_tensor(shard, 0, group)

    Args:
        shard: (M, ...), any dtype.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        sizes: the length M of every rank's shard; by default all are as this rank's.

    Returns a tensor of shape (sum of all M, ...) that, like results of torch's functional
    collectives, waits for the transfer when it is first used. Differentiable. A contiguous shard in
    symmetric memory that was rendezvoused with the group is read in place: do not write to it until
    then, and pass such a shard on all ranks or on none. Raises `ValueError` for a 0-D shard or
    sizes that do not fit, `RuntimeError` when a peer fails or disagrees. Source: torch's
    `symm_mem::_low_contention_all_gather`.
    """
    return _waiting(_start_gather(shard, group, sizes))


@shows_types(_SCATTER)
def low_contention_reduce_scatter(
    tensor: torch.Tensor,
    *,
    reduce_op: str = "sum",
    group: GroupLike,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reduce-scatters along the first dimension in the background.

    Same result as::

        reduce_scatter_tensor(tensor, reduce_op, 0, group)

    Args:
        tensor: (sum of all M, ...), equal shapes on all ranks; integers for "sum" only.
        reduce_op: "sum" or "avg"; added in rank order, in float32 for 16-bit types.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        sizes: the length M of every rank's part; by default all are equal, and the length must be
            divisible by W.

    Returns a tensor of shape (M, ...) that waits when it is first used. Differentiable. Memory and
    errors as for `low_contention_all_gather`; `TypeError` for a dtype that cannot be reduced.
    Source: torch's `symm_mem::_low_contention_reduce_scatter`.
    """
    return _waiting(_start_scatter(tensor, reduce_op, group, sizes))
