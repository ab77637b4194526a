"""Shared by the op families: the library fragment, checks of arguments, the names of calls."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed._functional_collectives as funcol
import torch.utils.checkpoint
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import cuda, native
from symm_cp.cuda import plans
from symm_cp.group.memory import (
    Group,
    StateKey,
    resolve,
    unknown_group,
)
from symm_cp.group.one_process import rank_of
from symm_cp.native import wire
from symm_cp.ops.direct import direct, op_of
from symm_cp.ops.error_reports import OPS_ON_CPU, channel_of, reporting
from symm_cp.ops.op import Kernel
from symm_cp.ops.tensor_checks import TensorArguments, checking_memory
from symm_cp.runtime.calls import Collective
from symm_cp.tensors.dtypes import SUMMABLE, dtype_name, summable
from symm_cp.tensors.shards import Split

P = ParamSpec("P")
R = TypeVar("R")
#: One tensor or several: a function of weights returns one product or a list of products.
Weights = TypeVar("Weights", torch.Tensor, Sequence[torch.Tensor])

_MOST_PREPARED = 512
_LONG_SIZES = 48  # characters in a call's name, which peers compare; longer: a checksum
# Dispatch keys whose kernels make no call: fake kernels, or kernels that call another key's.
_NOT_CALLS = ("Meta", "Functionalize", "Composite", "ADInplaceOrView")
_DEVICES = tuple(kind.dispatch_key for kind in cuda.known())
_IN_PYTHON = "symm_cp_"  # begins the namespaces of kernels of users' ops


class _Library(torch.library.Library):
    """A library whose kernels for CPU tensors report refused calls to the peers."""

    def impl(
        self, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any
    ) -> None:
        if not dispatch_key.startswith(_NOT_CALLS) and dispatch_key not in _DEVICES:
            fn = self._reporting(str(op_name), fn, dispatch_key, bool(kwargs.get("with_keyset")))
        super().impl(op_name, fn, dispatch_key, *args, **kwargs)

    def _reporting(self, name: str, kernel: Any, dispatch_key: str, with_keyset: bool) -> Any:
        """Returns a kernel that reports its refusals, and those below it, to the peers."""
        name, _, overload = name.rpartition("::")[2].partition(".")
        arguments = TensorArguments(torch._C._get_schema(f"{self.ns}::{name}", overload))
        if self.ns not in ("symm_mem", "symm_cp"):  # a user's op
            name = f"{self.ns.removeprefix(_IN_PYTHON)}::{name}"
        if dispatch_key == "CPU":
            OPS_ON_CPU.add(name)
            kernel = checking_memory(public_name(name), arguments, kernel)
        position = arguments.group_name
        if position is None:
            return kernel
        position += with_keyset

        def group_of_call(args: Any, kwargs: Any) -> Any:
            return args[position] if position < len(args) else kwargs["group_name"]

        return reporting(kernel, group_of_call, channel_of(name), name)


class _Runs(threading.local):
    count = 0

    def total(self) -> int:
        """Returns the number of runs, native ones included."""
        native_runs: int = native.load().symm_cp_attention_runs()
        return self.count + native_runs


#: The number of this thread's runs of ops that attend to the keys of all ranks, or gather them:
#: context_parallel checks whether there were any.
attention_runs = _Runs()


def count_attention_run() -> None:
    """Counts a run of such an op, also in later calls by its plan."""
    attention_runs.count += 1
    recording = plans.current()
    if recording is not None:
        recording.counts_as_attention()


class PreparedCalls(dict[Hashable, Collective]):
    """The collectives that a group has planned, by a key for each; a bounded cache."""

    def keep(self, key: Hashable, prepared: Collective) -> Collective:
        """Keeps a prepared call for later calls, and returns it."""
        if len(self) >= _MOST_PREPARED:
            self.clear()
        self[key] = prepared
        return prepared


PREPARED: StateKey[PreparedCalls] = StateKey("prepared calls")


class Libraries(NamedTuple):
    """The ops of a namespace, and under the same names their kernels in Python."""

    ops: _Library
    in_python: _Library


@functools.cache
def libraries(namespace: str) -> Libraries:
    """Returns the libraries of a namespace, which may have other ops: they stay.

    csrc/ops/kernels.cpp finds the kernels by these names.
    """
    in_python = "symm_cp" if namespace == "symm_mem" else f"{_IN_PYTHON}{namespace}"
    return Libraries(_Library(namespace, "FRAGMENT"), _Library(in_python, "FRAGMENT"))


#: Kernels for devices, by name, of ops that torch also has kernels for:
#: `symm_cp.override_cuda_ops` installs ours.
device_kernels: dict[str, Kernel] = {}


def keys_of_ours() -> tuple[str, ...]:
    """Returns the dispatch keys of the devices on which only we have kernels of torch's ops.

    Registrations for other devices change torch's ops there. An import must not do that, except
    to add kernels that are also right for torch's.
    """
    kinds = [kind.dispatch_key for kind in cuda.known() if not kind.torch_has_kernels]
    return ("CPU", *kinds)


def device_behind(tensor: torch.Tensor) -> torch.device:
    """Returns the device of a tensor; in fake kernels, the device that it stands for."""
    fake: torch.device | None = getattr(tensor, "fake_device", None)
    return tensor.device if fake is None else fake


def call_signature(
    op: str, *tensors: torch.Tensor, split: Split | None = None, detail: str = ""
) -> bytes:
    """Returns the text that names a call in errors, and that ranks compare.

    `tensors` must have the same shapes on all ranks, except for the dimension that `split`
    divides.
    """
    return _name_of(op, tuple([(t.dtype, t.shape) for t in tensors]), split, detail)


def name_of(
    op: str, dtype: torch.dtype, shape: Sequence[int], detail: str, split: Split | None = None
) -> bytes:
    """Like `call_signature`, for a tensor that does not exist yet."""
    return _name_of(op, ((dtype, torch.Size(shape)),), split, detail)


@functools.lru_cache(maxsize=_MOST_PREPARED)
def _name_of(
    op: str, kinds: tuple[tuple[torch.dtype, torch.Size], ...], split: Split | None, detail: str
) -> bytes:
    wholes = [list(shape) for _, shape in kinds]
    if split is not None and not split.is_equal:
        wholes = [split.whole_shape(shape) for shape in wholes]
        detail += sizes_text(split)
    shapes = " ".join(
        f"{dtype_name(dtype)}{whole}" for (dtype, _), whole in zip(kinds, wholes, strict=True)
    )
    return f"{op} {shapes} {detail}".encode()[: wire.MAX_CALL_NAME]


def sizes_text(split: Split) -> str:
    """Returns the sizes of a dimension's parts as text, or a long text's checksum; '' if equal."""
    if split.is_equal:
        return ""
    text = "+".join(map(str, split.sizes))
    return f" sizes={text if len(text) <= _LONG_SIZES else f'#{zlib.crc32(text.encode()):08x}'}"


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises `ValueError` for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous, has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}"
        )


def check_out(op: str, name: str, out: torch.Tensor, shape: list[int], dtype: torch.dtype) -> None:
    """Raises `ValueError` unless a result of a shape and dtype can be written to a tensor."""
    if list(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {list(out.shape)}, needs {dtype} {shape}")
    check_dense(op, name, out)


def into_output(op: str, argument: str, fake: Kernel, call: Kernel) -> dict[str, Kernel]:
    """Returns two parts of an op whose last argument takes the result: `fake` and `functional`.

    `fake` and `call` are the fake kernel and a call of the same op without that argument.
    """

    def checked(*args: Any) -> torch.Tensor:
        *given, out = args
        made = fake(*given)
        check_out(op, argument, out, list(made.shape), made.dtype)
        return out

    def functional(*args: Any) -> torch.Tensor:
        *given, out = args
        checked(*args)
        return out.copy_(call(*given))

    return {"fake": checked, "functional": functional}


def check_dim(op: str, name: str, dim: int, ndim: int) -> int:
    """Returns `dim` as a number >= 0; raises `ValueError` when it is out of range."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: {name}={dim} is out of range for a {ndim}-D tensor")
    return dim % ndim


