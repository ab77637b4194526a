"""torch's GPU-only ops on symmetric memory, for CPU tensors.

Their kernels are in csrc/ops: vdev.cpp (all-to-alls whose sizes lie in tensors), collectives.cpp
and symmetric_collectives.cpp (multicast, tiles, blocks), one_sided.cpp (puts, gets, signals,
words). They take the same arguments as torch's, so that a test passes on CPU only if its arguments
would work on a GPU: contiguous tensors in symmetric memory, "sum".

Schemas are torch's; ops that the installed torch lacks are not declared. In compiled programs,
multicast and NVSHMEM's collectives become ops for plain tensors; others break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._subclasses.functional_tensor import CppFunctionalizeAPI

from symm_cp.ops.collectives.complete import NO_GRADIENT, all_reduced, refusing
from symm_cp.ops.common import check_reduce_op, into_output, world_size_of
from symm_cp.ops.compiled import breaks_graph
from symm_cp.ops.op import (
    LEFT_TO_TORCH,
    TORCHS,
    Arguments,
    Caller,
    Kernel,
    Op,
    arguments,
    declare,
    untouched,
)
from symm_cp.ops.types import no_types

_MULTIMEM = "multimem_one_shot_all_reduce"
_GATHER = "multimem_all_gather_out"


def _symmetric(x: torch.Tensor, on: Caller | None = None) -> torch.Tensor:
    """Returns a copy in symmetric memory; with `on`, rendezvoused with its group."""
    made = torch_symm_mem.empty(*x.shape, dtype=x.dtype, device="cpu").copy_(x)
    if on is not None and on.group_name:
        torch_symm_mem.rendezvous(made, on.group_name)
    return made


# --- fake kernels, and the same in compiled graphs -------------------------------------------


def _given(position: int) -> Kernel:
    """Returns the kernel of an op that returns its argument at a position."""
    return lambda *args: args[position]


def _summed(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    world_size_of(group_name)
    check_reduce_op(_MULTIMEM, "input", input.dtype, reduce_op)
    if reduce_op != "sum":
        raise ValueError(f"{_MULTIMEM}: reduce_op={reduce_op!r} must be 'sum'")
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _all_reduced(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    _summed(input, *rest)
    if input.device.type == "cpu":
        return all_reduced(input, *rest)
    functionalize = CppFunctionalizeAPI()
    with functionalize.redispatch_to_next():
        total = torch.ops.symm_mem.multimem_one_shot_all_reduce(
            functionalize.unwrap_tensors(input), *rest
        )
    wrapped: Any = functionalize.wrap_tensors(total)
    return wrapped


def _on_cpu(op: str, functional: Kernel) -> Kernel:
    """Returns `functional` for compiled graphs, which refuses tensors of other devices."""

    def call(first: torch.Tensor, *rest: Any) -> Any:
        if first.device.type != "cpu":
            raise NotImplementedError(
                f"{op}: torch.compile of it is supported on CPU only, not on {first.device}"
            )
        return functional(first, *rest)

    return call


def _in_place(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return input.copy_(all_reduced(input, *rest))


def _gathered_shape(input: torch.Tensor, group_name: str) -> torch.Tensor:
    rows, *others = input.shape
    return input.new_empty((rows * world_size_of(group_name), *others))


def _gathered(input: torch.Tensor, group_name: str) -> torch.Tensor:
    return funcol.wait_tensor(torch.ops.symm_mem._low_contention_all_gather(input, group_name))


def _broadcast(input: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    return input.copy_(_gathered(input.unsqueeze(0), group_name)[root])


def _exchanged(input: torch.Tensor, out: torch.Tensor, group_name: str) -> torch.Tensor:
    parts = [input.numel() // world_size_of(group_name)] * world_size_of(group_name)
    exchanged = torch.ops._c10d_functional.all_to_all_single(
        input.reshape(-1), parts, parts, group_name
    )
    return out.copy_(funcol.wait_tensor(exchanged).view(out.shape))


def _eager_only(op: str) -> Kernel:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError(
            f"{op}: torch.compile of it is not supported inside a graph: it runs between two"
        )

    return refuse


def _product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


# --- declarations ----------------------------------------------------------------------------


_NO_TYPES = no_types("it is for programs of GPUs, which name their memory")


def _op(name: str, example: Callable[[Caller], Arguments], **parts: Any) -> Op:
    """An op that breaks the graph of a compiler, unless `fake` is given."""
    parts = {"fake": breaks_graph(name), "types": _NO_TYPES, **parts}
    return Op(
        name=name, schema=TORCHS, kernel=refusing(name), example=example, gradient=NO_GRADIENT,
        autocast=untouched, vmap=LEFT_TO_TORCH, native=True, cpu_only=True, **parts,
    )  # fmt: skip


def _one_sided(name: str, example: Callable[[Caller], Arguments], **parts: Any) -> Op:
    return replace(_op(name, example, **parts), one_sided=True)


def _chunks(count: int, *, placed: bool = False) -> torch.Tensor:
    splits = torch.ones(count, dtype=torch.int64)
    return _symmetric(torch.stack([splits, torch.arange(count)]) if placed else splits)


def _shuffle(on: Caller, experts: int, *, placed: bool = False) -> Arguments:
    count = on.world_size * experts
    rows = _symmetric(on.rand(count, 6), on)
    return arguments(
        rows, _symmetric(torch.zeros_like(rows)), _chunks(count, placed=placed),
        _chunks(count, placed=True), on.group_name,
    )  # fmt: skip


def _tile(on: Caller) -> Arguments:
    return arguments(
        _symmetric(on.rand(4, 6)), _symmetric(torch.zeros_like(on.rand(4, 6))), 0, on.group_name
    )


def _tiles(on: Caller) -> Arguments:
    return arguments(
        [_symmetric(on.rand(4, 6)) for _ in range(on.world_size)],
        _symmetric(torch.zeros_like(on.rand(4, 6))), [*range(on.world_size)], on.group_name,
    )  # fmt: skip


def _blocks(on: Caller) -> Arguments:
    whole = _symmetric(on.rand(4 * on.world_size, 6))
    return arguments(whole, [whole.new_zeros(4, 6)], on.group_name, 0)


def _multimem(on: Caller, *out: torch.Tensor) -> Arguments:
    return arguments(_symmetric(on.rand(4, 6)), "sum", on.group_name, *out)


def _to_peer(on: Caller) -> Arguments:
    return arguments(_symmetric(on.rand(4, 6), on), on.rank)


def _signal(on: Caller) -> torch.Tensor:
    return _symmetric(torch.zeros(1, dtype=torch.int64), on)


def _words(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint32)


def _put_signal(on: Caller) -> Arguments:
    place = torch_symm_mem.empty(4, 6, device="cpu")
    handle: Any = torch_symm_mem.rendezvous(place, on.group_name) if on.group_name else None
    boxed = handle.boxed() if hasattr(handle, "boxed") else handle
    return arguments(on.rand(4, 6), boxed, on.rank)


OPS = (
    _op("all_to_all_vdev", lambda on: _shuffle(on, 1)),
    _op(
        "all_to_all_vdev_2d",
        lambda on: _shuffle(on, 2),
        torchs_fake="_all_to_all_vdev_2d_meta",
    ),
    _op(
        "all_to_all_vdev_2d_offset",
        lambda on: _shuffle(on, 2, placed=True),
        torchs_fake="_all_to_all_vdev_2d_offset_meta",
    ),
    _op("tile_reduce", _tile),
    _op("multi_root_tile_reduce", _tiles),
    _op("nccl_reduce_scatter_offset", _blocks),
    _op(
        "multimem_all_reduce_",
        _multimem,
        fake=_given(0),
        functional=_on_cpu("multimem_all_reduce_", _in_place),
    ),
    _op(_MULTIMEM, _multimem, fake=_summed, functional=_all_reduced),
    _op(
        f"{_MULTIMEM}_out",
        lambda on: _multimem(on, on.rand(4, 6)),
        **into_output(f"{_MULTIMEM}_out", "out", _summed, _on_cpu(f"{_MULTIMEM}_out", all_reduced)),
    ),
    # Ranks may take one graph from the compiler's cache, so no rank can be the root in it.
    _op(
        "multimem_one_shot_reduce_out",
        lambda on: arguments(_symmetric(on.rand(4, 6)), "sum", 0, on.group_name, on.rand(4, 6)),
        functional=_eager_only("multimem_one_shot_reduce_out"),
    ),
    _op(
        _GATHER,
        lambda on: arguments(
            on.rand(4, 6), on.group_name, _symmetric(on.rand(4 * on.world_size, 6))
        ),
        **into_output(_GATHER, "out", _gathered_shape, _on_cpu(_GATHER, _gathered)),
    ),
    _op(
        "nvshmem_broadcast",
        lambda on: arguments(_symmetric(on.rand(4, 6)), 0, on.group_name),
        fake=_given(0),
        functional=_on_cpu("nvshmem_broadcast", _broadcast),
    ),
    _op(
        "nvshmem_all_to_all",
        lambda on: arguments(
            *(_symmetric(on.rand(4 * on.world_size, 6)) for _ in range(2)), on.group_name
        ),
        fake=_given(1),
        functional=_on_cpu("nvshmem_all_to_all", _exchanged),
    ),
    *(
        _one_sided(name, _to_peer)
        for name in ("nvshmem_put", "nvshmem_get", "nccl_put", "nccl_get")
    ),
    _one_sided(
        "nvshmem_put_with_signal",
        lambda on: arguments(_symmetric(on.rand(4, 6), on), _signal(on), 0, on.rank),
    ),
    _one_sided("nvshmem_wait_for_signal", lambda on: arguments(_signal(on), 0, on.rank)),
    _one_sided(
        "nccl_put_with_signal", lambda on: arguments(_symmetric(on.rand(4, 6), on), 0, on.rank)
    ),
    _one_sided("nccl_wait_for_signal", lambda on: arguments(_signal(on), 0)),
    _one_sided("nccl_put_signal", _put_signal),
    _one_sided(
        "stream_write_value32_",
        lambda on: arguments(_words(4), 1, 7),
        functional=_eager_only("stream_write_value32_"),
    ),
    _one_sided(
        "memset32_",
        lambda on: arguments(_words(4), 1, 7, 2),
        functional=_eager_only("memset32_"),
    ),
    _one_sided(
        "_async_input_mm",
        lambda on: arguments(on.rand(4, 6), on.rand(6, 5), _words(2), 1),
        fake=_product,
    ),
)

declare(*(op for op in OPS if hasattr(torch.ops.symm_mem, op.name)))


# --- a matmul of torch's pipelines ------------------------------------------------------------

_aten = torch.library.Library("aten", "IMPL")


def _mm_to(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`torch.mm(a, b, out_dtype=...)`: sums of products are rounded to `out_dtype` only."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
    _aten.impl("mm.dtype", _mm_to, "CPU")
