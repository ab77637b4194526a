"""Collectives on symmetric memory: low-contention (asynchronous) and immediate ones.

The low-contention ops return at once; a copy engine - a background thread - moves the bytes, and
`torch.ops._c10d_functional.wait_tensor` waits. The caller may overwrite a plain input as soon as
the call has returned, a symmetric one (which peers read in place) after the wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._C._distributed_c10d import _register_work

from symm_cp import native
from symm_cp.memory import Group, GroupLike, Workspace, group_name, is_symmetric, resolve
from symm_cp.ops.common import (
    check_divisible,
    check_reduce_op,
    group_of,
    in_test_mode,
    lib,
    unfused_all_gather,
    unfused_reduce_scatter,
    what_is,
    world_size_of,
)
from symm_cp.runtime.cpu import REDUCIBLE, run_collective
from symm_cp.runtime.program import Extent, Program, Reduction, lower
from symm_cp.schedule import builders

_GATHER = "_low_contention_all_gather"
_SCATTER = "_low_contention_reduce_scatter"
# Below this many bytes waking the engine costs more than the transfer, which then waits for
# `wait_tensor`, or for the next transfer that wakes the engine.
_WAKE_BYTES = 64 * 1024


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers are summed as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# --- asynchronous ----------------------------------------------------------------------------


class _Transfer(torch.distributed.distributed_c10d.Work):
    """Work on a copy engine; holds what the transfer reads and writes until it was waited for."""

    def __init__(self, group: Group, workspace: Workspace, ticket: int, held: tuple[Any, ...]):
        super().__init__()
        self._group, self._workspace, self._ticket, self._held = group, workspace, ticket, held

    def wait(self, timeout: Any = None) -> bool:
        """Returns when the transfer is complete; raises `RuntimeError` when it failed."""
        if native.load().symm_cp_lane_wait(self._workspace.handle, self._ticket) < 0:
            message = native.error()
            self._group.discard("async", self._workspace)
            raise RuntimeError(message)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        """Tells whether the transfer is complete, without waiting."""
        library = native.load()
        return bool(library.symm_cp_lane_finished(self._workspace.handle, self._ticket))


@lru_cache(maxsize=512)
def _gather_programs(
    rank: int, world_size: int, nbytes: int, in_place: bool
) -> tuple[Program, Program, Program]:
    schedule = builders.all_gather(rank, world_size, in_place=in_place)
    shard = (Extent.even(0, nbytes),)
    slot = (Extent.even(None, nbytes),)
    output = (Extent.even(1, nbytes, world_size),)
    whole = lower(schedule, {"input": shard, "symmetric": shard, "slot": slot, "output": output})
    return (whole, *whole.split())


@lru_cache(maxsize=512)
def _scatter_programs(
    rank: int, world_size: int, nbytes: int, in_place: bool, dtype: int, mean: bool
) -> tuple[Program, Program, Program]:
    schedule = builders.reduce_scatter(rank, world_size, in_place=in_place)
    chunk = nbytes // world_size
    full = (Extent.even(0, chunk, world_size),)
    slot = (Extent.even(None, chunk, world_size),)
    output = (Extent.even(1, chunk),)
    binding = {"input": full, "symmetric": full, "slot": slot, "output": output}
    whole = lower(schedule, binding, reduction=Reduction(dtype, mean))
    return (whole, *whole.split())


def _start(
    group: Group,
    programs: tuple[Program, Program, Program],
    tensor: torch.Tensor,
    output: torch.Tensor,
    in_place: bool,
    what: bytes,
) -> None:
    """Starts a transfer and registers its work with `output`.

    When the engine is idle, the caller publishes its input itself: the slot is free then, and the
    peers can begin. Otherwise the input is copied aside and all is left to the engine.
    """
    whole, publish, rest = programs
    with group.lock:
        workspace = group.workspace("async", 0 if in_place else _nbytes(tensor))
        epoch = workspace.next_epoch()
        try:
            if native.load().symm_cp_lane_idle(workspace.handle):
                operands = [tensor.data_ptr(), output.data_ptr()]
                publish.run(workspace, epoch, operands, what)
                program = rest
            else:
                program = whole
                tensor = tensor if in_place else tensor.clone()
                operands = [tensor.data_ptr(), output.data_ptr()]
            background = program is whole or _nbytes(output) > _WAKE_BYTES
            ticket = program.submit(workspace, epoch, operands, what, background)
        except RuntimeError:
            group.discard("async", workspace)
            raise
    # The registry keeps the work until `wait_tensor`; it must not keep its own key alive.
    held = (tensor, output.untyped_storage(), program)
    _register_work(output, _Transfer(group, workspace, ticket, held))


def _low_contention_all_gather_cpu(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    group = group_of(group_name)
    if tensor.dim() == 0:
        raise ValueError(f"{_GATHER}: tensor must have at least 1 dimension, has none")
    if in_test_mode():
        return unfused_all_gather(tensor, 0, group_name)
    output = tensor.new_empty((tensor.shape[0] * group.world_size, *tensor.shape[1:]))
    in_place = tensor.is_contiguous() and is_symmetric(tensor, group)
    shard = tensor.contiguous()
    programs = _gather_programs(group.rank, group.world_size, _nbytes(shard), in_place)
    _start(group, programs, shard, output, in_place, what_is(_GATHER, tensor))
    return output


def _check_scatter(op: str, tensor: torch.Tensor, reduce_op: str, world_size: int) -> bool:
    if tensor.dim() == 0:
        raise ValueError(f"{op}: tensor must have at least 1 dimension, has none")
    check_divisible(op, "dim", 0, tensor.shape[0], world_size)
    return check_reduce_op(op, reduce_op, tensor.dtype)


def _low_contention_reduce_scatter_cpu(
    tensor: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    group = group_of(group_name)
    mean = _check_scatter(_SCATTER, tensor, reduce_op, group.world_size)
    if in_test_mode():
        return unfused_reduce_scatter(tensor, reduce_op, 0, group_name)
    output = tensor.new_empty((tensor.shape[0] // group.world_size, *tensor.shape[1:]))
    in_place = tensor.is_contiguous() and is_symmetric(tensor, group)
    full = tensor.contiguous()
    dtype = REDUCIBLE[_real(tensor).dtype]
    programs = _scatter_programs(
        group.rank, group.world_size, _nbytes(full), in_place, dtype, mean
    )
    _start(group, programs, full, output, in_place, what_is(_SCATTER, tensor, detail=reduce_op))
    return output


def _low_contention_all_gather_fake(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return tensor.new_empty((tensor.shape[0] * world_size_of(group_name), *tensor.shape[1:]))


def _low_contention_reduce_scatter_fake(
    tensor: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    world_size = world_size_of(group_name)
    _check_scatter(_SCATTER, tensor, reduce_op, world_size)
    return tensor.new_empty((tensor.shape[0] // world_size, *tensor.shape[1:]))


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group_name = inputs


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    scattered = torch.ops.symm_mem._low_contention_reduce_scatter(grad, "sum", ctx.group_name)
    return torch.ops._c10d_functional.wait_tensor(scattered), None


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.reduce_op, ctx.group_name = inputs


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    gathered = torch.ops.symm_mem._low_contention_all_gather(grad, ctx.group_name)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    if ctx.reduce_op == "avg":
        gathered = gathered / world_size_of(ctx.group_name)
    return gathered, None, None


# --- immediate -------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _all_reduce_program(
    rank: int, world_size: int, nbytes: int, in_place: bool, dtype: int, mean: bool
) -> Program:
    schedule = builders.one_shot_all_reduce(rank, world_size, in_place=in_place)
    given, output = (Extent.even(0, nbytes),), (Extent.even(1, nbytes),)
    binding = {
        "input": given,
        "symmetric": given,
        "slot": (Extent.even(None, nbytes),),
        "output": output,
    }
    return lower(schedule, binding, reduction=Reduction(dtype, mean))


@lru_cache(maxsize=512)
def _two_shot_program(
    rank: int, world_size: int, elements: int, itemsize: int, dtype: int, mean: bool
) -> tuple[Program, int]:
    chunk = -(-elements // world_size)
    sizes = [max(0, min(chunk, elements - r * chunk)) for r in range(world_size)]
    starts = [min(r * chunk, elements) * itemsize for r in range(world_size)]
    nbytes = tuple(size * itemsize for size in sizes)
    binding = {"symmetric": (Extent(0, tuple(starts), nbytes),)}
    # The slot of rank r holds its chunk; chunks at the end may be shorter.
    slots = {r: (Extent.even(None, nbytes[r]),) for r in range(world_size)}
    schedule = builders.two_shot_all_reduce(rank, world_size)
    program = lower(schedule, binding, reduction=Reduction(dtype, mean), slots=slots)
    return program, chunk * itemsize


def _check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous, has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}"
        )


def _one_shot_all_reduce_out_cpu(
    input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    op = "one_shot_all_reduce"
    group = group_of(group_name)
    mean = check_reduce_op(op, reduce_op, input.dtype)
    if out.shape != input.shape or out.dtype != input.dtype:
        raise ValueError(
            f"{op}: out is {out.dtype} {list(out.shape)}, needs {input.dtype} {list(input.shape)}"
        )
    _check_dense(op, "out", out)
    in_place = input.is_contiguous() and is_symmetric(input, group)
    given = input.contiguous()
    nbytes = _nbytes(given)
    dtype = REDUCIBLE[_real(given).dtype]
    program = _all_reduce_program(group.rank, group.world_size, nbytes, in_place, dtype, mean)
    run_collective(
        group,
        program,
        0 if in_place else nbytes,
        [given.data_ptr(), out.data_ptr()],
        what_is(op, input, detail=reduce_op),
    )
    return out


def _one_shot_all_reduce_cpu(
    input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    return _one_shot_all_reduce_out_cpu(input, reduce_op, group_name, out)


def _two_shot_all_reduce_cpu(
    input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    op = "two_shot_all_reduce_"
    group = group_of(group_name)
    mean = check_reduce_op(op, reduce_op, input.dtype)
    if not (input.is_contiguous() and is_symmetric(input, group)):
        # Nothing that peers could reach: go by way of the workspace.
        return input.copy_(_one_shot_all_reduce_cpu(input, reduce_op, group_name))
    real = _real(input)
    program, slot_bytes = _two_shot_program(
        group.rank, group.world_size, real.numel(), real.element_size(),
        REDUCIBLE[real.dtype], mean,
    )  # fmt: skip
    what = what_is(op, input, detail=reduce_op)
    run_collective(group, program, slot_bytes, [input.data_ptr()], what)
    return input


@lru_cache(maxsize=512)
def _scatter_out_program(
    rank: int, world_size: int, rows: int, row_bytes: int, in_place: bool, dtype: int
) -> Program:
    """Reduce-scatter of column blocks of `rows` rows (one row: of consecutive chunks)."""
    schedule = builders.reduce_scatter(rank, world_size, in_place=in_place)
    part = row_bytes // world_size
    offsets = tuple(r * part for r in range(world_size))
    sizes = (part,) * world_size
    chunks = Extent(0, offsets, sizes, rows, row_bytes)
    binding = {
        "input": (chunks,),
        "symmetric": (chunks,),
        "slot": (Extent(None, offsets, sizes, rows, row_bytes),),
        "output": (Extent(1, (0,), (part * rows,)),),
    }
    return lower(schedule, binding, reduction=Reduction(dtype, False))


def _reduce_scatter_out_cpu(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    op = "reduce_scatter_out"
    group = group_of(group_name)
    if input.dim() == 0:
        raise ValueError(f"{op}: input must have at least 1 dimension, has none")
    dim = input.dim() - 1 if split_last_dim else 0
    check_divisible(op, "dim", dim, input.shape[dim], group.world_size)
    check_reduce_op(op, "sum", input.dtype)
    shape = list(input.shape)
    shape[dim] //= group.world_size
    if list(output.shape) != shape or output.dtype != input.dtype:
        raise ValueError(
            f"{op}: output is {output.dtype} {list(output.shape)}, needs {input.dtype} {shape}"
        )
    _check_dense(op, "output", output)
    in_place = input.is_contiguous() and is_symmetric(input, group)
    given = input.contiguous()
    rows = given.shape[:-1].numel() if split_last_dim else 1
    nbytes = _nbytes(given)
    program = _scatter_out_program(
        group.rank, group.world_size, max(rows, 1), nbytes // max(rows, 1), in_place,
        REDUCIBLE[_real(given).dtype],
    )  # fmt: skip
    what = what_is(op, input, detail=f"split_last_dim={split_last_dim}")
    operands = [given.data_ptr(), output.data_ptr()]
    run_collective(group, program, 0 if in_place else nbytes, operands, what)
    return output


def _get_remote_tensors_cpu(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    op = "get_remote_tensors"
    _check_dense(op, "x", x)
    group = group_of(group_name)
    if not torch_symm_mem.is_symm_mem_tensor(x):
        raise ValueError(f"{op}: x is not in symmetric memory: allocate it with symm_mem.empty()")
    handle = torch_symm_mem.rendezvous(x, group.name)
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(group.world_size)]


# --- registration ----------------------------------------------------------------------------

_KERNELS: dict[str, Any] = {
    _GATHER: _low_contention_all_gather_cpu,
    _SCATTER: _low_contention_reduce_scatter_cpu,
    "one_shot_all_reduce": _one_shot_all_reduce_cpu,
    "one_shot_all_reduce_out": _one_shot_all_reduce_out_cpu,
    "two_shot_all_reduce_": _two_shot_all_reduce_cpu,
    "reduce_scatter_out": _reduce_scatter_out_cpu,
    "get_remote_tensors": _get_remote_tensors_cpu,
}


def _one_shot_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # Every rank's output depends on every rank's input alike.
    reduced = torch.ops.symm_mem.one_shot_all_reduce(grad, ctx.reduce_op, ctx.group_name)
    return reduced, None, None


def register() -> None:
    """Adds the CPU kernels, gradients where the op is functional, and fake kernels."""
    for name, kernel in _KERNELS.items():
        lib.impl(name, kernel, "CPU")
    lib.impl(_SCATTER, _low_contention_reduce_scatter_fake, "Meta", allow_override=True)
    lib.impl("two_shot_all_reduce_", lambda input, reduce_op, group_name: input, "Meta")
    lib.impl("one_shot_all_reduce_out", lambda input, op, group_name, out: out, "Meta")
    lib.impl("reduce_scatter_out", lambda input, group_name, split, output: output, "Meta")
    for name, backward, setup in (
        (_GATHER, _gather_backward, _gather_setup),
        (_SCATTER, _scatter_backward, _scatter_setup),
        ("one_shot_all_reduce", _one_shot_backward, _scatter_setup),
    ):
        torch.library.register_autograd(
            f"symm_mem::{name}", backward, setup_context=setup, lib=lib
        )


# --- entry points ----------------------------------------------------------------------------


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


__all__ = ["low_contention_all_gather", "low_contention_reduce_scatter", "register", "resolve"]
