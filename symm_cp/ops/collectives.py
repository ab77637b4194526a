"""Collectives on symmetric memory that are complete when they return.

torch's ops of these names take inputs in symmetric memory only; here a plain input goes
through the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from symm_cp import runtime
from symm_cp.hosts import hosts_of, no_common_memory
from symm_cp.memory import is_symmetric, resolve
from symm_cp.ops.common import (
    PLANS,
    Plans,
    check_reduce_op,
    lib,
    register_kernel,
    scatter_split,
    what_is,
    world_size_of,
)
from symm_cp.ops.compiled import no_fake_remote_tensors, teach_inductor
from symm_cp.ops.transforms import register_gradient, register_no_gradient
from symm_cp.results import new_result
from symm_cp.shards import Split

_ALL_REDUCE = "one_shot_all_reduce"
_TWO_SHOT = "two_shot_all_reduce_"
_SCATTER_OUT = "reduce_scatter_out"

# For the compiler.
lib.define("_one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor")
lib.define("_reduce_scatter(Tensor input, str group_name, bool split_last_dim) -> Tensor")


def _check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous, has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}"
        )


def _check_out(op: str, name: str, out: torch.Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {list(out.shape)}, needs {dtype} {shape}")
    _check_dense(op, name, out)


def _all_reduce(
    op: str, input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    """In one exchange, by the name of the op that was called."""
    group = resolve(group_name)
    _check_out(op, "out", out, list(input.shape), input.dtype)
    on = runtime.of(input, group)
    plans = group.state(PLANS, Plans)
    key = (op, "one shot", on, input.shape, input.dtype, reduce_op)
    plan = plans.get(key)
    if plan is None:
        mean = check_reduce_op(op, "input", input.dtype, reduce_op)
        name = what_is(op, input, detail=reduce_op)
        plan = plans.keep(key, on.prepare_all_reduce(group, input, name, mean=mean))
    plan.run(group, input, out)
    return out


def _one_shot_all_reduce_out_cpu(
    input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    return _all_reduce(_ALL_REDUCE, input, reduce_op, group_name, out)


def _one_shot_all_reduce_cpu(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    out = new_result(input, input.shape)
    return _all_reduce(_ALL_REDUCE, input, reduce_op, group_name, out)


def _two_shot_all_reduce_cpu(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    group = resolve(group_name)
    if not (input.is_contiguous() and is_symmetric(input, group)):
        # Nothing that peers could reach: go through the workspace.
        out = new_result(input, input.shape)
        return input.copy_(_all_reduce(_TWO_SHOT, input, reduce_op, group_name, out))
    on = runtime.of(input, group)
    plans = group.state(PLANS, Plans)
    key = (_TWO_SHOT, on, input.shape, input.dtype, reduce_op)
    plan = plans.get(key)
    if plan is None:
        mean = check_reduce_op(_TWO_SHOT, "input", input.dtype, reduce_op)
        name = what_is(_TWO_SHOT, input, detail=reduce_op)
        plan = plans.keep(key, on.prepare_all_reduce_in_place(group, input, name, mean=mean))
    plan.run(group, input, input)
    return input


def _scattered(input: torch.Tensor, split_last_dim: bool, world_size: int) -> Split:
    """How `reduce_scatter_out` divides its input."""
    if input.dim() == 0:
        raise ValueError(f"{_SCATTER_OUT}: input must have at least 1 dimension, has none")
    dim = input.dim() - 1 if split_last_dim else 0
    check_reduce_op(_SCATTER_OUT, "input", input.dtype)
    length = input.shape[dim]
    return scatter_split(_SCATTER_OUT, "dim", dim, length, None, world_size, any_sizes=False)


def _scattered_shape(input: torch.Tensor, split_last_dim: bool, group_name: str) -> list[int]:
    split = _scattered(input, split_last_dim, world_size_of(group_name))
    return split.shape_of(0, input.shape)


def _reduce_scatter_out_cpu(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    group = resolve(group_name)
    on = runtime.of(input, group)
    plans = group.state(PLANS, Plans)
    key = (_SCATTER_OUT, on, input.shape, input.dtype, split_last_dim)
    plan = plans.get(key)
    if plan is None:
        split = _scattered(input, split_last_dim, group.world_size)
        name = what_is(_SCATTER_OUT, input, detail=f"split_last_dim={split_last_dim}")
        plan = plans.keep(key, on.prepare_reduce_scatter_into(group, input, split, name))
    _check_out(_SCATTER_OUT, "output", output, list(plan.output_shape), input.dtype)
    plan.run(group, input, output)
    return output


def _reduce_scatter(input: torch.Tensor, group_name: str, split_last_dim: bool) -> torch.Tensor:
    shape = _scattered_shape(input, split_last_dim, group_name)
    output = new_result(input, shape)
    torch.ops.symm_mem.reduce_scatter_out(input, group_name, split_last_dim, output)
    return output


def _get_remote_tensors_cpu(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    op = "get_remote_tensors"
    _check_dense(op, "x", x)
    group = resolve(group_name)
    if hosts_of(group, x.device) is not None:
        raise no_common_memory(op, group, x.device)
    handle = torch_symm_mem.rendezvous(x, group.name)
    if handle is None:
        raise ValueError(f"{op}: x is not in symmetric memory: allocate it with symm_mem.empty()")
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(group.world_size)]


_KERNELS: dict[str, Any] = {
    _ALL_REDUCE: _one_shot_all_reduce_cpu,
    "one_shot_all_reduce_out": _one_shot_all_reduce_out_cpu,
    _TWO_SHOT: _two_shot_all_reduce_cpu,
    _SCATTER_OUT: _reduce_scatter_out_cpu,
    "get_remote_tensors": _get_remote_tensors_cpu,
    "_one_shot_all_reduce": _one_shot_all_reduce_cpu,
}


def _check_fake(op: str, input: torch.Tensor, reduce_op: str, group_name: str) -> None:
    world_size_of(group_name)  # there is such a group
    check_reduce_op(op, "input", input.dtype, reduce_op)


def _one_shot_all_reduce_fake(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    _check_fake(_ALL_REDUCE, input, reduce_op, group_name)
    teach_inductor()
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _one_shot_all_reduce_out_fake(
    input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    _check_fake(_ALL_REDUCE, input, reduce_op, group_name)
    _check_out(_ALL_REDUCE, "out", out, list(input.shape), input.dtype)
    return out


def _two_shot_all_reduce_fake(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    _check_fake(_TWO_SHOT, input, reduce_op, group_name)
    return input


def _reduce_scatter_out_fake(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    shape = _scattered_shape(input, split_last_dim, group_name)
    _check_out(_SCATTER_OUT, "output", output, shape, input.dtype)
    return output


def _reduce_scatter_fake(
    input: torch.Tensor, group_name: str, split_last_dim: bool
) -> torch.Tensor:
    return input.new_empty(_scattered_shape(input, split_last_dim, group_name))


_FAKES = {
    _ALL_REDUCE: _one_shot_all_reduce_fake,
    "one_shot_all_reduce_out": _one_shot_all_reduce_out_fake,
    _TWO_SHOT: _two_shot_all_reduce_fake,
    _SCATTER_OUT: _reduce_scatter_out_fake,
    "_one_shot_all_reduce": _one_shot_all_reduce_fake,
    "_reduce_scatter": _reduce_scatter_fake,
}


# The compiler refuses ops whose result is an argument; it takes them as ones that return a new
# tensor, and a copy.


def _two_shot_functional(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return input.copy_(torch.ops.symm_mem.one_shot_all_reduce(input, reduce_op, group_name))


def _one_shot_out_functional(
    input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    _check_out(_ALL_REDUCE, "out", out, list(input.shape), input.dtype)
    return out.copy_(torch.ops.symm_mem.one_shot_all_reduce(input, reduce_op, group_name))


def _reduce_scatter_out_functional(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    shape = _scattered_shape(input, split_last_dim, group_name)
    _check_out(_SCATTER_OUT, "output", output, shape, input.dtype)
    scattered = torch.ops.symm_mem._reduce_scatter(input, group_name, split_last_dim)
    return output.copy_(scattered)


_FUNCTIONAL = {
    _TWO_SHOT: _two_shot_functional,
    "one_shot_all_reduce_out": _one_shot_out_functional,
    _SCATTER_OUT: _reduce_scatter_out_functional,
}


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.reduce_op, ctx.group_name = inputs


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # Every rank's output depends on every rank's input alike.
    reduced = torch.ops.symm_mem.one_shot_all_reduce(grad, ctx.reduce_op, ctx.group_name)
    return reduced, None, None


def register() -> None:
    """Adds the CPU kernels, gradients, and what fake tensors and the compiler need."""
    for name, kernel in _KERNELS.items():
        lib.impl(name, kernel, "CPU")
    register_kernel("_reduce_scatter", _reduce_scatter)
    for name, fake in _FAKES.items():
        lib.impl(name, fake, "Meta")
    lib.impl("get_remote_tensors", no_fake_remote_tensors, "Meta", allow_override=True)
    for name, functional in _FUNCTIONAL.items():
        lib.impl(name, functional, "Functionalize")
    register_gradient(_ALL_REDUCE, _all_reduce_backward, _all_reduce_setup)
    register_no_gradient("get_remote_tensors", "tensors of other ranks are no function of x")
