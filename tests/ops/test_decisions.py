"""Ranks make the same decisions: correct programs never fail with "ranks disagree"."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import symm_cp
from symm_cp import LoadBalancer
from symm_cp.schedule import SequenceLayout
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some
from tests.ops.calls import Memory

#: Numbers of queries and keys of each rank, which are often equal on some ranks only.
LENGTHS: dict[int, list[tuple[list[int], list[int]]]] = {
    2: [([3, 1], [3, 3]), ([4, 4], [4, 2]), ([0, 5], [5, 5]), ([2, 3], [2, 3])],
    3: [([2, 4, 3], [3, 3, 3]), ([3, 3, 3], [3, 5, 1]), ([1, 0, 2], [4, 0, 2])],
    4: [([3, 3, 2, 3], [3, 3, 3, 3]), ([2, 2, 2, 2], [5, 2, 0, 2])],
}
METHODS = ("allgather", "auto", "ulysses")


def shards(lengths: list[int], heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(2, heads, sum(lengths), 8, generator=generator, dtype=torch.float64)
    return list(whole.split(lengths, 2))


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.ranks
def test_queries_of_another_sequence(group: dist.ProcessGroup, world_size: int) -> None:
    """Ranks exchange how many queries each holds, unless something else determines it."""
    rank, size = group.rank(), group.size()
    for number, (of_queries, of_keys) in enumerate(LENGTHS[size]):
        queries, keys, values = (
            shards(lengths, size, seed)
            for seed, lengths in enumerate((of_queries, of_keys, of_keys))
        )
        expected = F.scaled_dot_product_attention(
            queries[rank], *(torch.cat(t, 2) for t in (keys, values))
        )
        for method in METHODS:
            own = [t[rank].clone().requires_grad_() for t in (queries, keys, values)]
            out, _ = torch.ops.symm_mem.fused_all_gather_attention(
                *own, group.group_name, chunk_lengths=of_keys, method=method
            )
            torch.testing.assert_close(out, expected, msg=f"{number} {method}")
            out.sum().backward()


@pytest.mark.ranks(4)
def test_queries_of_another_sequence_over_a_mesh(group: dist.ProcessGroup) -> None:
    """The ranks of a column exchange how many queries they hold, then the ranks of a row do."""
    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "keys"))
    for of_queries, of_keys in (*LENGTHS[size], ([1, 7, 4, 0], [3, 3, 3, 3])):
        queries, keys, values = (
            shards(lengths, 4, seed) for seed, lengths in enumerate((of_queries, of_keys, of_keys))
        )
        whole = [torch.cat(t, 2).requires_grad_() for t in (queries, keys, values)]
        expected = F.scaled_dot_product_attention(*whole)
        expected.square().sum().backward()
        balancer = LoadBalancer(SequenceLayout(size, tuple(range(size)), tuple(of_keys)))
        for method in (("ulysses", "allgather"), ("allgather", "ulysses")):
            own = [t[rank].clone().requires_grad_() for t in (queries, keys, values)]
            out = symm_cp.all_gather_attention(
                *own, group=mesh, load_balancer=balancer, method=method
            )
            case = f"{of_queries} {of_keys} {method}"
            torch.testing.assert_close(out, expected.split(of_queries, 2)[rank], msg=case)
            out.square().sum().backward()
            for mine, whole_of, lengths in zip(
                own, whole, (of_queries, of_keys, of_keys), strict=True
            ):
                assert whole_of.grad is not None
                torch.testing.assert_close(
                    mine.grad, whole_of.grad.split(lengths, 2)[rank], msg=case
                )


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_cross_attention_in_a_context(group: dist.ProcessGroup, world_size: int) -> None:
    """Cross-attention with queries that are spread unequally, of which no mask tells keys apart."""
    rank, size = group.rank(), group.size()
    of_queries = [5, *(3,) * (size - 1)]
    balancer = LoadBalancer(SequenceLayout(size, tuple(range(size)), tuple(of_queries)))
    for of_keys in ([5] * size, [3] * size, of_queries):
        queries, keys, values = (
            shards(lengths, 2, seed) for seed, lengths in enumerate((of_queries, of_keys, of_keys))
        )
        expected = F.scaled_dot_product_attention(
            queries[rank], *(torch.cat(t, 2) for t in (keys, values))
        )
        with symm_cp.context_parallel(group, load_balancer=balancer):
            out = F.scaled_dot_product_attention(queries[rank], keys[rank], values[rank])
        torch.testing.assert_close(out, expected, msg=f"{of_keys}")


# --- random programs ---------------------------------------------------------------------------


def sizes_of(rng: random.Random, ranks: int) -> list[int]:
    """Equal parts, or parts of random lengths, some of which are empty or have one row."""
    if rng.random() < 0.3:
        return [rng.choice([1, 3, 40])] * ranks
    return [rng.choice([0, 1, 1, 2, 5, 40]) for _ in range(ranks)]


def step(group: dist.ProcessGroup, memory: Memory, alike: random.Random, seed: int) -> None:
    """Attention, or a background gather; `alike` draws the same on all ranks, `random` does not."""
    W, rank, name = group.size(), group.rank(), group.group_name
    numbers = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    sizes = sizes_of(alike, W)
    kind = alike.randrange(3)
    if kind == 0:
        of_all = [tensor(3, 17) for _ in range(W)]
        # Symmetric memory on all ranks or on none: background calls do not ask peers about it.
        out = symm_cp.low_contention_all_gather(of_all[rank].clone(), group=group)
        own = memory.place(tensor(2, 3))
        symm_cp.all_gather_matmul(own, tensor(3, 2), group=group)
        torch.testing.assert_close(out, torch.cat(of_all))
    else:
        of_keys = sizes
        of_queries = [alike.choice([size, size, 2, 0]) for size in sizes]
        q, k, v = (
            shards(lengths, W, seed + n) for n, lengths in enumerate((of_queries, of_keys, of_keys))
        )
        method, causal = alike.choice(METHODS), kind == 2
        if causal:
            q = shards(of_keys, W, seed)
        out, _ = torch.ops.symm_mem.fused_all_gather_attention(
            *(memory.place(t[rank].float()) for t in (q, k, v)),
            name,
            is_causal=causal,
            chunk_lengths=of_keys,
            method=method,
        )
        if sum(of_keys) == 0:
            assert not out.any()
            return
        q, k, v = (torch.cat(t, 2).float() for t in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        mine = expected.split(of_keys if causal else of_queries, 2)[rank]
        torch.testing.assert_close(out, mine, rtol=1e-4, atol=1e-4)


def programs(group: dist.ProcessGroup, seed: int, steps: int) -> None:
    memory = Memory(group)
    alike = random.Random(seed)
    random.seed(seed * 10 + group.rank())
    for number in range(steps):
        try:
            step(group, memory, alike, seed + number)
        except Exception as error:
            raise AssertionError(f"step {number} of program {seed}: {error}") from error


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
def test_random_programs(ranks: Ranks, world_size: int) -> None:
    """Attention to parts and of queries of any sizes; each rank lays out its tensors at random."""
    ranks.run(world_size, programs, torch.initial_seed() % 100_000, 80)


@pytest.mark.ranks(3)
def test_what_differs_by_rank_decides_nothing(group: dist.ProcessGroup) -> None:
    """Weight columns and inner dimensions that differ between ranks do not affect decisions."""
    rank, size = group.rank(), group.size()
    x = torch.ones(2, 8)
    large = 4096 if rank == 0 else 1  # by itself this product would be worth a pipeline
    y = symm_cp.all_gather_matmul(x, torch.ones(8, large), group=group)
    assert torch.equal(y, torch.full((2 * size, large), 8.0))
    inner = 4096 if rank == 0 else 1
    z = symm_cp.matmul_reduce_scatter(
        torch.ones(2 * size, inner), torch.ones(inner, 3), group=group
    )
    assert torch.equal(z, torch.full((2, 3), 4096.0 + size - 1))


@pytest.mark.ranks(2)
def test_parts_that_are_contiguous_on_one_rank(group: dist.ProcessGroup) -> None:
    """A background gather of columns of symmetric memory, which are contiguous in a single row."""
    W, rank, columns = group.size(), group.rank(), 20_000
    block = symm_mem.empty(3 * (columns + 5), dtype=torch.float32, device="cpu")
    symm_mem.rendezvous(block, group)
    sizes = [1, *(3,) * (W - 1)]
    part = block.view(3, columns + 5)[: sizes[rank], :columns]
    part.fill_(rank)
    found = symm_cp.low_contention_all_gather(part, group=group, sizes=sizes)
    of_rows = torch.arange(W).repeat_interleave(torch.tensor(sizes))
    assert torch.equal(found, of_rows[:, None].expand(-1, columns).float())


@exhaustive
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_random_programs(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, programs, torch.initial_seed() % 100_000, 1500)