def check_reduce_op(op: str, name: str, dtype: torch.dtype, reduce_op: str = "sum") -> bool:
    """Returns whether to average; raises for an op or element type that cannot be reduced."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"{op}: reduce_op={reduce_op!r} must be 'sum' or 'avg'")
    if not summable(dtype):
        raise TypeError(f"{op}: {name} is {dtype}, which cannot be summed: needs {SUMMABLE}")
    if reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op}: reduce_op='avg' of {dtype} is not defined: use a floating dtype")
    return reduce_op == "avg"


def gather_split(
    op: str,
    argument: str,
    dim: int,
    shard: torch.Tensor,
    sizes: Sequence[int] | None,
    rank: int | None,
    world_size: int,
) -> Split:
    """Returns how the shards of all ranks make up dimension `dim` of the gathered tensor.

    `sizes` is the length of every rank's shard, or None when all are equal. Raises `ValueError`
    when they do not fit the shard or the group.
    """
    length = shard.shape[dim]
    if sizes is None or rank is None:
        return Split.equal(length, world_size, dim)
    split = _split(op, sizes, world_size, dim)
    if split.sizes[rank] != length:
        raise ValueError(
            f"{op}: sizes={list(sizes)} give rank {rank} a shard of length {split.sizes[rank]}, "
            f"but dimension {argument}={dim} of its shard has length {length}"
        )
    return split


def scatter_split(
    op: str,
    argument: str,
    dim: int,
    length: int,
    sizes: Sequence[int] | None,
    world_size: int,
    *,
    any_sizes: bool = True,
) -> Split:
    """Returns how dimension `dim` of the given length is scattered: by `sizes`, or equally.

    Raises `ValueError` when that is not possible; `any_sizes`: the caller could have given sizes.
    """
    if sizes is not None:
        split = _split(op, sizes, world_size, dim)
        if split.length != length:
            raise ValueError(
                f"{op}: sizes={list(sizes)} add up to {split.length}, but dimension "
                f"{argument}={dim} has length {length}"
            )
        return split
    if _is_true(length % world_size != 0):
        instead = ": give sizes, the length of each rank's part" if any_sizes else ""
        raise ValueError(
            f"{op}: dimension {argument}={dim} has length {length}, which is not divisible by "
            f"world size {world_size}{instead}"
        )
    return Split.equal(length // world_size, world_size, dim)


def _is_true(condition: bool | torch.SymBool) -> bool:
    """Returns a condition's value; False if compilers do not know it: then the kernel checks it."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _split(op: str, sizes: Sequence[int], world_size: int, dim: int) -> Split:
    if len(sizes) != world_size:
        raise ValueError(
            f"{op}: sizes={list(sizes)} has {len(sizes)} entries, must have one for each of the "
            f"{world_size} ranks"
        )
    if min(sizes) < 0:
        raise ValueError(f"{op}: sizes={list(sizes)} must not be negative")
    return Split(tuple(sizes), dim)


