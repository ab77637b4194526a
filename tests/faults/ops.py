"""Small calls of every op, for tests that disturb them; inputs are drawn from torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh

import symm_cp
from symm_cp import tuning
from symm_cp.ops.recurrent.recurrence import Summary

OPS = torch.ops.symm_mem
Results = list[torch.Tensor]


def gather_matmul(group: dist.ProcessGroup) -> Results:
    with tuning.forced("shards"):
        return [symm_cp.all_gather_matmul(torch.randn(5, 6), torch.randn(6, 4), group=group)]


def gather_matmul_whole(group: dist.ProcessGroup) -> Results:
    with tuning.forced("whole"):
        return [symm_cp.all_gather_matmul(torch.randn(5, 6), torch.randn(6, 4), group=group)]


def matmul_scatter(group: dist.ProcessGroup) -> Results:
    x = torch.randn(5 * group.size(), 6)
    with tuning.forced("shards"):
        return [symm_cp.matmul_reduce_scatter(x, torch.randn(6, 4), group=group)]


def scaled_gather_matmul(group: dist.ProcessGroup) -> Results:
    """Native, with one exchange of the matrix and one of its rows' scales."""
    x, w = (torch.randn(n, 16).to(torch.float8_e4m3fn) for n in (5, 4))
    gathered, product = symm_cp.scaled_all_gather_matmul(
        x, w.t(), torch.rand(5, 1), torch.ones(1, 4), group=group, out_dtype=torch.float32
    )
    return [gathered.float(), product]


def scaled_matmul_scatter(group: dist.ProcessGroup) -> Results:
    x, w = (torch.randn(n, 16).to(torch.float8_e4m3fn) for n in (5 * group.size(), 4))
    one = torch.ones(())
    return [
        symm_cp.scaled_matmul_reduce_scatter(
            x, w.t(), one, one, group=group, out_dtype=torch.float32
        )
    ]


def matmul_all_reduce(group: dist.ProcessGroup) -> Results:
    name = group.group_name
    return [OPS.fused_matmul_all_reduce(torch.randn(5, 6), torch.randn(6, 4), None, "sum", name)]


def matmuls_all_reduce(group: dist.ProcessGroup) -> Results:
    """Uses the kernel in Python, part by part."""
    args = [torch.randn(5, 6)], [torch.randn(6, 4)], None, None, "sum", group.group_name
    with tuning.forced("shards"):
        return [OPS._fused_matmuls_all_reduce(*args)]


def attention(group: dist.ProcessGroup) -> Results:
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    return [symm_cp.all_gather_attention(q, k, v, group=group, is_causal=True)]


def attention_backward(group: dist.ProcessGroup) -> Results:
    leaves = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    out = symm_cp.all_gather_attention(*leaves, group=group)
    return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))


def attention_ring(group: dist.ProcessGroup) -> Results:
    symm_cp.set_rotate_method("alltoall")
    try:
        return attention_backward(group)
    finally:
        symm_cp.set_rotate_method("allgather")


def ulysses(group: dist.ProcessGroup) -> Results:
    """Attention by heads, forward and backward."""
    leaves = [torch.randn(1, 5, 6, 8, requires_grad=True) for _ in range(3)]
    out = symm_cp.all_gather_attention(*leaves, group=group, is_causal=True, method="ulysses")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


_meshes: dict[dist.ProcessGroup, DeviceMesh] = {}


