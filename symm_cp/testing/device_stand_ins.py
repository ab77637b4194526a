"""Stand-ins, on CPU, for functions outside `torch.cuda` that take its devices: see gpu_programs.py.

Each `of_...` yields owners, names in them and the stand-ins for these.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.testing.cuda_stand_ins import NVTX, UnmappedError, standing_for, unmapped

_CUDA = re.compile(r"cuda(:\d+)?")
_CUDA_TYPE = re.compile(r"torch\.cuda\.(\w+Tensor)")
_NCCL = re.compile(r"\bnccl\b")
#: Programs ask whether NCCL is new enough, for bfloat16 for example.
_NCCL_VERSION = (2, 27, 3)
_BACKENDS = ("CUDA", "NVSHMEM", "NCCL")

StandIn = tuple[Any, str, Any]


def mapped(device: Any) -> Any:
    """Returns the CPU for a device of CUDA, anything else unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if not isinstance(device, str):
        return device
    return "cpu" if _CUDA.fullmatch(device) else _CUDA_TYPE.sub(r"torch.\1", device)


def is_index(value: Any) -> bool:
    """Whether a value may be a device index; excludes True and False."""
    return type(value) is int


def _compared(value: Any) -> Any:
    return mapped(value) if isinstance(value, torch.device) else value  # words stay what they are


def _device(device: Any) -> Any:
    return torch.device("cpu") if is_index(device) else mapped(device)


def _none(argument: Any) -> None:
    """Changes any argument to None."""


def _taking(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that applies `change` to each argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(change, args), **{name: change(v) for name, v in kwargs.items()})

    return call