def group_of(group_name: str, rank: int | None = None) -> Group:
    """Returns the group of an op's `group_name` argument, in which this rank is `rank`."""
    group = resolve(group_name)
    if rank is not None and rank != group.rank:
        raise ValueError(f"rank={rank} must be this rank's number in its group, {group.rank}")
    return group


class OnRank(NamedTuple):
    """Where a call is made; `group` is None when only the results' shapes are needed."""

    rank: int
    world_size: int
    group: Group | None = None


def kernel_and_fake(function: Callable[..., Any]) -> tuple[Kernel, Kernel]:
    """Returns the kernel and the fake kernel of a function of a `OnRank` and an op's arguments.

    The function checks the arguments; with a group it returns the results, without one new
    tensors of the results' shapes, strides and dtypes.
    """
    names = list(inspect.signature(function).parameters)[1:]
    group_at = names.index("group_name")
    rank_at = names.index("rank") if "rank" in names else sys.maxsize

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args[group_at], args[rank_at] if rank_at < len(args) else None)
        return function(OnRank(group.rank, group.world_size, group), *args, **kwargs)

    @functools.wraps(function)
    def fake(*args: Any, **kwargs: Any) -> Any:
        rank = args[rank_at] if rank_at < len(args) else None
        return function(OnRank(rank or 0, world_size_of(args[group_at])), *args, **kwargs)

    return kernel, fake


