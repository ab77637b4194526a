"""Collectives that are complete when they return; their kernels are in csrc/ops/collectives.cpp.

torch's ops of these names take inputs in symmetric memory only; here a plain input goes
through the workspace. The ops that torch gives a `symm_buffer` for that only check it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._subclasses.functional_tensor import CppFunctionalizeAPI

from symm_cp.cuda import has_streams
from symm_cp.group.hosts import hosts_of, no_common_memory
from symm_cp.group.memory import resolve
from symm_cp.ops.common import (
    check_dense,
    check_out,
    check_reduce_op,
    scatter_split,
    world_size_of,
)
from symm_cp.ops.compiled import no_fake_remote_tensors
from symm_cp.ops.matmul.all_reduce import unfused_all_reduce
from symm_cp.ops.op import (
    LEFT_TO_TORCH,
    NATIVE_GRADIENT,
    ONE_BY_ONE,
    TORCHS,
    Arguments,
    Caller,
    Elsewhere,
    Kernel,
    NoGradient,
    Op,
    arguments,
    declare,
    declared_op,
    untouched,
)
from symm_cp.tensors.shards import Split

_ALL_REDUCE = "one_shot_all_reduce"
_ALL_REDUCE_COPY = "one_shot_all_reduce_copy"
_TWO_SHOT = "two_shot_all_reduce_"
_TWO_SHOT_OUT = "two_shot_all_reduce_out"
_SCATTER_OUT = "reduce_scatter_out"

_NO_GRADIENT = Elsewhere("csrc/ops/gradients.cpp refuses", differentiable=False)


def _refusing(op: str) -> Kernel:
    """Returns the kernel for CPU tensors that the native one cannot serve: it raises."""

    def refuses(*args: Any) -> Any:
        names = [arg.name for arg in declared_op(op).overload._schema.arguments]
        tensor, group_name = args[0], args[names.index("group_name")]
        if has_streams(tensor.device):
            raise NotImplementedError(
                f"{op}: symm_cp has no kernel on this device: torch's own is used there"
            )
        raise no_common_memory(op, resolve(group_name), tensor.device)

    return refuses


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


def _get_remote_tensors_cpu(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    op = "get_remote_tensors"
    check_dense(op, "x", x)
    group = resolve(group_name)
    if hosts_of(group, x.device) is not None:
        raise no_common_memory(op, group, x.device)
    handle = torch_symm_mem.rendezvous(x, group.name)
    if handle is None:
        raise ValueError(f"{op}: x is not in symmetric memory: allocate it with symm_mem.empty()")
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(group.world_size)]


def _check_fake(op: str, input: torch.Tensor, reduce_op: str, group_name: str) -> None:
    world_size_of(group_name)  # there is such a group
    check_reduce_op(op, "input", input.dtype, reduce_op)


def _one_shot_all_reduce_fake(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    _check_fake(_ALL_REDUCE, input, reduce_op, group_name)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _all_reduce_out_fake(op: str) -> Kernel:
    def fake(
        input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        _check_fake(op, input, reduce_op, group_name)
        check_out(op, "out", out, list(input.shape), input.dtype)
        return out

    return fake


def _check_buffer(buffer: torch.Tensor, input: torch.Tensor) -> None:
    check_dense(_ALL_REDUCE_COPY, "symm_buffer", buffer)
    if buffer.dtype != input.dtype or buffer.numel() < input.numel():
        raise ValueError(
            f"{_ALL_REDUCE_COPY}: symm_buffer is {buffer.dtype} {list(buffer.shape)}, needs "
            f"{input.dtype} and room for local_input of shape {list(input.shape)}"
        )


def _copy_fake(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    _check_buffer(symm_buffer, local_input)
    _check_fake(_ALL_REDUCE_COPY, local_input, reduce_op, group_name)
    return torch.empty_like(local_input, memory_format=torch.contiguous_format)


def _copy_out_fake(
    symm_buffer: torch.Tensor,
    local_input: torch.Tensor,
    reduce_op: str,
    group_name: str,
    out: torch.Tensor,
) -> torch.Tensor:
    _check_buffer(symm_buffer, local_input)
    _check_fake(_ALL_REDUCE_COPY, local_input, reduce_op, group_name)
    check_out(_ALL_REDUCE_COPY, "out", out, list(local_input.shape), local_input.dtype)
    return out


def _two_shot_all_reduce_fake(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    _check_fake(_TWO_SHOT, input, reduce_op, group_name)
    return input


def _reduce_scatter_out_fake(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    shape = _scattered_shape(input, split_last_dim, group_name)
    check_out(_SCATTER_OUT, "output", output, shape, input.dtype)
    return output


def _reduce_scatter_fake(
    input: torch.Tensor, group_name: str, split_last_dim: bool
) -> torch.Tensor:
    return input.new_empty(_scattered_shape(input, split_last_dim, group_name))


# The compiler refuses ops whose result is an argument; it takes them as ones that return a new
# tensor, and a copy. On CPU a `symm_buffer` is left out: the compiler would allocate it itself in
# symmetric memory, which torch cannot do for CPU tensors. On other devices torch's kernel needs it.


def _two_shot_functional(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return input.copy_(torch.ops.symm_mem.one_shot_all_reduce(input, reduce_op, group_name))


def _all_reduce_out_functional(op: str) -> Kernel:
    def functional(
        input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        check_out(op, "out", out, list(input.shape), input.dtype)
        return out.copy_(torch.ops.symm_mem.one_shot_all_reduce(input, reduce_op, group_name))

    return functional


def _copy_functional(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    _check_buffer(symm_buffer, local_input)
    if local_input.device.type == "cpu":
        return torch.ops.symm_mem.one_shot_all_reduce(local_input, reduce_op, group_name)
    functionalize = CppFunctionalizeAPI()
    tensors: Any = functionalize.unwrap_tensors((symm_buffer, local_input))
    with functionalize.redispatch_to_next():
        total = torch.ops.symm_mem.one_shot_all_reduce_copy(*tensors, reduce_op, group_name)
    wrapped: Any = functionalize.wrap_tensors(total)
    return wrapped


def _copy_out_functional(
    symm_buffer: torch.Tensor,
    local_input: torch.Tensor,
    reduce_op: str,
    group_name: str,
    out: torch.Tensor,
) -> torch.Tensor:
    check_out(_ALL_REDUCE_COPY, "out", out, list(local_input.shape), local_input.dtype)
    return out.copy_(_copy_functional(symm_buffer, local_input, reduce_op, group_name))


def _reduce_scatter_out_functional(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    if input.device.type != "cpu":
        raise NotImplementedError(
            f"{_SCATTER_OUT}: torch.compile of it is supported on CPU only, not on {input.device}"
        )
    shape = _scattered_shape(input, split_last_dim, group_name)
    check_out(_SCATTER_OUT, "output", output, shape, input.dtype)
    scattered = torch.ops.symm_mem._reduce_scatter(input, group_name, split_last_dim)
    return output.copy_(scattered)


def _native(
    name: str,
    fake: Kernel,
    example: Callable[[Caller], Arguments],
    functional: Kernel | None = None,
    **parts: Any,
) -> Op:
    """An op whose kernel is in csrc/ops/collectives.cpp."""
    parts = {
        "schema": TORCHS,
        "kernel": _refusing(name),
        "gradient": _NO_GRADIENT,
        "vmap": LEFT_TO_TORCH,
        "native": True,
        **parts,
    }
    return Op(
        name=name,
        fake=fake,
        example=example,
        functional=functional,
        autocast=untouched,
        cpu_only=True,
        **parts,
    )


def _summed(on: Caller) -> Arguments:
    return arguments(on.rand(4, 6), "sum", on.group_name)


def _summed_to(on: Caller) -> Arguments:
    return arguments(on.rand(4, 6), "sum", on.group_name, torch.empty(4, 6))


def _copied(on: Caller, *out: torch.Tensor) -> Arguments:
    return arguments(on.rand(4, 6), on.rand(4, 6), "sum", on.group_name, *out)


def _scattered_example(on: Caller, *out: torch.Tensor) -> Arguments:
    return arguments(on.rand(4 * on.world_size, 6), on.group_name, False, *out)


def _remote_example(on: Caller) -> Arguments:
    return arguments(torch_symm_mem.empty(4, 6, device="cpu").copy_(on.rand(4, 6)), on.group_name)


_DIFFERENTIABLE = {"gradient": NATIVE_GRADIENT, "vmap": ONE_BY_ONE}
_FOR_COMPILER = {
    "gradient": Elsewhere("graphs are differentiated before they call it", differentiable=False),
    "internal": True,
}

declare(
    _native(_ALL_REDUCE, _one_shot_all_reduce_fake, _summed, **_DIFFERENTIABLE),
    _native(
        f"{_ALL_REDUCE}_out",
        _all_reduce_out_fake(_ALL_REDUCE),
        _summed_to,
        _all_reduce_out_functional(_ALL_REDUCE),
    ),
    _native(_ALL_REDUCE_COPY, _copy_fake, _copied, _copy_functional, **_DIFFERENTIABLE),
    _native(
        f"{_ALL_REDUCE_COPY}_out",
        _copy_out_fake,
        lambda on: _copied(on, torch.empty(4, 6)),
        _copy_out_functional,
    ),
    _native(
        _TWO_SHOT, _two_shot_all_reduce_fake, _summed, _two_shot_functional,
        gradient=NATIVE_GRADIENT,
    ),
    _native(
        _TWO_SHOT_OUT,
        _all_reduce_out_fake(_TWO_SHOT_OUT),
        _summed_to,
        _all_reduce_out_functional(_TWO_SHOT_OUT),
    ),
    _native(
        _SCATTER_OUT,
        _reduce_scatter_out_fake,
        lambda on: _scattered_example(on, torch.empty(4, 6)),
        _reduce_scatter_out_functional,
    ),
    _native(
        "_all_reduce",
        _one_shot_all_reduce_fake,
        _summed,
        schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
        # A compiled graph may come from a cache: where its ranks are is known only when it runs.
        kernel=unfused_all_reduce,
        **_FOR_COMPILER,
    ),
    _native(
        "_one_shot_all_reduce",
        _one_shot_all_reduce_fake,
        _summed,
        schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
        **_FOR_COMPILER,
    ),
    _native(
        "_reduce_scatter",
        _reduce_scatter_fake,
        _scattered_example,
        schema="(Tensor input, str group_name, bool split_last_dim) -> Tensor",
        **_FOR_COMPILER,
    ),
    _native(
        "get_remote_tensors",
        no_fake_remote_tensors,
        _remote_example,
        kernel=_get_remote_tensors_cpu,
        gradient=NoGradient("the result has no autograd link to x"),
        native=False,
        torchs_fake="_get_remote_tensors_meta",
    ),
)  # fmt: skip