def _changing(function: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that changes the arguments of these names, if given."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, change in changes.items():
            if name in bound.arguments:
                bound.arguments[name] = change(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _batch_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`SyncBatchNorm.forward`, supported only if it needs no communication."""
    if layer.training and c10d.is_initialized() and c10d.get_world_size(layer.process_group) > 1:
        raise UnmappedError("needs a GPU: torch.nn.SyncBatchNorm on several ranks")
    return torch.nn.modules.batchnorm._BatchNorm.forward(layer, x)


def _on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Returns FSDP1's constructor with the CPU as device; by default it would ask C++ for one."""

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        init(*args, **(kwargs | {"device_id": torch.device("cpu")}))

    return call


def _offloading(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns FSDP1's preparation for backward; it accumulates no gradients that it offloads."""

    @functools.wraps(prepare)
    def call(handle: Any) -> None:
        prepare(handle)
        if handle._offload_params:  # known by the device of the gradient, which is the CPU here
            vars(handle.flat_param).pop("_saved_grad_shard", None)

    return call


def of_modules() -> Iterator[StandIn]:
    """Yields stand-ins that move modules, or run them on several devices."""
    ddp = torch.nn.parallel.DistributedDataParallel
    yield ddp, "__init__", _changing(ddp.__init__, device_ids=_none, output_device=_none)
    yield ddp, "_passing_sync_batchnorm_handle", lambda self, module: None
    yield torch.nn.SyncBatchNorm, "forward", _batch_norm
    # Without a device, `DataParallel` runs the module itself.
    data_parallel = import_module("torch.nn.parallel.data_parallel")
    yield data_parallel, "_get_available_device_type", lambda: None
    fsdp = import_module("torch.distributed.fsdp").FullyShardedDataParallel
    yield fsdp, "__init__", _on_cpu(fsdp.__init__)
    init = import_module("torch.distributed.fsdp._init_utils")
    yield init, "_check_module_states_for_sync_module_states", _none
    # It would free the parameter's memory after a copy to the CPU, which is no copy here.
    handle = import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    yield handle, "to_cpu", nullcontext
    prepare = handle.prepare_gradient_for_backward
    yield handle, "prepare_gradient_for_backward", _offloading(prepare)
    yield torch.cpu.Stream, "synchronize", _none  # its devices are the CPU
    parse_to = torch._C._nn._parse_to

    def parse_to_cpu(*args: Any, **kwargs: Any) -> Any:
        return parse_to(*map(_device, args), **{name: _device(v) for name, v in kwargs.items()})

    yield torch._C._nn, "_parse_to", parse_to_cpu


def _autocast(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of `torch.autocast` for the CPU, with the data type of CUDA."""

    @functools.wraps(init)
    def call(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    return call


def of_autocast() -> Iterator[StandIn]:
    """Yields `torch.autocast` and the functions that report its state.

    Where it is disabled, each device has its own data type: CUDA float16, and the CPU bfloat16.
    """
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def dtype_of(device_type: str) -> str:
        return "cpu" if device_type == "cuda" and is_enabled("cpu") else device_type

    def set_cuda(*args: Any) -> None:
        device_type, enabled = args if len(args) == 2 else ("cuda", *args)
        set_enabled(mapped(device_type), enabled)

    yield torch.autocast, "__init__", _autocast(torch.autocast.__init__)
    yield torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(mapped(device_type))
    yield torch, "set_autocast_enabled", set_cuda
    yield torch, "get_autocast_dtype", lambda device_type: get_dtype(dtype_of(device_type))
    yield (
        torch,
        "set_autocast_dtype",
        lambda device_type, dtype: set_dtype(dtype_of(device_type), dtype),
    )
    yield torch, "get_autocast_gpu_dtype", lambda: get_dtype(dtype_of("cuda"))


def _without_cuda(activities: Any) -> Any:
    """Returns a profiler's activities without CUDA; the CPU if nothing else is left."""
    activity = torch.profiler.ProfilerActivity
    if activities is None:
        return None
    kept: list[Any] = []
    for item in activities:
        if isinstance(item, dict):
            item = {key: value for key, value in item.items() if key != activity.CUDA}
        if item and item != activity.CUDA:
            kept.append(item)
    return kept or [activity.CPU]


def of_tools() -> Iterator[StandIn]:
    """Yields stand-ins for default devices, generators, loading of data, and profilers."""
    context = import_module("torch.utils._device").DeviceContext
    yield context, "__init__", _changing(context.__init__, device=_device)
    generator = torch.Generator
    yield (
        torch,
        "Generator",
        standing_for(generator, lambda device="cpu": generator(_device(device))),
    )
    yield torch.Tensor, "record_stream", lambda self, stream: None
    for storage in (torch.storage._StorageBase, torch.storage.TypedStorage):
        yield storage, "cuda", _itself
        yield storage, "pin_memory", _itself
    restore = torch.serialization.default_restore_location
    yield torch.serialization, "default_restore_location", _taking(restore, mapped)
    pinning = import_module("torch.utils.data._utils.pin_memory")
    yield pinning, "pin_memory", lambda data, device=None: data
    # `assertEqual` of torch's `TestCase` compares by it.
    pair = import_module("torch.testing._comparison").Pair
    yield pair, "__init__", _changing(pair.__init__, actual=_compared, expected=_compared)
    profilers = import_module("torch.profiler")
    for profiler in (profilers.profile, profilers._KinetoProfile):
        yield profiler, "__init__", _changing(profiler.__init__, activities=_without_cuda)
    yield torch.cuda.nvtx, "_nvtx", NVTX
    get_module = torch.get_device_module

    def module_of(device: Any = None) -> Any:
        return torch.cuda if device is None or mapped(device) != device else get_module(device)

    yield torch, "get_device_module", module_of


class _ProcessGroupNCCL:
    """No group is an instance; functions check for it even in builds of torch without NCCL."""

    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = 0, 1, 2

    class Options:
        """Accepted, and ignored by `symm_cp`."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


def _without_nccl(argument: Any) -> Any:
    if isinstance(argument, torch.device):  # the device that an NCCL group is bound to
        return None
    return _NCCL.sub("symm_cp", argument) if isinstance(argument, str) else argument


def of_groups() -> Iterator[StandIn]:
    """Yields stand-ins for process groups and meshes."""
    for module in (c10d, torch.distributed):
        yield module, "is_nccl_available", lambda: True
        if not hasattr(module, "ProcessGroupNCCL"):
            yield module, "ProcessGroupNCCL", _ProcessGroupNCCL
    nccl = import_module("torch.cuda.nccl")
    yield nccl, "version", lambda: _NCCL_VERSION
    for name in nccl.__all__:
        yield nccl, name, unmapped(f"torch.cuda.nccl.{name}")
    make = c10d._new_process_group_helper
    yield c10d, "_new_process_group_helper", _taking(make, _without_nccl)
    get_future = c10d.Work.get_future

    def completed(self: Any) -> Any:
        """Returns the completed future: NCCL's `then` calls at once, in the caller's thread."""
        future = get_future(self)
        with suppress(Exception):  # the future has the error, too
            future.wait()
        return future

    yield c10d.Work, "get_future", completed
    get_backend = c10d.ProcessGroup._get_backend
    yield c10d.ProcessGroup, "_get_backend", lambda self, device: get_backend(self, mapped(device))
    yield DeviceMesh, "__init__", _taking(DeviceMesh.__init__, mapped)
    remote = torch.distributed._remote_device  # its text stays that of CUDA
    device_of = remote.device
    yield remote, "device", lambda self: mapped(device_of(self))
    options = getattr(import_module("torch.distributed.rpc"), "TensorPipeRpcBackendOptions", None)
    if options:  # this build of torch has it
        yield options, "__init__", _changing(options.__init__, device_maps=_none, devices=_none)
        yield options, "set_device_map", lambda self, to, device_map: None
        yield options, "set_devices", lambda self, devices: None


def of_symmetric_memory() -> Iterator[StandIn]:
    """Yields stand-ins that allocate symmetric memory, and choose its backend."""
    p2p = torch_symm_mem._SymmetricMemory
    yield p2p, "empty_strided_p2p", staticmethod(_taking(p2p.empty_strided_p2p, mapped))
    empty = torch_symm_mem.empty

    def empty_on_cpu(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return empty(*size, device=_device(device), **kwargs)

    yield torch_symm_mem, "empty", empty_on_cpu
    set_backend, get_backend = torch_symm_mem.set_backend, torch_symm_mem.get_backend
    chosen = ["CUDA"]

    def choose(name: str) -> None:
        if name not in _BACKENDS:
            set_backend(name)  # type: ignore[arg-type]
        else:
            chosen[:] = [name]

    def backend_of(device: Any) -> str | None:
        return chosen[0] if torch.device(device).type == "cuda" else get_backend(device)

    yield torch_symm_mem, "set_backend", choose
    yield torch_symm_mem, "get_backend", backend_of
    # `_fused_all_gather_matmul_native` waits on one stream for what another will do later.
    for name in ("get_mem_pool", "get_mempool_allocator", "_fused_all_gather_matmul_native"):
        yield torch_symm_mem, name, unmapped(f"torch.distributed._symmetric_memory.{name}")


def _of_shard(spec: Any) -> int:
    """Returns the index of this rank's shard among the different shards of a DTensor."""
    rng = import_module("torch.distributed.tensor._random")
    return int(rng._calc_shard_linear_idx(*rng._calc_shard_info(spec.mesh.get_coordinate(), spec)))


class _ShardSeeds:
    """For DTensor's `OffsetBasedRNGTracker`: each shard of a random tensor has its own seed."""

    def __init__(self, device_mesh: DeviceMesh, run_state_sync: bool = True) -> None:
        self.distribute_region_enabled = True
        state = torch.get_rng_state()
        # All ranks of the mesh begin with the state of its first rank, as on GPUs.
        for dimension in range(device_mesh.ndim) if run_state_sync else ():
            c10d.broadcast(state, group=device_mesh.get_group(dimension), group_src=0)
        torch.set_rng_state(state)

    @contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        if torch._guards.detect_fake_mode() or not self.distribute_region_enabled:
            yield
            return
        generator = generator or torch.default_generator
        seed = int(torch.randint(1 << 60, (), generator=generator))  # the same on all ranks
        state = generator.get_state()
        generator.manual_seed(seed + _of_shard(spec))
        try:
            yield
        finally:
            generator.set_state(state)


def _all_to_all(
    shard: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """DTensor's change of the sharded dimension, which is an all-gather on torch's CPU meshes."""
    name = mesh.get_group(mesh_dim).group_name
    moved: torch.Tensor = torch.ops._dtensor.shard_dim_alltoall(shard, gather_dim, shard_dim, name)
    return moved


def of_dtensors() -> Iterator[StandIn]:
    """Yields stand-ins that draw random DTensors, and that shard another dimension."""
    for name in ("_collective_utils", "placement_types"):
        owner = import_module(f"torch.distributed.tensor.{name}")
        if hasattr(owner, "shard_dim_alltoall"):
            yield owner, "shard_dim_alltoall", _all_to_all
    rng = import_module("torch.distributed.tensor._random")
    for module in (rng, import_module("torch.distributed.tensor._dispatch")):
        yield module, "is_rng_supported_mesh", lambda device_mesh: True
    yield rng, "OffsetBasedRNGTracker", _ShardSeeds
    yield rng, "_rng_tracker", None


def of_attention() -> Iterator[StandIn]:
    """Yields stand-ins by which all kernels, and `context_parallel`, are the CPU's attention."""
    attention = import_module("torch.nn.attention")
    choose = attention._sdpa_kernel
    absent = {attention.SDPBackend.EFFICIENT_ATTENTION, attention.SDPBackend.CUDNN_ATTENTION}

    def choose_flash(backends: Any, set_priority: bool = False) -> None:
        choose(backends, set_priority)
        if not absent.isdisjoint(backends):
            torch._C._set_sdp_use_flash(True)

    yield attention, "_sdpa_kernel", choose_flash
    ring = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    dispatcher = import_module("torch.distributed.tensor").DTensor._op_dispatcher
    specs = import_module("torch.distributed.tensor._dtensor_spec")

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[str, Any] = (
            dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        )
        if given.pop("attn_mask", None) is not None:
            raise UnmappedError("needs a GPU: context_parallel with attn_mask")
        inputs: list[Any] = [given[name]._spec for name in ("query", "key", "value")]
        local = {name: getattr(value, "_local_tensor", value) for name, value in given.items()}
        group = inputs[0].mesh.get_group()
        if "grad_out" in local:
            results = ring._templated_ring_attention_backward(
                group, 2, op, grad_out_name="grad_out", **local
            )
            return dispatcher.wrap(results, inputs)
        results = ring._templated_ring_attention(group, 2, op, **local)
        shape, sums = inputs[0].tensor_meta.shape, results[1]
        meta = specs.TensorMeta(shape[:3], (shape[1] * shape[2], shape[2], 1), sums.dtype)
        return dispatcher.wrap(results, [inputs[0], replace(inputs[0], tensor_meta=meta)])

    aten = torch.ops.aten
    handlers = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: run,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: run,
    }
    yield ring, "custom_ops", ring.custom_ops | handlers


def _without_accelerator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to which no accelerator is available: Dynamo guards its stream in C++."""

    def call(*args: Any) -> Any:
        with mock.patch.object(torch.accelerator, "is_available", return_value=False):
            return function(*args)

    return call


def of_compilation() -> Iterator[StandIn]:
    """Yields stand-ins for functions that `torch.compile` calls."""
    streams = import_module("torch._dynamo.variables.streams").SymbolicStreamState
    yield streams, "__init__", _without_accelerator(streams.__init__)
    # A build for CUDA would call this, since torch.cuda is said to be available.
    fake = import_module("torch._subclasses.fake_tensor")
    yield fake, "init_gpu_context", lambda device: None
    # With `enable_compiler_collectives`, Dynamo enters its group's device.
    yield import_module("torch._dynamo.device_interface").CpuInterface, "device", nullcontext
    triton = import_module("torch.utils._triton")  # which has no kernels for CPUs
    yield triton, "has_triton_package", lambda: False
