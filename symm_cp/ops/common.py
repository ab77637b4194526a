"""What the op families share: the library fragment, checks of arguments, the names of calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
import torch.utils.checkpoint

from symm_cp import devices, native, wire
from symm_cp.hosts import on_this_host
from symm_cp.liveness import PeerLostError
from symm_cp.memory import Group, GroupLike, StateKey, is_reported, reported, resolve, unknown_group
from symm_cp.runtime.api import REDUCIBLE, Collective

# What a checkpoint raises as soon as it has recomputed what it needs.
_EndOfRecomputation = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

P = ParamSpec("P")
R = TypeVar("R")

_PREFAULT_BYTES = 1 << 20  # csrc/segment.cpp: smaller ones are left alone
_SUMMABLE = "an integer, a complex or a floating dtype of at least 16 bits"
_MAX_PLANS = 512


class _Library(torch.library.Library):
    """Kernels for CPU tensors tell the peers when they refuse a call."""

    def impl(
        self, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any
    ) -> None:
        if dispatch_key == "CPU":
            channel = "async" if str(op_name).startswith("_low_contention") else "sync"
            fn = tells_peers(fn, "group_name", channel, str(op_name))
        super().impl(op_name, fn, dispatch_key, *args, **kwargs)


def tells_peers(
    function: Callable[P, R], group: str = "group", channel: str = "sync", op: str = ""
) -> Callable[P, R]:
    """Returns the function, which tells the peers when it raises.

    They may be making the same call, and would wait for this rank until their time-out. `group`
    names the argument that holds the group, `channel` the channel of the call. Errors that know no
    op are given the name `op`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except _EndOfRecomputation:  # nothing failed
            raise
        except Exception as error:
            if op and isinstance(error, PeerLostError):
                error.args = (f"{op}: {error}",)
            with contextlib.suppress(Exception):  # no group, nobody to tell
                refuse(signature.bind(*args, **kwargs).arguments[group], channel, error)
            raise

    return call


def refuse(group: GroupLike, channel: str, error: Exception) -> None:
    """Tells the peers that this rank does not make the call that they may be making now.

    Does nothing when the error was already reported to them. Never waits.
    """
    state = resolve(group)
    if state.world_size == 1 or is_reported(error):
        return
    on_this_host(state, "cpu").refuse(channel, error)
    reported(error)


class _Runs(threading.local):
    count = 0


#: How often this thread has run an op that attends to the keys of all ranks, or gathers them:
#: context_parallel asks whether any did.
attention_runs = _Runs()


class Plans(dict[Hashable, Collective]):
    """The collectives that a group has planned, by what tells them apart; a bounded cache."""

    def keep(self, key: Hashable, plan: Collective) -> Collective:
        """Keeps a plan for later calls, and returns it."""
        if len(self) >= _MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan


PLANS: StateKey[Plans] = StateKey("plans")


#: Joins the namespace that torch defines; what torch registered there stays.
lib = _Library("symm_mem", "FRAGMENT")

Op: TypeAlias = Callable[..., Any]

#: Kernels for devices, by name, of ops that torch has kernels for as well:
#: `symm_cp.override_cuda_ops` installs ours.
device_kernels: dict[str, Op] = {}


def register_kernel(name: str, kernel: Op, *, replaces_torch: bool = False) -> None:
    """Registers an op's kernel for CPU tensors and for those of every known device.

    With `replaces_torch`, torch has a kernel for some devices; ours is kept in `device_kernels`,
    and `override_cuda_ops` installs it.
    """
    lib.impl(name, kernel, "CPU")
    if replaces_torch:
        device_kernels[name] = kernel
    for device in devices.known():
        if not (replaces_torch and device.torch_has_kernels):
            lib.impl(name, kernel, device.dispatch_key)


def what_is(op: str, *tensors: torch.Tensor, detail: str = "") -> bytes:
    """Names a call for errors, and so that ranks notice when theirs differ.

    `tensors` are those that must have one shape on all ranks.
    """
    shapes = " ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
    return f"{op} {shapes} {detail}".encode()[: wire.MAX_CALL_NAME]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes that the elements of a tensor take."""
    return tensor.numel() * tensor.element_size()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def new_result(
    like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns an empty tensor whose memory is there already, where it is large."""
    result = like.new_empty(tuple(shape), dtype=dtype or like.dtype)
    nbytes = nbytes_of(result)
    if nbytes >= _PREFAULT_BYTES and result.device.type == "cpu":
        native.load().symm_cp_prefault(result.data_ptr(), nbytes)
    return result


def in_test_mode() -> bool:
    """Tells whether torch's `_test_mode()` asks for the unfused definitions of the ops."""
    return torch_symm_mem._is_test_mode


