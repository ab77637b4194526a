"""Load balancers: permutations, lengths, and how even the work is."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import symm_cp
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Mask
from symm_cp.schedule.tiles import pairs

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])


def causal(b: object, h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return q_idx >= kv_idx


def block_mask(length: int) -> object:
    return create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def all_of(length: int, world_size: int) -> list[symm_cp.LoadBalancer]:
    return [
        symm_cp.Sequential(length, world_size),
        symm_cp.HeadTail(length, world_size),
        symm_cp.PerDocumentHeadTail([3, 0, length - 4, 1], world_size),
        symm_cp.ProcessingTimeRoundRobin(block_mask(length), world_size),
        symm_cp.LoadBalancer(
            SequenceLayout(
                world_size, tuple(range(world_size)), (length,) + (0,) * (world_size - 1)
            )
        ),
    ]


@WORLD_SIZES
@pytest.mark.parametrize("length", [64, 61, 5])
def test_permutations(world_size: int, length: int) -> None:
    for balancer in all_of(length, world_size):
        order, inverse = balancer.permutation(), balancer.inverse()
        counted = torch.arange(length)
        assert torch.equal(order.sort().values, counted)
        assert torch.equal(order[inverse], counted)
        shards = [balancer.positions(rank) for rank in range(world_size)]
        assert torch.equal(torch.cat(shards), order)
        assert [len(shard) for shard in shards] == balancer.lengths
        assert sum(balancer.chunk_lengths) == balancer.seq_length == length
        assert sorted(balancer.chunk_order) == list(range(len(balancer.chunk_lengths)))
        assert len(balancer.chunk_order) % world_size == 0
        assert type(balancer).__name__ in repr(balancer)


@WORLD_SIZES
def test_documents_are_spread_one_by_one(world_size: int) -> None:
    documents = [64 * world_size, 16 * world_size, 160 * world_size]
    balancer = symm_cp.PerDocumentHeadTail(documents, world_size)
    edges = balancer.cu_seqlens
    assert edges.dtype == torch.int32
    assert edges.tolist() == [0, documents[0], documents[0] + documents[1], sum(documents)]
    mask = Mask(right=0, documents=tuple(edges.tolist()))
    work = {pairs(balancer.layout, mask, rank) for rank in range(world_size)}
    assert len(work) == 1


@WORLD_SIZES
def test_processing_time_is_dealt_evenly(world_size: int) -> None:
    length = 16 * 8 * world_size
    balancer = symm_cp.ProcessingTimeRoundRobin(block_mask(length), world_size)
    assert len(set(balancer.lengths)) == 1
    assert max(balancer.work) - min(balancer.work) <= world_size
    assert sum(balancer.work) == 8 * world_size * (8 * world_size + 1) // 2
    # Where work is uneven the plain order is not balanced.
    if world_size > 1:
        work = [
            pairs(symm_cp.Sequential(length, world_size).layout, Mask(right=0), r)
            for r in range(world_size)
        ]
        assert max(work) > 1.5 * min(work)


@WORLD_SIZES
def test_documents_of_each_sample(world_size: int) -> None:
    each = 2 * world_size
    lists = [[each, 3 * each], [4 * each], [2 * each, each, each]]
    balancer = symm_cp.PerDocumentHeadTail(lists, world_size)
    single = [symm_cp.PerDocumentHeadTail(lengths, world_size) for lengths in lists]
    assert list(balancer.samples) == single
    assert balancer.lengths == [8] * world_size
    assert balancer.seq_length == 4 * each
    for rank in range(world_size):
        expected = torch.stack([sample.positions(rank) for sample in single])
        assert torch.equal(balancer.positions(rank), expected)
    order, inverse = balancer.permutation(), balancer.inverse()
    assert torch.equal(order.gather(1, inverse), torch.arange(4 * each).expand(3, -1))
    assert single[0] != balancer != symm_cp.PerDocumentHeadTail(lists[::-1], world_size)
    assert hash(balancer) == hash(symm_cp.PerDocumentHeadTail(lists, world_size))
    assert balancer.document_lengths == lists
    for use in (lambda: balancer.layout, lambda: balancer.cu_seqlens, lambda: balancer.chunk_order):
        with pytest.raises(NotImplementedError, match="has a layout for each of 3 samples"):
            use()


def test_errors() -> None:
    with pytest.raises(ValueError, match="document_lengths must not be empty"):
        symm_cp.PerDocumentHeadTail([[]], 2)
    with pytest.raises(TypeError, match="mixes lists and numbers"):
        symm_cp.PerDocumentHeadTail([8, [8]], 2)
    with pytest.raises(
        ValueError, match=r"\[3, 2\] positions of sample 1 and \[4, 4\] of sample 0"
    ):
        symm_cp.PerDocumentHeadTail([[8], [5]], 2)
    with pytest.raises(ValueError, match="document_lengths must not be empty"):
        symm_cp.PerDocumentHeadTail([], 2)
    crossed = create_block_mask(causal, None, None, 32, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match="32 queries and 64 keys"):
        symm_cp.ProcessingTimeRoundRobin(crossed, 2)
    halves, quarters = symm_cp.Sequential(8, 2).layout, symm_cp.Sequential(8, 4).layout
    with pytest.raises(ValueError, match=r"got \[\(2, 2, 2, 2\), \(4, 4\)\]"):
        symm_cp.LoadBalancer(halves, quarters)
    with pytest.raises(ValueError, match="must be at least one"):
        symm_cp.LoadBalancer()
    with pytest.raises(ValueError, match="must not be negative"):
        symm_cp.HeadTail(-1, 2)
    assert symm_cp.HeadTail(8, 2) == symm_cp.HeadTail(8, 2) != symm_cp.Sequential(8, 2)
