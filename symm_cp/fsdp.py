"""FSDP2 whose all-gathers and reduce-scatters run in the background, in symmetric memory.

    model = fully_shard(model)
    symm_cp.fsdp.use(model)

`use` gives every module that was passed to `fully_shard` two communication objects, through torch's
hooks `set_custom_all_gather` and `set_custom_reduce_scatter`. FSDP2 decides all else: which
parameters are gathered when, the dtype, the divisor of sums, the all-reduce of HSDP, state dicts.

*Memory.* FSDP2 copies a group of parameters, or of gradients, into a buffer that the communication
object allocates. Here that is symmetric memory, where peers read the data in place: there is no
further copy. A buffer belongs to one collective at a time, and is free again when neither FSDP2
nor the transfer refers to it. That is safe because a transfer refers to its buffer until it has
been waited for, and the wait ends only when the peers have read their part (the last step of the
patterns BACKGROUND_ALL_GATHER and BACKGROUND_REDUCE_SCATTER in place). Buffers are kept for later
collectives as long as the model lives: one per all-gather under way at a time (one, or the number
of prefetched modules), and for reduce-scatters the number in
`set_reduce_scatter_max_input_buffers` (one by default), each as large as the largest group of
parameters, unsharded. The peak is about as high as FSDP2's alone, which allocates the same buffers
whenever it needs them; but these stay allocated between steps.

*Order.* Ranks agree on which collectives they make, not on which buffer they use: each call reports
to the peers where the data is. Ranks publish a new buffer only after an empty collective in which
they see that all ranks have a new one; so they never wait in different places. Freeing a buffer is
local.

*On CPU* torch has no streams, and FSDP2 waits for each collective. Here an all-gather returns at
once, and FSDP2 waits for it when it needs the parameters; backward passes prefetch, forward passes
only if `set_modules_to_forward_prefetch` was called. A gradient's transfer is waited for when the
gradient is read, or at the end of the backward pass. *On CUDA* the copy engines move the data, and
streams wait as they do for torch's collectives.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

from symm_cp import native
from symm_cp.cuda import has_streams, read_in_place, spans_hosts
from symm_cp.group.hosts import apart_of
from symm_cp.group.memory import resolve
from symm_cp.modes import ordinary_tensors

_ops = torch.ops.symm_mem

#: Smaller data goes through the group's workspace: reading it in place saves nothing.
_SMALL = 1 << 16

#: FSDP2's object for the parameters that one module communicates together.
_ParamGroup = Any


class _Buffer:
    """Symmetric memory that one collective at a time uses."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with ordinary_tensors():
            self.memory = torch_symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.memory.untyped_storage()
        self._references = self._count()
        self._known: set[tuple[str, int, int]] = set()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def is_free(self) -> bool:
        """Whether no tensor and no transfer uses the buffer."""
        return self._count() == self._references

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        start = self.memory.data_ptr()
        return start <= tensor.data_ptr() < start + self.memory.nbytes

    def publish(self, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Makes the ops of a group read a part of the buffer in place. Collective the first time.

        The ranks first make an empty call, which raises if some rank makes another call.
        """
        key = group.group_name, part.data_ptr() - self.memory.data_ptr(), part.nbytes
        if key in self._known:
            return
        empty = torch.empty((0, part.nbytes), dtype=torch.uint8, device=part.device)
        funcol.wait_tensor(_ops._low_contention_all_gather(empty, group.group_name))
        read_in_place(part, group)
        self._known.add(key)


class _Buffers:
    """The buffers of the all-gathers, or of the reduce-scatters, of a model."""

    def __init__(self) -> None:
        self._all: list[_Buffer] = []

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised tensor, in symmetric memory unless it is small.

        The buffer is the smallest that is free and large enough. If there is none, a new buffer
        replaces the largest free one.
        """
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes <= _SMALL:
            return torch.empty(size, dtype=dtype, device=device)
        free = [each for each in self._all if each.memory.device == device and each.is_free()]
        free.sort(key=lambda each: each.memory.nbytes)
        buffer = next((each for each in free if each.memory.nbytes >= nbytes), None)
        if buffer is None:
            if free:
                self._all.remove(free.pop())
            buffer = _Buffer(nbytes, device)
            self._all.append(buffer)
        return buffer.memory[:nbytes].view(dtype).view(*size)

    def publish(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Makes peers read a tensor in place, if it lies in a buffer and is not small."""
        buffer = next((each for each in self._all if each.holds(tensor)), None)
        if buffer is not None and tensor.nbytes > _SMALL:
            buffer.publish(tensor, group)

    @property
    def nbytes(self) -> int:
        """The total size of the buffers."""
        return sum(each.memory.nbytes for each in self._all)


class _Gathering(dist.Work):
    """An all-gather under way."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output = output

    def wait(self, timeout: object = None) -> bool:
        """Returns when `output` is complete; on CUDA has the current stream wait."""
        funcol.wait_tensor(self._output)
        return True


class _Gather(AllGather):
    """The all-gather of a group of parameters."""

    def __init__(self, buffers: _Buffers) -> None:
        self.buffers = buffers

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory for the parameters of all ranks; FSDP2 writes this rank's part there."""
        return self.buffers.take([int(length) for length in size], dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts to gather; `input_tensor` lies at its place in `output_tensor`."""
        self.buffers.publish(input_tensor, group)
        _ops._low_contention_all_gather_out(input_tensor, group.group_name, output_tensor)
        work = _Gathering(output_tensor)
        if async_op or not has_streams(output_tensor.device):
            return work  # FSDP2 waits for it, whatever `async_op` is
        work.wait()
        return None


class _InFlight:
    """The reduce-scatters of a model that may still be under way, the oldest first."""

    def __init__(self) -> None:
        self.outputs: deque[torch.Tensor] = deque()

    def wait(self, at_most: int = 0) -> None:
        """Waits for the oldest ones until at most `at_most` are left."""
        while len(self.outputs) > at_most:
            funcol.wait_tensor(self.outputs.popleft())


class _Scatter(ReduceScatter):
    """The reduce-scatter of the gradients of a group of parameters.

    On CPU its output is a tensor that waits for the transfer when it is read
    (`AsyncCollectiveTensor`), and at the end of the backward pass becomes an ordinary one.
    """

    def __init__(self, buffers: _Buffers, in_flight: _InFlight, param_group: _ParamGroup) -> None:
        self.buffers, self.in_flight = buffers, in_flight
        self._param_group = weakref.ref(param_group)
        self._input_length = 0  # of the allocated input; 0 once its output is allocated

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory for the gradients, which peers read; then memory for this rank's sum."""
        param_group: _ParamGroup = self._param_group()
        length, on_cpu = math.prod(int(each) for each in size), not has_streams(device)
        is_output = length * param_group.mesh_info.shard_mesh_size == self._input_length
        self._input_length = 0 if is_output else length
        if not is_output:
            if on_cpu:
                most = getattr(param_group.comm_ctx, "reduce_scatter_max_input_buffers", 1)
                self.in_flight.wait(at_most=most - 1)
            return self.buffers.take([length], dtype, device)
        output = torch.empty(length, dtype=dtype, device=device)
        return funcol.AsyncCollectiveTensor(output) if on_cpu else output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts to reduce."""
        reduce_op = _reduce_op(op, input_tensor)
        output = output_tensor
        if isinstance(output, funcol.AsyncCollectiveTensor):
            output = output.elem
        self.buffers.publish(input_tensor, group)
        _ops._low_contention_reduce_scatter_out(input_tensor, reduce_op, group.group_name, output)
        if output is output_tensor or torch._C._current_graph_task_id() == -1:
            funcol.wait_tensor(output)
            return None
        self.in_flight.outputs.append(output)
        Variable._execution_engine.queue_callback(self._end_backward)
        return None

    def _end_backward(self) -> None:
        """Waits for transfers under way, and makes the gradients ordinary tensors."""
        self.in_flight.wait()
        param_group = self._param_group()
        for fsdp_param in () if param_group is None else param_group.fsdp_params:
            grad = fsdp_param.sharded_param.grad
            if not isinstance(grad, DTensor):
                continue
            if isinstance(grad._local_tensor, funcol.AsyncCollectiveTensor):
                grad._local_tensor = grad._local_tensor.trigger_wait()


def _reduce_op(op: Any, gradients: torch.Tensor) -> str:
    """Returns the name of a reduction; first multiplies the gradients by its factor, if any."""
    if op == dist.ReduceOp.SUM:
        return "sum"
    if op == dist.ReduceOp.AVG:
        return "avg"
    if op == dist.ReduceOp.PREMUL_SUM:
        gradients.mul_(op.__getstate__()[1])
        return "sum"
    raise NotImplementedError(
        f"symm_cp.fsdp: reduce-scatter with {op=}; use SUM, AVG or PREMUL_SUM"
    )


def _param_groups(module: nn.Module) -> list[_ParamGroup]:
    """Returns the parameter groups of a module passed to `fully_shard`, not of its submodules."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # older torch has one group at most
    return [group for group in groups or [getattr(state, "_fsdp_param_group", None)] if group]


def _sharded(op: str, model: nn.Module) -> dict[int, tuple[str, nn.Module, _ParamGroup]]:
    """Returns name and module of each parameter group of a model that spans several ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model is a {type(model).__name__}, must be a torch.nn.Module")
    modules = {n: module for n, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise ValueError(
            f"{op}: {type(model).__name__} has no FSDP module: call "
            "torch.distributed.fsdp.fully_shard on it first"
        )
    found: dict[int, tuple[str, nn.Module, _ParamGroup]] = {}
    for name, module in modules.items():
        for group in _param_groups(module):
            # A mesh that only replicates gathers nothing, and neither does a single rank.
            if getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
                found.setdefault(id(group), (name, module, group))
    return found


def _why_not(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns why ranks cannot read each other's memory, "" if they can. Collective."""
    group = resolve(process_group)
    if has_streams(device) and spans_hosts(group, device):
        return "its device cannot read peers' buffers"
    apart = apart_of(group, device)
    return "" if apart is None else apart.reason


def _shard_groups(param_group: _ParamGroup) -> Iterator[dist.ProcessGroup]:
    """Yields the process groups that gather parameters: forward's, and backward's if different."""
    yield param_group.mesh_info.shard_process_group
    if param_group._use_post_forward_mesh:
        yield param_group.post_forward_mesh_info.shard_process_group


def _install(
    module: nn.Module, group: _ParamGroup, gather: AllGather, scatter: ReduceScatter
) -> None:
    if len(_param_groups(module)) == 1:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    else:  # torch's methods would give all groups the same objects, and refuse several groups
        group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def _check_replaceable(name: str, param_group: _ParamGroup) -> None:
    """Raises `ValueError` if the module has custom collectives that `use` did not set."""
    for comm, default in (
        (param_group._all_gather_comm, DefaultAllGather),
        (param_group._reduce_scatter_comm, DefaultReduceScatter),
    ):
        if type(comm) is not default:
            raise ValueError(
                f"symm_cp.fsdp.use: module {name!r} communicates through a "
                f"{type(comm).__name__}, which this would replace: remove it first"
            )


def use(model: nn.Module) -> None:
    """Has the FSDP modules of a model gather and reduce-scatter in the background.

    Same result as::

        fully_shard(model)  # without `use`: torch's own collectives

    Args:
        model: a module that `torch.distributed.fsdp.fully_shard` was called on, or that contains
            such modules, on CPU or CUDA. Call `use` on all ranks after all `fully_shard` calls,
            before or between training steps. Modules that it has already changed stay as they are.

    Works with everything FSDP2 has: mixed precision, HSDP, `reshard_after_forward`, gradient
    accumulation, divide factors (also where the process group's backend has no PREMUL_SUM), other
    mesh dimensions for tensor parallelism, activation checkpointing, torch.compile, CPU offload,
    state dicts. Modules whose ranks share no memory keep torch's collectives, and a line on stderr
    says so. For memory see the docstring of this module. `stop` undoes it.

    Raises `TypeError` if `model` is not a module, `ValueError` for a model without FSDP modules or
    with other custom collectives. A collective raises `RuntimeError`, which names the rank, when a
    peer dies or disagrees. Source: the hooks of torch's FSDP2.
    """
    sharded = list(_sharded("symm_cp.fsdp.use", model).values())
    served = [group for _, _, group in sharded if isinstance(group._all_gather_comm, _Gather)]
    others = [each for each in sharded if not isinstance(each[2]._all_gather_comm, _Gather)]
    for name, _, param_group in others:
        _check_replaceable(name, param_group)
    if served:
        gathered = served[0]._all_gather_comm.buffers
        scattered = served[0]._reduce_scatter_comm.buffers
        in_flight = served[0]._reduce_scatter_comm.in_flight
    else:
        gathered, scattered, in_flight = _Buffers(), _Buffers(), _InFlight()
    told: dict[str, list[str]] = {}
    for name, module, param_group in others:
        for process_group in _shard_groups(param_group):
            if why := _why_not(process_group, param_group.device):
                about = f"group {process_group.group_name!r}: {why}"
                told.setdefault(about, []).append(name or type(module).__name__)
                break
        else:
            scatter = _Scatter(scattered, in_flight, param_group)
            _install(module, param_group, _Gather(gathered), scatter)
    for about, names in told.items():
        native.say(f"fsdp.use: {', '.join(names)} keep torch's collectives ({about})")


def stop(model: nn.Module) -> None:
    """Restores torch's own collectives in the modules of a model that `use` has changed.

    Call it on all ranks, not within a training step. The buffers are freed. Raises as `use` does.
    """
    for _, module, param_group in _sharded("symm_cp.fsdp.stop", model).values():
        if isinstance(param_group._all_gather_comm, _Gather):
            _install(module, param_group, DefaultAllGather(), DefaultReduceScatter())
