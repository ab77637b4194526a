"""Tests that need a GPU, in one process. Ranks on GPUs: test_on_gpus.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import symm_cp
from symm_cp import native
from symm_cp.cuda import device_of
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.cuda.kernels import tile_matmul
from symm_cp.ops.attention import kernels as attention_kernels
from symm_cp.ops.override import CudaOverride
from tests.cuda import kernel_cases

pytestmark = pytest.mark.gpu


def test_the_driver_has_what_streams_need() -> None:
    assert native.load().symm_cp_driver(CudaDevice.driver.encode()) in (1, 2), native.error()


def test_side_streams_are_not_the_callers() -> None:
    device = device_of(torch.device("cuda", 0))
    handles = {*device.streams("sync"), *device.streams("async")}
    assert len(handles) == 5
    with torch.cuda.stream(torch.cuda.Stream()):
        assert device.streams("sync")[0] not in handles


def test_memory_pools_of_graphs() -> None:
    device = device_of(torch.device("cuda", 0))
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    pools: list[Any] = []
    for graph, pool in zip(graphs, (None, torch.cuda.graph_pool_handle(), None), strict=True):
        pool = pools[0] if graph is graphs[2] else pool
        with torch.cuda.graph(graph, pool=pool):
            pools.append(device.graph_pool())
            torch.zeros(4, device="cuda")
    assert pools == [graph.pool() for graph in graphs]
    assert pools[0] == pools[2] != pools[1]
    assert set(pools) <= set(device.graph_pools())
    del graph, graphs[0], graphs[0]
    torch.cuda.empty_cache()
    assert pools[0] in device.graph_pools()
    assert pools[1] not in device.graph_pools()


def test_a_thread_without_a_context_is_attached() -> None:
    device = device_of(torch.device("cuda", 0))

    def opens() -> None:
        device.attach()
        device.return_stream(device._open_stream())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(opens).result()


@pytest.mark.parametrize("name", ["add_rows", "merge_attention"])
def test_sums_and_merges(name: str) -> None:
    with torch.device("cuda"):
        assert getattr(kernel_cases, name)() > 0


def attend(
    kind: str, dtype: torch.dtype, *, causal: bool, groups: int, features: int = 64
) -> list[torch.Tensor]:
    B, S, H, E = 2, 130, 4, features
    q, grad = (torch.randn(B, H, S, E, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(B, H // groups, S, E, device="cuda", dtype=dtype) for _ in range(2))
    options: dict[str, Any] = {"causal": causal, "scale": None}
    results = []
    for chosen in (kind, "matmul"):
        tensors = [t if chosen == kind else t.double() for t in (q, k, v, grad)]
        query, key, value, gradient = tensors
        out, lse = attention_kernels.forward(query, key, value, None, kind=chosen, **options)
        given = (gradient, query, key, value, out, lse, None)
        grads = attention_kernels.backward(*given, kind=chosen, **options)
        results.append([out, lse, *grads])
    for found, wanted in zip(*results, strict=True):
        scale = wanted.abs().max()
        # Weights, products and results are rounded to the dtype.
        limit = 2**-6 if dtype.itemsize == 2 else 2**-9
        assert (found.double() - wanted).abs().max() <= limit * scale
    return results[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("flash", torch.bfloat16),
        ("cudnn", torch.bfloat16),
        ("efficient", torch.float16),
        ("efficient", torch.float32),
    ],
)
def test_attention_kernels(kind: str, dtype: torch.dtype, groups: int, causal: bool) -> None:
    attend(kind, dtype, causal=causal, groups=groups)


def test_flash_with_any_number_of_features() -> None:
    attend("flash", torch.float16, causal=True, groups=2, features=20)


@pytest.mark.parametrize("dtype", tile_matmul.DTYPES)
def test_matmuls_by_tiles(dtype: torch.dtype) -> None:
    """All shards have arrived; tests/cuda/test_tiles.py has shards that are still pulled."""
    W, M, K, N, rank = 3, 300, 264, 520, 1
    limit = 2**-6 if dtype.itemsize == 2 else 2**-18
    with torch.device("cuda"):
        shards, weight = torch.randn(W, M, K).to(dtype), torch.randn(N, K).to(dtype).t()
        words, out = torch.full((W, 16), 7, dtype=torch.int32), torch.empty(W * M, N, dtype=dtype)
        wanted = shards.flatten(0, 1).double() @ weight.double()
        marks = tile_matmul.Words(words.view(-1), 16, 7)
        tile_matmul.arrival_matmul(shards[rank], shards, rank + 1, weight, out, rank, marks)
        assert (out.double() - wanted).abs().max() <= limit * wanted.abs().max()
        parts, own = torch.empty(W, M, N, dtype=dtype), torch.empty(M, N, dtype=dtype)
        words.zero_()
        for epoch in (3, 4):
            parts.fill_(torch.nan)
            marks = tile_matmul.Words(words.view(-1), 16, epoch)
            tile_matmul.counted_matmul(shards.flatten(0, 1), weight, parts, own, rank, marks)
            parts[rank] = own
            error = (parts.flatten(0, 1).double() - wanted).abs().max()
            assert error <= limit * wanted.abs().max()
            assert words[:, 0].tolist() == [epoch] * (W - 1) + [0]
            assert not words[:, 1:].any()


def test_override_can_be_undone() -> None:
    name = "symm_mem::fused_all_gather_matmul"
    before = torch._C._dispatch_dump(name)
    with CudaOverride([CudaDevice]):
        assert torch._C._dispatch_dump(name) != before
    assert torch._C._dispatch_dump(name) == before
    assert symm_cp.override_cuda_ops() is symm_cp.override_cuda_ops()
    symm_cp.override_cuda_ops().undo()


_ONE_RANK = """
import sys, torch, torch.distributed as dist, symm_cp
dist.init_process_group(
    "cpu:gloo,cuda:nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1
)
torch.cuda.set_device(0)
symm_cp.nvshmem.init(heap_bytes=1 << 26)
symm_cp.nvshmem.enable(dist.group.WORLD)
symm_cp.override_cuda_ops()
x = torch.randn(64, 64, device="cuda")
out = symm_cp.all_gather_matmul(x, x, group=dist.group.WORLD)
torch.testing.assert_close(out, x @ x)
symm_cp.nvshmem.finalize()
dist.destroy_process_group()
print("finalized")
"""


def test_nvshmem_with_one_rank(tmp_path: Path) -> None:
    """The real library, where it is installed; else the error that says how to install it."""
    command = [sys.executable, "-c", _ONE_RANK, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if importlib.util.find_spec("nvshmem") is None:
        assert "pip install 'symm_cp[nvshmem]'" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "finalized" in done.stdout
