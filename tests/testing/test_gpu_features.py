"""Programs for GPUs on CPU: threads, callbacks, compilers, and what GPUs reject."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.trace_rules
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import nn
from torch.distributed import rpc
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from symm_cp.testing import Ranks, UnmappedError, cuda_on_cpu
from tests.exhaustive import exhaustive

ops = torch.ops.symm_mem


class Begun(threading.Thread):
    """A thread with a `run` of its own."""

    results: list[float]

    def run(self) -> None:
        self.results = [torch.ones(3, device="cuda").cuda().sum().item()]
        torch.cuda.set_device(1)


def test_threads_have_the_device() -> None:
    with cuda_on_cpu(world_size=2):
        thread = Begun()
        thread.start()
        thread.join()
        assert thread.results == [3]
        assert torch.cuda.current_device() == 0  # each thread chooses its own, as with CUDA
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(lambda: torch.zeros(2).to("cuda", non_blocking=True)).result()
        assert made.device.type == "cpu"
        threads = threading.Thread._bootstrap_inner
    assert threading.Thread._bootstrap_inner is not threads


def test_the_accelerators_module_is_cuda() -> None:
    with cuda_on_cpu(world_size=2):
        for module in (
            torch.get_device_module(),
            torch.get_device_module("cuda"),
            torch.get_device_module("cuda:1"),
        ):
            assert module.device_count() == 2
            module.manual_seed(3)
            assert module.initial_seed() == 3
        assert torch.get_device_module("cpu") is torch.cpu
        with pytest.raises(RuntimeError, match="Invalid value"):
            torch.get_device_module(1.5)


def test_a_stream_is_set_by_number() -> None:
    with cuda_on_cpu():
        stream = torch.cuda.Stream()
        numbers = {name: getattr(stream, name) for name in ("stream_id", "device_index")}
        torch._C._cuda_setStream(**numbers, device_type=stream.device_type)
        assert torch.cuda.current_stream() is stream


def test_the_compiler_tells_stand_ins_apart() -> None:
    """Dynamo refuses two rules for one function; it looks them up once, at any time."""
    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map
    with cuda_on_cpu():
        rules.cache_clear()
        try:
            assert torch.cuda.initial_seed in rules()
        finally:
            rules.cache_clear()


@pytest.mark.parametrize(
    "backend", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH"]
)
def test_chosen_attention_kernels(backend: str) -> None:
    x = torch.rand(1, 2, 4, 8)
    with cuda_on_cpu(), sdpa_kernel(getattr(SDPBackend, backend)):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert torch.backends.cuda.flash_sdp_enabled() is (backend != "MATH")


def compiled(mode: str | None, backend: str) -> torch.Tensor:
    double = torch.compile(lambda x: (x + 1).relu() * 2, mode=mode, backend=backend)
    results = [double(torch.ones(4, device="cuda")) for _ in range(3)]
    return results[-1]


def compile_after_init(group: dist.ProcessGroup) -> list[float]:
    """Rules of Dynamo are looked up once, so this runs in a new process."""
    with cuda_on_cpu(1):
        made = dist.new_group([0], backend="nccl")
        result = compiled(None, "eager").tolist()
        dist.destroy_process_group(made)
    return result


@exhaustive
def test_compiles_after_groups_were_made(ranks: Ranks) -> None:
    with ranks.own(1, compile_after_init) as running:
        (outcome,) = running.outcomes(100)
    assert outcome.result == [4.0] * 4, outcome


@exhaustive
def test_compiles_without_cuda_graphs() -> None:
    with cuda_on_cpu():
        assert compiled("reduce-overhead", "inductor").tolist() == [4.0] * 4


# ------------------------------------------------------------------------------- several ranks


def callbacks(group: dist.ProcessGroup) -> None:
    """Callbacks run at once in the caller's thread, so that all ranks issue the same calls."""
    random.seed(group.rank())
    here, threads = threading.current_thread(), []

    def broadcast(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        threads.append(threading.current_thread())
        (tensor,) = future.value()
        dist.broadcast(tensor, group_src=0, group=group)
        return tensor

    futures = []
    for count in (1000, 200_000, 3000) * 5:
        work = dist.all_reduce(torch.ones(count, device="cuda"), group=group, async_op=True)
        futures.append(work.get_future().then(broadcast))
        time.sleep(random.random() * 0.002)
    assert all(future.wait().eq(group.size()).all() for future in futures)
    assert set(threads) == {here}


def failed_callbacks(group: dist.ProcessGroup) -> None:
    """The future of a collective that failed has its error."""
    x = torch.ones(3 + group.rank(), device="cuda")
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="ranks disagree"):
        future.wait()


