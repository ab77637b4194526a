"""Collectives that are complete when they return; their kernels are in csrc/ops/collectives.cpp.

torch's ops of these names take inputs in symmetric memory only; here a plain input goes
through the workspace. Ops with a `symm_buffer`, which torch needs for plain inputs, only check it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._subclasses.functional_tensor import CppFunctionalizeAPI

from symm_cp.cuda import has_streams
from symm_cp.group.hosts import apart_of, no_common_memory
from symm_cp.group.memory import resolve
from symm_cp.ops.call import Call
from symm_cp.ops.common import (
    check_dense,
    check_reduce_op,
    group_of,
    into_output,
    scatter_split,
    world_size_of,
)
from symm_cp.ops.compiled import breaks_graph
from symm_cp.ops.matmul.all_reduce import unfused_all_reduce
from symm_cp.ops.op import (
    LEFT_TO_TORCH,
    NATIVE_GRADIENT,
    ONE_BY_ONE,
    TORCHS,
    Arguments,
    BackwardOp,
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
from symm_cp.ops.types import no_types

_ALL_REDUCE = "one_shot_all_reduce"
_ALL_REDUCE_COPY = "one_shot_all_reduce_copy"
_BACKWARD = "_all_reduce_backward"
_COPY_BACKWARD = "_all_reduce_copy_backward"
_TWO_SHOT = "two_shot_all_reduce_"
_TWO_SHOT_OUT = "two_shot_all_reduce_out"
_SCATTER_OUT = "reduce_scatter_out"

NO_GRADIENT = Elsewhere("csrc/ops/gradients.cpp refuses", differentiable=False)


def refusing(op: str) -> Kernel:
    """Returns the kernel for CPU tensors that the native kernel cannot process: it raises."""

    def refuses(*args: Any) -> Any:
        names = [arg.name for arg in declared_op(op).overload._schema.arguments]
        tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        group_name = args[names.index("group_name")]
        if has_streams(tensor.device):
            raise NotImplementedError(
                f"{op}: symm_cp has no kernel on this device: torch's own is used there"
            )
        raise no_common_memory(op, resolve(group_name), tensor.device)

    return refuses


def _get_remote_tensors_cpu(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    op = "get_remote_tensors"
    check_dense(op, "x", x)
    group = resolve(group_name)
    if apart_of(group, x.device) is not None:
        raise no_common_memory(op, group, x.device)
    handle = torch_symm_mem.rendezvous(x, group.name)
    if handle is None:
        raise ValueError(f"{op}: x is not in symmetric memory: allocate it with symm_mem.empty()")
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(group.world_size)]


# --- fake kernels ----------------------------------------------------------------------------


def _all_reduce_fake(op: str) -> Kernel:
    def fake(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        world_size_of(group_name)  # the group exists
        check_reduce_op(op, "input", input.dtype, reduce_op)
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    return fake


def _two_shot_fake(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    _all_reduce_fake(_TWO_SHOT)(input, *rest)
    return input


def _copy_fake(symm_buffer: torch.Tensor, local_input: torch.Tensor, *rest: Any) -> torch.Tensor:
    check_dense(_ALL_REDUCE_COPY, "symm_buffer", symm_buffer)
    if symm_buffer.dtype != local_input.dtype or symm_buffer.numel() < local_input.numel():
        raise ValueError(
            f"{_ALL_REDUCE_COPY}: symm_buffer is {symm_buffer.dtype} {list(symm_buffer.shape)}, "
            f"needs {local_input.dtype} and room for local_input of shape "
            f"{list(local_input.shape)}"
        )
    made: torch.Tensor = _all_reduce_fake(_ALL_REDUCE_COPY)(local_input, *rest)
    return made


def _reduce_scatter_fake(
    input: torch.Tensor, group_name: str, split_last_dim: bool
) -> torch.Tensor:
    op = _SCATTER_OUT
    if input.dim() == 0:
        raise ValueError(f"{op}: input must have at least 1 dimension, has none")
    dim = input.dim() - 1 if split_last_dim else 0
    check_reduce_op(op, "input", input.dtype)
    world_size = world_size_of(group_name)
    split = scatter_split(op, "dim", dim, input.shape[dim], None, world_size, any_sizes=False)
    return input.new_empty(split.shape_of(0, input.shape))


# --- in compiled programs --------------------------------------------------------------------

# The compiler refuses ops whose result is an argument; instead it gets ops that return a new
# tensor, and a copy. On CPU a `symm_buffer` is left out: the compiler would allocate it itself in
# symmetric memory, which torch cannot do for CPU tensors. On other devices torch's kernel needs it.


def all_reduced(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Returns the sum over the ranks of an input that, on CPU, need not lie in symmetric memory."""
    ops = torch.ops.symm_mem
    op = ops._one_shot_all_reduce if input.device.type == "cpu" else ops.one_shot_all_reduce
    total: torch.Tensor = op(input, *rest)
    return total