def ulysses_on_a_mesh(group: dist.ProcessGroup) -> Results:
    """Attention on a mesh: by heads along its last dimension, gathering keys along its first."""
    W = group.size()
    if group not in _meshes:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 2 if W % 2 == 0 else W)
        _meshes[group] = DeviceMesh("cpu", ranks, mesh_dim_names=("keys", "heads"))
    leaves = [torch.randn(1, 3, 6, 8, requires_grad=True) for _ in range(3)]
    out = symm_cp.all_gather_attention(
        *leaves, group=_meshes[group], method=("allgather", "ulysses")
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def low_contention(group: dist.ProcessGroup) -> Results:
    name = group.group_name
    # Large enough to wake the copy engine.
    gathered = OPS._low_contention_all_gather(torch.randn(1 << 15), name)
    scattered = OPS._low_contention_reduce_scatter(torch.randn(group.size() << 15), "sum", name)
    return [wait_tensor(scattered), wait_tensor(gathered)]


def one_shot(group: dist.ProcessGroup) -> Results:
    return [OPS.one_shot_all_reduce(torch.randn(50), "sum", group.group_name)]


def two_shot(group: dist.ProcessGroup) -> Results:
    return [OPS.two_shot_all_reduce_(torch.randn(50), "sum", group.group_name)]


def two_shot_in_place(group: dist.ProcessGroup) -> Results:
    shared = _symmetric(group, torch.randn(50))
    return [OPS.two_shot_all_reduce_(shared, "sum", group.group_name).clone()]


def gather_in_place(group: dist.ProcessGroup) -> Results:
    shared = _symmetric(group, torch.randn(5, 6))
    with tuning.forced("shards"):
        return [symm_cp.all_gather_matmul(shared, torch.randn(6, 4), group=group)]


_shared: dict[tuple[str, torch.Size], torch.Tensor] = {}


def _symmetric(group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """The same memory in all calls of a group."""
    key = (str(group.group_name), values.shape)
    if key not in _shared:
        _shared[key] = symm_mem.empty(values.shape, device="cpu")
        symm_mem.rendezvous(_shared[key], group)
    return _shared[key].copy_(values)


def scatter_out(group: dist.ProcessGroup) -> Results:
    out = torch.empty(10)
    return [OPS.reduce_scatter_out(torch.randn(10 * group.size()), group.group_name, False, out)]


def experts(group: dist.ProcessGroup) -> Results:
    """Experts fused with their matmuls, in both passes; rank 0's matmuls run in two parts."""
    W = group.size()
    chosen = torch.zeros(600, 1, dtype=torch.int64)
    chosen[:40] = W - 1
    shapes = (600, 4), (1, 4, 5), (1, 5, 3)
    x, up, down = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    product, routing = symm_cp.moe.dispatch_matmul(x, up, chosen, W, group=group)
    return of_both_passes(symm_cp.moe.matmul_combine(product, down, None, routing), leaves)


def of_both_passes(out: torch.Tensor, leaves: Results) -> Results:
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def recurrence(group: dist.ProcessGroup) -> Results:
    """A sum of keys times values that decays."""

    def summary(decay: Any, key: torch.Tensor, value: torch.Tensor) -> Summary:
        return Summary(key * decay.to_end, value, None, (key,))

    def local(decay: Any, before: Any, written: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key @ before + written

    leaves = [torch.randn(1, 6, 2, size, requires_grad=True) for size in (3, 4)]
    g = -torch.rand(1, 6, 2)
    out, _ = symm_cp.recurrence(summary, local, leaves, g, group=group, chunk_size=2)
    return of_both_passes(out, leaves)


def rwkv7(group: dist.ProcessGroup) -> Results:
    r, k, v, a, b = leaves = [torch.randn(1, 6, 2, 3, requires_grad=True) for _ in range(5)]
    out, _ = symm_cp.rwkv7(r, -torch.rand(1, 6, 2, 3), k, v, a, b, group=group, chunk_size=2)
    return of_both_passes(out, leaves)


def spread_cache_scattered(group: dist.ProcessGroup) -> Results:
    shapes = (1, 2 * group.size(), 1, 4), (1, 2, 5, 4), (1, 2, 5, 4)
    query, key, value = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out, _ = symm_cp.spread_cache_attention(query, key, value, group=group, scatter_heads=True)
    return of_both_passes(out, leaves)


def normed_projection(group: dist.ProcessGroup) -> Results:
    shapes = (1, 4, 6), (6, 4 * group.size()), (2,)
    x, weight, norm = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = symm_cp.ulysses_projection(x, weight, features=2, norms=norm, group=group)
    return of_both_passes(out, leaves)


_backends: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def backend_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks with the backend symm_cp, made at the first call."""
    if group not in _backends:
        ranks = dist.get_process_group_ranks(group)
        _backends[group] = dist.new_group(ranks, backend="symm_cp")
    return _backends[group]


def backend(group: dist.ProcessGroup) -> Results:
    """Collectives of torch.distributed over the backend."""
    shared, W = backend_group(group), group.size()
    total, part, x = torch.randn(5000), torch.empty(20), torch.randn(20 * W)
    whole, exchanged = torch.empty(20 * W * W), torch.empty(20 * W)
    dist.all_reduce(total, group=shared)
    dist.all_gather_into_tensor(whole, x, group=shared)
    dist.reduce_scatter_tensor(part, x, group=shared)
    dist.all_to_all_single(exchanged, x, group=shared)
    dist.broadcast(x, group_src=W - 1, group=shared)
    dist.barrier(shared)
    return [total, whole, part, exchanged, x]


def backend_async(group: dist.ProcessGroup) -> Results:
    """Background collectives of the backend, with messages between neighbours."""
    shared, W, rank = backend_group(group), group.size(), group.rank()
    total, whole, received = torch.randn(1 << 15), torch.empty(50 * W), torch.empty(30)
    works = [
        dist.all_reduce(total, group=shared, async_op=True),
        dist.all_gather_into_tensor(whole, torch.randn(50), group=shared, async_op=True),
        dist.isend(torch.randn(30), group=shared, group_dst=(rank + 1) % W),
        dist.irecv(received, group=shared, group_src=(rank - 1) % W),
    ]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier(shared)  # a message may be lost if its sender dies
    return [total, whole, received]


ALL: dict[str, Callable[[dist.ProcessGroup], Results]] = {
    run.__name__: run
    for run in (
        gather_matmul, gather_matmul_whole, matmul_scatter, scaled_gather_matmul,
        scaled_matmul_scatter, matmul_all_reduce, matmuls_all_reduce,
        attention, attention_backward, attention_ring, ulysses, ulysses_on_a_mesh, low_contention,
        one_shot, two_shot, scatter_out, two_shot_in_place, gather_in_place, experts,
        recurrence, rwkv7, spread_cache_scattered, normed_projection, backend, backend_async,
    )
}  # fmt: skip


def results(group: dist.ProcessGroup, names: list[str], seed: int) -> list[torch.Tensor]:
    """The results of the ops, called one after another."""
    torch.manual_seed(seed + group.rank())
    return [result for name in names for result in ALL[name](group)]