def averages(group: dist.ProcessGroup) -> None:
    """Integers are rounded toward zero, as NCCL does."""
    own, size = 3 * group.rank() + 1, group.size()
    average = sum(3 * rank + 1 for rank in range(size)) // size  # of 5 / 2, with two ranks
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        for sign in (1,) if dtype is torch.uint8 else (1, -1):
            x = torch.full((37,), sign * own, dtype=dtype, device="cuda")
            dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
            assert (x == sign * average).all()
            whole = torch.full((2 * size,), sign * own, dtype=dtype)
            part = torch.empty(2, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group=group)
            assert (part == sign * average).all()


def fsdp1(group: dist.ProcessGroup) -> None:
    torch.manual_seed(group.rank())
    layer = nn.Linear(4, 4)
    firsts = [p.detach().clone() for p in layer.parameters()]
    for p in firsts:
        dist.broadcast(p, group_src=0, group=group)
    options = {"sync_module_states": True, "device_id": torch.cuda.current_device()}
    expected = F.linear(torch.ones(2, 4), *firsts)
    for offload in (False, True):
        torch.manual_seed(group.rank())
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), group, cpu_offload=CPUOffload(offload), **options
        )
        y = model(torch.ones(2, 4, device="cuda"))
        torch.testing.assert_close(y.detach(), expected)
        y.sum().backward()
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            weight = model.state_dict()["weight"]
        torch.testing.assert_close(weight, firsts[0])
        with FullyShardedDataParallel.summon_full_params(
            model, offload_to_cpu=True, writeback=True
        ):
            model.weight.data.add_(1)
        shifted = model(torch.ones(2, 4, device="cuda")).detach()
        torch.testing.assert_close(shifted, expected + 4)
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def accumulated(group: dist.ProcessGroup) -> None:
    """Gradients that are accumulated in `no_sync` and offloaded replace those of the last step."""
    x = torch.rand(6, 4, device="cuda")
    dist.broadcast(x, group_src=0, group=group)
    for original in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), group, cpu_offload=CPUOffload(True), use_orig_params=original,
            device_id=torch.cuda.current_device(), sync_module_states=True,
        )  # fmt: skip
        model(x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with model.no_sync():
            for part in x[:4].split(2):
                model(part).square().sum().backward()
        model(x[4:]).square().sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(found, expected)


def ring(group: dist.ProcessGroup) -> None:
    """torch's own `context_parallel`: attention and its gradients are one process's."""
    world = group.size()
    mesh = dist.DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))
    for rotate in ("allgather", "alltoall"):
        set_rotate_method(rotate)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 8 * world, 16, requires_grad=True) for _ in range(3))
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        expected = torch.autograd.grad(whole.square().sum(), (q, k, v))
        buffers = [x.detach().clone() for x in (q, k, v)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            parts = [buffer.clone().requires_grad_() for buffer in buffers]
            part = F.scaled_dot_product_attention(*parts, is_causal=True)
            grads = torch.autograd.grad(part.square().sum(), parts)
        unsharded = context_parallel_unshard(mesh, [part.detach(), *grads], [2] * 4)
        for result, wanted in zip(unsharded, (whole.detach(), *expected), strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


def redistributed(group: dist.ProcessGroup) -> None:
    """Another dimension is sharded by an all-to-all, as on meshes of CUDA."""
    mesh = dist.DeviceMesh.from_group(group, "cuda")
    whole = torch.arange(16.0).view(4, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    with CommDebugMode() as calls:
        columns = rows.redistribute(placements=[Shard(1)])
    assert calls.get_comm_counts() == {torch.ops._dtensor.shard_dim_alltoall: 1}
    torch.testing.assert_close(columns.full_tensor(), whole)


def nccl_policies(group: dist.ProcessGroup) -> None:
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    assert dist.new_group([0, 1], backend="nccl", pg_options=options).size() == group.size()


def remote_calls(group: dist.ProcessGroup) -> None:
    """Remote calls map devices of one rank to those of another."""
    name, peer = f"worker{group.rank()}", 1 - group.rank()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="env://", devices=["cuda:0"], device_maps={f"worker{peer}": {0: 1}}
    )
    options.set_device_map(f"worker{peer}", {1: 0})
    options.set_devices([0, 1])
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        ports = [chosen.getsockname()[1]]
    dist.broadcast_object_list(ports, src=0, group=group)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[0])}
    rpc.init_rpc(name, rank=group.rank(), world_size=2, rpc_backend_options=options)
    x = torch.full((2,), 1.0 + group.rank(), device="cuda")
    more = rpc.rpc_sync(f"worker{peer}", torch.add, args=(x, 1))
    assert more.tolist() == [2.0 + group.rank()] * 2
    rpc.shutdown()