def _two_shot_functional(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return input.copy_(all_reduced(input, *rest))


def _copy_functional(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, *rest: Any
) -> torch.Tensor:
    _copy_fake(symm_buffer, local_input, *rest)
    if local_input.device.type == "cpu":
        return all_reduced(local_input, *rest)
    functionalize = CppFunctionalizeAPI()
    tensors: Any = functionalize.unwrap_tensors((symm_buffer, local_input))
    with functionalize.redispatch_to_next():
        total = torch.ops.symm_mem.one_shot_all_reduce_copy(*tensors, *rest)
    wrapped: Any = functionalize.wrap_tensors(total)
    return wrapped


def _scattered(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    if input.device.type != "cpu":
        raise NotImplementedError(
            f"{_SCATTER_OUT}: torch.compile of it is supported on CPU only, not on {input.device}"
        )
    scattered: torch.Tensor = torch.ops.symm_mem._reduce_scatter(input, *rest)
    return scattered


# --- gradients -------------------------------------------------------------------------------


def _all_reduce_backward(grad: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """Every rank's output depends on every rank's input in the same way."""
    return Call(_BACKWARD, group_of(group_name)).all_reduce(grad, reduce_op)


# --- declarations ----------------------------------------------------------------------------


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
        "kernel": refusing(name),
        "gradient": NO_GRADIENT,
        "vmap": LEFT_TO_TORCH,
        "native": True,
        "types": _summed_types,
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


def _summed_types(t: Any, reduce_op: Any, **named: Any) -> Any:
    x = named.pop(next(each for each in ("input", "local_input", "grad") if each in named))
    t.ignore(named)
    return t.all_reduce(x, reduce_op)


def _scattered_types(t: Any, input: Any, split_last_dim: Any, **named: Any) -> Any:
    t.ignore(named)
    return t.reduce_scatter(input, -1 if split_last_dim is True else 0)


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


def _backward(name: str, result: str) -> Op:
    """An all-reduce of gradients, which is its own gradient; the result is that of an argument."""
    return Op(
        name=name,
        types=_summed_types,
        schema=f"(Tensor grad, str reduce_op, str group_name) -> Tensor {result}",
        kernel=_all_reduce_backward,
        fake=_all_reduce_fake(_ALL_REDUCE),
        gradient=BackwardOp(_BACKWARD),
        autocast=untouched,
        vmap=ONE_BY_ONE,
        example=_summed,
        internal=True,
    )


_FOR_COMPILER: dict[str, Any] = {
    "gradient": Elsewhere("graphs are differentiated before they call it", differentiable=False),
    "internal": True,
}

declare(
    _native(
        _ALL_REDUCE, _all_reduce_fake(_ALL_REDUCE), _summed,
        gradient=BackwardOp(_BACKWARD), vmap=ONE_BY_ONE,
    ),
    _backward(_BACKWARD, "input"),
    _native(
        f"{_ALL_REDUCE}_out",
        example=_summed_to,
        **into_output(_ALL_REDUCE, "out", _all_reduce_fake(_ALL_REDUCE), all_reduced),
    ),
    _native(
        _ALL_REDUCE_COPY, _copy_fake, _copied, _copy_functional,
        gradient=BackwardOp(_COPY_BACKWARD), vmap=ONE_BY_ONE,
    ),
    _backward(_COPY_BACKWARD, "local_input"),
    _native(
        f"{_ALL_REDUCE_COPY}_out",
        example=lambda on: _copied(on, torch.empty(4, 6)),
        **into_output(_ALL_REDUCE_COPY, "out", _copy_fake, _copy_functional),
    ),
    _native(
        _TWO_SHOT, _two_shot_fake, _summed, _two_shot_functional,
        gradient=NATIVE_GRADIENT,
    ),
    _native(
        _TWO_SHOT_OUT,
        example=_summed_to,
        **into_output(_TWO_SHOT_OUT, "out", _all_reduce_fake(_TWO_SHOT_OUT), all_reduced),
    ),
    _native(
        _SCATTER_OUT,
        types=_scattered_types,
        example=lambda on: _scattered_example(on, torch.empty(4, 6)),
        **into_output(_SCATTER_OUT, "output", _reduce_scatter_fake, _scattered),
    ),
    _native(
        "_all_reduce",
        _all_reduce_fake(_ALL_REDUCE),
        _summed,
        schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
        # A compiled graph may come from a cache: its ranks' hosts are known only when it runs.
        kernel=unfused_all_reduce,
        **_FOR_COMPILER,
    ),
    _native(
        "_one_shot_all_reduce",
        _all_reduce_fake(_ALL_REDUCE),
        _summed,
        schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
        **_FOR_COMPILER,
    ),
    _native(
        "_reduce_scatter",
        _reduce_scatter_fake,
        _scattered_example,
        types=_scattered_types,
        schema="(Tensor input, str group_name, bool split_last_dim) -> Tensor",
        **_FOR_COMPILER,
    ),
    _native(
        "get_remote_tensors",
        breaks_graph("get_remote_tensors"),
        _remote_example,
        kernel=_get_remote_tensors_cpu,
        gradient=NoGradient("the result has no autograd link to x"),
        types=no_types("it returns memory of peers"),
        native=False,
        torchs_fake="_get_remote_tensors_meta",
    ),
)  # fmt: skip
