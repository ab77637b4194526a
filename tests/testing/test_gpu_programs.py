"""Programs for GPUs on CPU: calls that such programs make, and their stand-ins."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, rand
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from symm_cp.testing import UnmappedError, cuda_on_cpu
from symm_cp.testing.cuda_stand_ins import devices
from tests.exhaustive import exhaustive


def ones(**kwargs: Any) -> torch.Tensor:
    return torch.ones(2, **kwargs)


def saved(location: str = "cpu") -> io.BytesIO:
    """Returns a file with `ones()`, as a program on `location` would write it."""
    file = io.BytesIO()
    with mock.patch.object(torch.serialization, "location_tag", return_value=location):
        torch.save(ones(), file)
    file.seek(0)
    return file


def with_default_device(device: Any) -> torch.Tensor:
    torch.set_default_device(device)
    try:
        return torch.ones(2)
    finally:
        torch.set_default_device(None)


def inside(context: Any, make: Callable[[], Any]) -> Any:
    with context:
        return make()


def on_side_stream() -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = ones(device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    return x


#: Each returns `ones()` on the CPU.
_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "factory of an index": lambda: ones(device=0),
    "factory of a device": lambda: ones(device=torch.device("cuda", 0)),
    "factory, pinned": lambda: ones(pin_memory=True),
    "to an index": lambda: ones().to(torch.cuda.current_device()),
    "to an index and a dtype": lambda: ones().double().to(0, torch.float32),
    "to an index by name": lambda: ones().to(device=0, non_blocking=True),
    "to a device": lambda: ones().to("cuda:1", torch.float32, True),
    "cuda of an index": lambda: ones().cuda(0),
    "pinned": lambda: ones().pin_memory().cuda(non_blocking=True),
    "device of an index": lambda: ones(device=torch.device(0)),
    "inside a device": lambda: inside(torch.device("cuda"), ones),
    "inside a device of an index": lambda: inside(torch.device(0), ones),
    "default device": lambda: with_default_device("cuda"),
    "default device of an index": lambda: with_default_device(0),
    "generator": lambda: (
        torch.rand(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)) * 0
        + 1
    ),
    "generator of an index": lambda: ones() + 0 * torch.rand(2, generator=torch.Generator(0)),
    "type": lambda: torch.cuda.FloatTensor([1, 1]),
    "to a type": lambda: ones().double().type(torch.cuda.FloatTensor),
    "to a type by name": lambda: ones().double().type("torch.cuda.FloatTensor"),
    "load": lambda: torch.load(saved(), map_location="cuda"),
    "load to a device": lambda: torch.load(saved(), map_location=torch.device("cuda", 1)),
    "load from a GPU": lambda: torch.load(saved("cuda:0")),
    "load from GPUs": lambda: torch.load(saved("cuda:1"), map_location={"cuda:1": "cuda:0"}),
    "load by storage": lambda: torch.load(saved(), map_location=lambda s, _: s.cuda(0)),
    "loader": lambda: next(iter(DataLoader(ones(), batch_size=2, pin_memory=True))),
    "loader of a thread": lambda: next(
        iter(DataLoader(ones(), batch_size=2, pin_memory=True, num_workers=1))
    ),
    "module of an index": lambda: nn.ParameterList([ones()]).to(0)[0].detach(),
    "module of an index and a dtype": lambda: (
        nn.ParameterList([ones().double()]).to(0, torch.float32)[0].detach()
    ),
    "module on an index": lambda: nn.LayerNorm(2, device=0).weight.detach(),
    "module to_empty": lambda: (
        nn.LayerNorm(2, device="meta").to_empty(device=0).weight.detach().fill_(1)
    ),
    "data parallel": lambda: nn.DataParallel(nn.Identity().cuda())(ones(device="cuda")),
    "side stream": on_side_stream,
    "checkpoint": lambda: checkpoint(nn.Dropout(0.0), ones(device="cuda"), use_reentrant=False),
    "symmetric memory of an index": lambda: symm_mem.empty(2, device=0).fill_(1),
    "symmetric memory of a device": lambda: symm_mem.empty(
        (2,), dtype=torch.float32, device=torch.device("cuda:0")
    ).fill_(1),
}


def now(device: Any) -> int:
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def chosen_stream() -> bool:
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(side):
        inner = torch.cuda.current_stream() is side
    torch.cuda.set_stream(side)
    after = torch.cuda.current_stream() is side
    torch.cuda.set_stream(outer)
    return inner and after and torch.cuda.current_stream() is outer


def between_events() -> bool:
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    second.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return 0 <= first.elapsed_time(second) < 1e3


def repeats(restore: Callable[[], Any]) -> bool:
    first = torch.rand(2, device="cuda")
    restore()
    return torch.equal(torch.rand(2, device="cuda"), first)


def restores_all() -> bool:
    states = torch.cuda.get_rng_state_all()
    return len(states) == 2 and repeats(lambda: torch.cuda.set_rng_state_all(states))


def chosen_backend(name: str) -> str | None:
    symm_mem.set_backend(name)
    return symm_mem.get_backend(torch.device("cuda"))


def profiled(*activities: ProfilerActivity) -> bool:
    with profile(activities=activities) as seen:
        ones(device="cuda")
    return any(event.name == "aten::ones" for event in seen.events())


def scaled_step() -> float:
    weight = nn.Parameter(ones(device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.sum().item()


def product(**kwargs: Any) -> torch.dtype:
    with torch.autocast("cuda", **kwargs):
        return (ones(device="cuda")[None] @ ones(device="cuda")[:, None]).dtype


def enabled() -> tuple[bool, torch.dtype, bool]:
    with torch.autocast("cuda", torch.bfloat16):
        found = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return *found, torch.is_autocast_enabled()


def dtypes_after_autocast() -> tuple[torch.dtype, torch.dtype]:
    product(dtype=torch.float16)
    return torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")


#: Calls, and the results that they must return.
_ANSWERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "device": (lambda: now(1), 1),
    "device by name": (lambda: now("cuda:1"), 1),
    "device without an index": (lambda: now(torch.device("cuda")), 0),
    "index of a device": (lambda: torch.cuda.device(1).idx, 1),
    "device of an index": (lambda: torch.device(1), torch.device("cuda", 1)),
    "chosen stream": (chosen_stream, True),
    "stream": (lambda: torch.Stream(device="cuda").query(), True),
    "event": (lambda: torch.Event("cuda", enable_timing=True).query(), True),
    "time between events": (between_events, True),
    "no capture": (lambda: torch.cuda.is_current_stream_capturing(), False),
    "peak memory": (lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"], 0),
    "allocated memory": (lambda: torch.cuda.memory.max_memory_allocated(), 0),
    "accelerator's memory": (lambda: torch.accelerator.max_memory_allocated(), 0),
    "memory summary": (lambda: "CUDA OOMs: 0" in torch.cuda.memory_summary(), True),
    "total memory": (lambda: torch.cuda.get_device_properties(0).total_memory > 0, True),
    "warp": (lambda: torch.cuda.get_device_properties("cuda").warp_size, 32),
    "allocator": (lambda: torch.cuda.get_allocator_backend(), "native"),
    "bfloat16": (lambda: torch.cuda.is_bf16_supported(), True),
    "NCCL": (lambda: torch.cuda.nccl.version() >= (2, 10), True),
    "states of generators": (restores_all, True),
    "seed of all": (
        lambda: torch.cuda.manual_seed_all(1) and repeats(lambda: torch.cuda.manual_seed_all(1)),
        True,
    ),
    "default generators": (lambda: len(torch.cuda.default_generators), 2),
    "generator's class": (lambda: isinstance(torch.default_generator, torch.Generator), True),
    "NVSHMEM": (lambda: chosen_backend("NVSHMEM"), "NVSHMEM"),
    "symmetric memory of NCCL": (lambda: chosen_backend("NCCL"), "NCCL"),
    "symmetric memory of CUDA": (lambda: chosen_backend("CUDA"), "CUDA"),
    "profile": (lambda: profiled(ProfilerActivity.CPU, ProfilerActivity.CUDA), True),
    "profile of CUDA": (lambda: profiled(ProfilerActivity.CUDA), True),
    "scaled gradients": (scaled_step, 0.0),
    "autocast": (product, torch.float16),
    "autocast to bfloat16": (lambda: product(dtype=torch.bfloat16), torch.bfloat16),
    "autocast, disabled": (lambda: product(enabled=False), torch.float32),
    "autocast, asked": (enabled, (True, torch.bfloat16, False)),
    "autocast's dtypes": (dtypes_after_autocast, (torch.float16, torch.bfloat16)),
    "batch norm": (lambda: nn.SyncBatchNorm(2).cuda()(torch.ones(3, 2)).sum().item(), 0.0),
    "depth of ranges": (lambda: torch.cuda.nvtx.range_push("a"), 0),
}

#: Calls that do nothing and must not fail.
_CALLS: dict[str, Callable[[], Any]] = {
    "range": lambda: inside(torch.cuda.nvtx.range("step"), ones),
    "ranges": lambda: (torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.mark("a")),
    "peak": lambda: torch.cuda.reset_peak_memory_stats(0),
    "accumulated": lambda: torch.cuda.reset_accumulated_memory_stats(),
    "allocated": lambda: torch.cuda.reset_max_memory_allocated(),
    "cache": lambda: (torch.cuda.empty_cache(), torch.cuda.memory.empty_cache()),
    "accelerator": lambda: (torch.accelerator.empty_cache(), torch.accelerator.synchronize()),
    "messages": lambda: torch.cuda.ipc_collect(),
    "fraction": lambda: torch.cuda.set_per_process_memory_fraction(0.5),
    "start": lambda: torch.cuda.init(),
    "profiler": lambda: (torch.cuda.profiler.start(), torch.cuda.profiler.stop()),
    "sleep": lambda: torch.cuda._sleep(1000),
    "fork": lambda: inside(torch.random.fork_rng(devices=[0, 1]), ones),
    "names": lambda: isinstance(ones(), (torch.cuda.CUDAGraph, torch.cuda.MemPool)),
}

#: Calls that need a GPU, by the names in their errors.
_ONLY_GPUS: dict[str, Callable[[], Any]] = {
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "torch.cuda.graph": lambda: torch.cuda.graph(None),
    "torch.cuda.graph_pool_handle": lambda: torch.cuda.graphs.graph_pool_handle(),
    "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(ones, ()),
    "torch.cuda.mem_get_info": lambda: torch.cuda.mem_get_info(),
    "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),
    "torch.cuda.memory_snapshot": lambda: torch.cuda.memory_snapshot(),
    "torch.cuda.memory._snapshot": lambda: torch.cuda.memory._snapshot(),
    "torch.cuda.utilization": lambda: torch.cuda.utilization(),
    "torch.cuda.cudart().cudaHostRegister": lambda: torch.cuda.cudart().cudaHostRegister(0, 1, 0),
    "torch.cuda.nccl.all_reduce": lambda: torch.cuda.nccl.all_reduce([ones()]),
    "torch.accelerator.get_memory_info": lambda: torch.accelerator.get_memory_info(),
    "torch.distributed._symmetric_memory.get_mem_pool": lambda: symm_mem.get_mem_pool("cuda"),
}


@pytest.mark.parametrize("row", _TENSORS)
def test_tensors(row: str) -> None:
    with cuda_on_cpu(world_size=2):
        x = _TENSORS[row]()
    assert x.device.type == "cpu"
    torch.testing.assert_close(x, ones(), rtol=0, atol=0)


@pytest.mark.parametrize("row", _ANSWERS)
def test_answers(row: str, capfd: pytest.CaptureFixture[str]) -> None:
    ask, expected = _ANSWERS[row]
    with cuda_on_cpu(world_size=2):
        assert ask() == expected
    assert "frame #" not in capfd.readouterr().err  # a stack of C++, as profilers of CUDA print


@pytest.mark.parametrize("row", _CALLS)
def test_calls(row: str) -> None:
    with cuda_on_cpu(world_size=2):
        _CALLS[row]()


@pytest.mark.parametrize("name", _ONLY_GPUS)
def test_only_gpus(name: str) -> None:
    with cuda_on_cpu(), pytest.raises(UnmappedError) as raised:
        _ONLY_GPUS[name]()
    assert str(raised.value) == f"needs a GPU: {name}"


def test_all_of_torch_cuda_works_or_says_that_it_needs_a_gpu() -> None:
    """Functions without a stand-in say so, or work when called without arguments."""
    mapped = devices(2, 0).of_cuda()
    functions = [name for name in torch.cuda.__all__ if callable(getattr(torch.cuda, name))]
    refusals = 0
    with cuda_on_cpu(world_size=2):
        for name in functions:
            function = getattr(torch.cuda, name)
            if name in mapped or (isinstance(function, type) and name not in _ONLY_GPUS):
                continue
            try:
                function()
            except UnmappedError as error:
                refusals += 1
                assert str(error) == f"needs a GPU: torch.cuda.{name}"  # noqa: PT017
    assert refusals >= 15


# ------------------------------------------------------------------------------- several ranks


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 2, device="cuda")).sum()


def trained_by_ddp(group: dist.ProcessGroup, **kwargs: Any) -> None:
    layer = nn.Linear(2, 2).cuda()
    model = DistributedDataParallel(layer, process_group=group, **kwargs)
    loss_of(model).backward()
    torch.testing.assert_close(layer.weight.grad, torch.ones(2, 2))


def ddp(group: dist.ProcessGroup) -> None:
    device = torch.cuda.current_device()
    assert device == group.rank()
    trained_by_ddp(group)
    trained_by_ddp(group, device_ids=[device])
    trained_by_ddp(group, device_ids=[torch.device("cuda", device)], output_device=device)


def fsdp1(group: dist.ProcessGroup) -> None:
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    for kwargs in ({}, {"device_id": torch.cuda.current_device()}, {"mixed_precision": mixed}):
        model = FullyShardedDataParallel(nn.Linear(2, 2).cuda(), group, **kwargs)
        loss_of(model).backward()
        sharded = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(sharded.float(), torch.ones(3))  # of 2 x 2 weights, 2 biases


def offload(group: dist.ProcessGroup) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cuda", (2,)), offload_policy=CPUOffloadPolicy())
    loss_of(model).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.ones(2, 2))


def options(group: dist.ProcessGroup) -> None:
    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given.config.max_ctas = 4
    made = dist.new_group([0, 1], backend="nccl", pg_options=given)
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x, group=made)
    assert x.item() == 2
    assert made._get_backend(torch.device("cuda")) is not None


def random_dtensors(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cuda", (2,))
    shards = rand(4, 2, device_mesh=mesh, placements=[Shard(0)])
    whole = shards.full_tensor()
    assert not torch.equal(whole[:2], whole[2:])
    replicas = rand(4, device_mesh=mesh, placements=[Replicate()]).to_local()
    both = [torch.empty_like(replicas) for _ in range(2)]
    dist.all_gather(both, replicas, group)
    assert torch.equal(*both)
    first, second = (rand(4, device_mesh=mesh, placements=[Shard(0)]) for _ in range(2))
    assert not torch.equal(first.to_local(), second.to_local())


def sync_batch_norm(group: dist.ProcessGroup) -> None:
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)).cuda()
    layer.eval()(torch.ones(2, 2, device="cuda"))
    with pytest.raises(UnmappedError, match=r"needs a GPU: torch\.nn\.SyncBatchNorm"):
        layer.train()(torch.ones(2, 2, device="cuda"))


@pytest.mark.parametrize(
    "row",
    [ddp, fsdp1, offload, options, random_dtensors, sync_batch_norm],
    ids=lambda f: f.__name__,
)
@pytest.mark.ranks(2)
def test_on_ranks(group: dist.ProcessGroup, row: Callable[[dist.ProcessGroup], None]) -> None:
    with cuda_on_cpu(group.size(), group.rank()):
        row(group)


@pytest.mark.ranks(2)
def test_what_names_cuda_gets_the_cpu(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    before = (torch.cuda.is_available(), torch.cuda.Stream, dist.is_nccl_available())
    with cuda_on_cpu(group.size(), rank):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == group.size()
        assert torch.cuda.current_device() == rank
        device = torch.device("cuda", rank)
        made = [
            torch.ones(2, device=device),
            torch.ones(2, device=f"cuda:{rank}"),
            torch.ones(2, device=rank),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(device, torch.float64).float(),
            torch.ones(2).cuda(rank, non_blocking=True),
            torch.nn.Linear(2, 1).to("cuda").cuda().weight.detach()[0] * 0 + 1,
            torch.ones(2, pin_memory=True),
        ]
        with device:
            made.append(torch.ones(2))
        assert all(x.device.type == "cpu" and torch.equal(x, torch.ones(2)) for x in made)
        torch.cuda.manual_seed_all(3)
        first = torch.rand(1, device="cuda")
        torch.manual_seed(3)
        assert torch.equal(torch.rand(1, device="cuda"), first)
        stream = torch.cuda.current_stream()
        stream.wait_event(stream.record_event())
    assert (torch.cuda.is_available(), torch.cuda.Stream, dist.is_nccl_available()) == before


#: Dynamo of torch 2.11 neither maps devices of factories nor enters streams of our own.
traces_stand_ins = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch.compile of torch 2.11 does not trace these programs"
)


def compiles_and_steps(backend: str) -> None:
    def loss(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
        return (layer(x).tanh() * torch.arange(3, device="cuda")).sum()

    with cuda_on_cpu():
        layer = torch.nn.Linear(4, 3).to("cuda")
        x = torch.randn(5, 4, device="cuda")
        compiled = torch.compile(loss, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, layer), loss(x, layer))
        (expected,) = torch.autograd.grad(loss(x, layer), [layer.weight])
        compiled(x, layer).backward()
        torch.testing.assert_close(layer.weight.grad, expected)
        before = layer.weight.detach().clone()
        torch.optim.AdamW(layer.parameters(), fused=True).step()  # asks whether a stream captures
        assert not torch.equal(layer.weight, before)


@traces_stand_ins
def test_compiles_for_the_cpu() -> None:
    compiles_and_steps("aot_eager")


@exhaustive
@traces_stand_ins
def test_compiles_code_for_the_cpu() -> None:
    compiles_and_steps("inductor")


def in_streams(x: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.pin_memory().to(0, non_blocking=True) * 2
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    return y


def on_a_device(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device(0):
        return x.to(torch.cuda.current_device()) + torch.ones(2, device=0)


def with_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return torch.mm(x[None], x[:, None]) * (2 if torch.is_autocast_enabled("cuda") else 3)


def with_statistics(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x.type(torch.cuda.DoubleTensor) + torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    "function",
    [pytest.param(in_streams, marks=traces_stand_ins), on_a_device, with_autocast, with_statistics],
    ids=lambda f: f.__name__,
)
def test_compiles_one_liners(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with cuda_on_cpu():
        x = torch.rand(2, device="cuda")
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