def sharded(group: dist.ProcessGroup) -> None:
    """The places of a sharded tensor keep the names that the program gave them."""
    rank, places = group.rank(), ["rank:0/cuda:0", "rank:1/cuda:1"]
    tensor = sharded_tensor.ones(ChunkShardingSpec(0, [*places]), 6, 2, process_group=group)
    (shard,) = tensor.local_shards()
    assert str(shard.metadata.placement) == places[rank]
    assert shard.metadata.placement.device() == shard.tensor.device == torch.device("cpu")


def native_matmul(group: dist.ProcessGroup) -> None:
    a, b = torch.rand(8, 4, device="cuda"), torch.rand(4, 8, device="cuda")
    with pytest.raises(UnmappedError, match="_fused_all_gather_matmul_native"):
        symm_mem._fused_all_gather_matmul_native(a, b, group.group_name)


@pytest.mark.parametrize(
    "row",
    [
        callbacks,
        failed_callbacks,
        averages,
        fsdp1,
        accumulated,
        ring,
        redistributed,
        nccl_policies,
        remote_calls,
        sharded,
        native_matmul,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.ranks(2)
def test_on_ranks(group: dist.ProcessGroup, row: Callable[[dist.ProcessGroup], None]) -> None:
    with cuda_on_cpu(group.size(), group.rank()):
        row(dist.new_group([*range(group.size())], backend="nccl"))


# ------------------------------------------------------------------------------ what GPUs reject


def symmetric(
    group: dist.ProcessGroup, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    x = symm_mem.empty(*shape, dtype=dtype, device="cuda").fill_(1)
    symm_mem.rendezvous(x, group)
    return x


Calls = dict[str, tuple[Callable[[], Any], str]]


def sums(group: dist.ProcessGroup, op: Callable[..., Any], *rest: Any, out: bool) -> Calls:
    """Calls of an op that sums, and the errors of torch's CUDA kernels."""
    floats, plain = symmetric(group, 8, 8), torch.ones(8, 8)

    def call(x: torch.Tensor, reduce_op: str = "sum") -> Callable[[], Any]:
        to = (torch.empty(x.shape, dtype=x.dtype),) if out else ()
        return lambda: op(x, reduce_op, *rest, group.group_name, *to)

    kinds = {
        dtype: symmetric(group, 8, 8, dtype=dtype)
        for dtype in (torch.int64, torch.float64, torch.float16, torch.complex64)
    }
    half = symmetric(group, 8, dtype=torch.bfloat16)
    return {
        "plain": (call(plain), "is not in symmetric memory"),
        "avg": (call(floats, "avg"), "must be 'sum'"),
        "strides": (call(floats.t()), "must be contiguous"),
        "size": (call(half[:7]), "divisible by 4 bytes"),
        "offset": (call(half[1:7]), "divisible by 4 bytes"),
        **{str(dtype): (call(x), "torch.float32 and torch.bfloat16") for dtype, x in kinds.items()},
    }


def scatters(group: dist.ProcessGroup) -> Calls:
    def call(x: torch.Tensor, by_columns: bool = False) -> Callable[[], Any]:
        shape = [*x.shape]
        shape[-1 if by_columns else 0] //= group.size()
        return lambda: ops.reduce_scatter_out(
            x, group.group_name, by_columns, torch.empty(shape, dtype=x.dtype)
        )

    floats = symmetric(group, 8, 8)
    return {
        "plain": (call(torch.ones(64)), "is not in symmetric memory"),
        "rows": (call(floats), "must have 1"),
        "odd": (call(floats.view(-1)[:12]), "one vector for each rank"),
        "odd columns": (call(symmetric(group, 8, 12), True), "one vector for each rank"),
        "int64": (call(symmetric(group, 64, dtype=torch.int64)), "torch.bfloat16"),
    }


def copies(group: dist.ProcessGroup) -> Calls:
    floats = symmetric(group, 8)

    def call(x: torch.Tensor, buffer: torch.Tensor = floats) -> Callable[[], Any]:
        return lambda: ops.one_shot_all_reduce_copy(buffer, x, "sum", group.group_name)

    return {
        "plain buffer": (call(torch.ones(8), torch.ones(8)), "is not in symmetric memory"),
        "smaller": (call(torch.ones(4)), "on GPUs it must be symm_buffer's"),
        "alignment": (call(torch.ones(9)[1:]), "must be aligned to 16 bytes"),
    }


_REJECTED: dict[str, Callable[[dist.ProcessGroup], Calls]] = {
    "one_shot": lambda group: sums(group, ops.one_shot_all_reduce, out=False),
    "one_shot_out": lambda group: sums(group, ops.one_shot_all_reduce_out, out=True),
    "two_shot": lambda group: sums(group, ops.two_shot_all_reduce_, out=False),
    "two_shot_out": lambda group: sums(group, ops.two_shot_all_reduce_out, out=True),
    "multimem": lambda group: sums(group, ops.multimem_all_reduce_, out=False),
    "multimem_one_shot": lambda group: sums(group, ops.multimem_one_shot_all_reduce, out=False),
    "multimem_out": lambda group: sums(group, ops.multimem_one_shot_all_reduce_out, out=True),
    "reduce_scatter": scatters,
    "copy": copies,
}


@pytest.mark.parametrize("row", _REJECTED)
@pytest.mark.ranks(2)
def test_what_gpus_reject_is_rejected(group: dist.ProcessGroup, row: str) -> None:
    with cuda_on_cpu(group.size(), group.rank()):
        for name, (call, message) in _REJECTED[row](group).items():
            with pytest.raises(RuntimeError) as raised:
                call()
            assert message in str(raised.value), name
            dist.barrier(group)


@pytest.mark.ranks(2)
def test_what_gpus_accept_is_accepted(group: dist.ProcessGroup) -> None:
    name, size = group.group_name, group.size()
    with cuda_on_cpu(size, group.rank()):
        x = symmetric(group, 64, dtype=torch.bfloat16)
        assert (ops.one_shot_all_reduce(x[8:24], "sum", name) == size).all()
        copied = ops.one_shot_all_reduce_copy(x, torch.ones(64).bfloat16(), "sum", name)
        assert (copied == size).all()
        part = ops.reduce_scatter_out(x, name, False, torch.empty(64 // size).bfloat16())
        assert (part == size).all()
        y = symmetric(group, 8).requires_grad_()
        ops.one_shot_all_reduce(y, "sum", name).sum().backward()  # of a gradient in plain memory
        assert (y.grad == size).all()
        assert ops.one_shot_all_reduce(symmetric(group, 0), "sum", name).numel() == 0
    plain = ops.one_shot_all_reduce(torch.ones(3, dtype=torch.int64), "sum", name)
    assert (plain == size).all()  # outside, CPU tensors are what they are
    assert (ops.one_shot_all_reduce(torch.ones(3), "avg", name) == 1).all()


@pytest.mark.ranks(3)
def test_kernels_for_some_numbers_of_ranks(group: dist.ProcessGroup) -> None:
    with cuda_on_cpu(3, group.rank()):
        x = symmetric(group, 12)
        assert (ops.one_shot_all_reduce(x, "sum", group.group_name) == 3).all()
        with pytest.raises(RuntimeError, match="takes 2, 4 or 8 ranks, the group has 3"):
            ops.two_shot_all_reduce_out(x, "sum", group.group_name, torch.empty(12))