def world_size_of(group_name: str) -> int:
    """Returns the size of a group; also for fake kernels, which must not need native code."""
    try:
        return torch.distributed.distributed_c10d._get_group_size_by_name(group_name)
    except (RuntimeError, ValueError) as error:
        raise unknown_group(group_name) from error


def rank_in(group_name: str) -> int:
    """Returns this rank in a group, as an argument of ops whose results depend on it."""
    try:
        return rank_of(_resolve_process_group(group_name))  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise unknown_group(group_name) from error


# As torch.compiler.assume_constant_result does; calling it would import the compiler.
rank_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


#: The last arguments of an op for uneven parts: the length of every rank's part, and this rank.
#: Without them all parts are equal.
SIZES = "SymInt[]? sizes=None, int? rank=None"
Uneven: TypeAlias = "tuple[()] | tuple[list[int], int]"


def uneven_parts(sizes: Sequence[int] | None, group_name: str) -> Uneven:
    """Returns the last arguments of an op.

    They include the rank because ranks share compiled graphs through the compiler's cache: the
    shapes of an op's results must follow from its arguments.
    """
    return () if sizes is None else (list(sizes), rank_in(group_name))


def uneven_of(last: Sequence[Any]) -> Uneven:
    """Returns the op's arguments for uneven parts as autograd saw them; () if absent or None."""
    return () if not last or last[0] is None else (last[0], last[1])


#: Our counterparts of torch's ops, with the sizes of uneven parts and the rank as last arguments.
#: They run our kernels on all devices; on CUDA, torch's ops run torch's kernels until
#: `symm_cp.override_cuda_ops`.
WITH_SIZES = {
    "fused_all_gather_matmul": "_all_gather_matmul_split",
    "fused_matmul_reduce_scatter": "_matmul_reduce_scatter_split",
    "fused_all_gather_scaled_matmul": "_all_gather_scaled_matmul_split",
    "fused_scaled_matmul_reduce_scatter": "_scaled_matmul_reduce_scatter_split",
    "_low_contention_all_gather": "_low_contention_all_gather_split",
    "_low_contention_reduce_scatter": "_low_contention_reduce_scatter_split",
}


def public_name(op: str) -> str:
    """Returns an op's name in errors: the name of its counterpart without sizes."""
    return next((name for name, split in WITH_SIZES.items() if split == op), op)


def op_for(name: str, device: torch.device, uneven: Uneven = ()) -> Any:
    """Returns the op that runs our kernel on a device: torch's of that name, or our counterpart.

    With sizes of uneven parts it is always our counterpart.

    torch's kernels for CUDA fail for some arguments (scaled products gathered or scattered along
    the last dimension, negative dimensions, float8 results), round more often (the last
    dimension in 16 bits), and wait without a time-out.
    """
    return op_of(_name_for(name, device, uneven))


def caller(name: str, tensor: torch.Tensor, uneven: Uneven = ()) -> Callable[..., Any]:
    """Returns a callable of the op that `op_for` returns for the device of a tensor."""
    if uneven or not tensor.is_cpu:
        name = _name_for(name, tensor.device, uneven)
    return direct(name)


def _name_for(name: str, device: torch.device, uneven: Uneven) -> str:
    kind = cuda.kind_for(device)
    if uneven or (kind is not None and kind.torch_has_kernels):
        return WITH_SIZES[name]
    return name


def call_op(name: str, tensor: torch.Tensor, *args: Any, uneven: Uneven, **kwargs: Any) -> Any:
    """Runs our kernel on the device of a tensor, the first argument."""
    return caller(name, tensor, uneven)(tensor, *args, *uneven, **kwargs)


# Renamed in torch 2.13, where the old name warns.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


def unfused_all_gather(shard: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """The definition: torch's functional all-gather, waited for."""
    return funcol.wait_tensor(_gather(shard.contiguous(), dim, group_name))