def check_dim(op: str, name: str, dim: int, ndim: int) -> int:
    """Returns `dim` as a number >= 0; raises `ValueError` when it is out of range."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: {name}={dim} is out of range for a {ndim}-D tensor")
    return dim % ndim


def _summable(dtype: torch.dtype) -> bool:
    return dtype.to_real() in REDUCIBLE


def check_reduce_op(op: str, name: str, dtype: torch.dtype, reduce_op: str = "sum") -> bool:
    """Returns whether to average; raises for an op or element type that cannot be reduced."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"{op}: reduce_op={reduce_op!r} must be 'sum' or 'avg'")
    if not _summable(dtype):
        raise TypeError(f"{op}: {name} is {dtype}, which cannot be summed: needs {_SUMMABLE}")
    if reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op}: reduce_op='avg' of {dtype} is not defined: use a floating dtype")
    return reduce_op == "avg"


def check_divisible(op: str, name: str, dim: int, size: int, world_size: int) -> None:
    """Raises `ValueError` unless the ranks divide `size`, the length of dimension `dim`."""
    if size % world_size != 0:
        raise ValueError(
            f"{op}: dimension {name}={dim} has length {size}, which {world_size} ranks do not "
            f"divide: needs a multiple of {world_size}"
        )


def check_matrices(op: str, a: torch.Tensor, bs: list[torch.Tensor], inner: int) -> None:
    """Raises unless `a` is at least 2-D and every B a matrix of `inner` rows, of a's dtype."""
    if a.dim() < 2:
        raise ValueError(f"{op}: A must have at least 2 dimensions, has shape {list(a.shape)}")
    if not _summable(a.dtype):
        raise TypeError(
            f"{op}: A is {a.dtype}: needs {_SUMMABLE} (for float8 there are the scaled ops)"
        )
    for index, b in enumerate(bs):
        if b.dim() != 2:
            raise ValueError(f"{op}: B[{index}] must be a matrix, has shape {list(b.shape)}")
        if b.shape[0] != inner:
            raise ValueError(
                f"{op}: B[{index}] of shape {list(b.shape)} needs {inner} rows to follow A of "
                f"shape {list(a.shape)}"
            )
        if b.dtype != a.dtype:
            raise TypeError(f"{op}: B[{index}] is {b.dtype} and A is {a.dtype}: they must agree")
        if b.device != a.device:
            raise ValueError(f"{op}: B[{index}] is on {b.device} and A on {a.device}")


def group_of(group_name: str) -> Group:
    """Returns the group of an op's `group_name` argument."""
    return resolve(group_name)


def world_size_of(group_name: str) -> int:
    """Returns the size of a group; in fake kernels too, where nothing native may be needed."""
    try:
        return torch.distributed.distributed_c10d._get_group_size_by_name(group_name)
    except (RuntimeError, ValueError) as error:
        raise unknown_group(group_name) from error


# Renamed in torch 2.13, where the old names warn.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def unfused_all_gather(shard: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """The definition: torch's functional all-gather, waited for."""
    return funcol.wait_tensor(_gather(shard.contiguous(), dim, group_name))


def unfused_reduce_scatter(
    full: torch.Tensor, reduce_op: str, dim: int, group_name: str
) -> torch.Tensor:
    """The definition: torch's functional reduce-scatter, waited for."""
    return funcol.wait_tensor(_scatter(full.contiguous(), reduce_op, dim, group_name))


def at_last(run: Callable[[], None], group: Group) -> Callable[[list[torch.Tensor], int], None]:
    """Returns a `consume` that runs something once, when the shards of all ranks have come."""
    left = group.world_size

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            run()

    return consume


def rows_of(x: torch.Tensor, dim: int, index: int, parts: int) -> torch.Tensor:
    """Returns part `index` of `parts` along `dim` as a matrix with x's last dimension."""
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size).movedim(dim, 0).flatten(0, -2)


def front_shape(x: torch.Tensor, dim: int, times: int = 1) -> list[int]:
    """Returns the shape of x with `dim` moved to the front and `times` as long."""
    shape = list(x.movedim(dim, 0).shape)
    shape[0] *= times
    return shape


class Sum:
    """Adds up several terms, in float32 for the 16-bit types, and writes the result once.

    A product of 16-bit matrices is rounded by the kernel; adding the rounded products in 16 bits
    would round at every step, and the error would grow with the number of ranks.
    """

    def __init__(self, out: torch.Tensor, terms: int) -> None:
        self._out = out
        wide = terms <= 1 or out.dtype not in (torch.bfloat16, torch.float16)
        self._total = out if wide else torch.empty_like(out, dtype=torch.float32)
        self._part = None if wide else torch.empty_like(out)
        self._empty = True

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds a @ b."""
        if self._part is not None:
            self.add(torch.mm(a, b, out=self._part))
        elif self._empty:
            torch.mm(a, b, out=self._total)
            self._empty = False
        else:
            self._total.addmm_(a, b)

    def add(self, term: torch.Tensor) -> None:
        """Adds a tensor."""
        if self._empty:
            self._total.copy_(term)
        else:
            self._total.add_(term)
        self._empty = False

    def finish(self) -> None:
        """Writes the sum; zeros when nothing was added."""
        if self._empty:
            self._total.zero_()
        if self._total is not self._out:
            self._out.copy_(self._total)
