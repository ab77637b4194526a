"""Load balancers with a layout for each sample of a batch: `PerDocumentHeadTail` with lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import symm_cp
from tests.context_parallel.common import assert_all_close, mesh_of
from tests.exhaustive import some

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor | BlockMask | None,
    causal: bool,
) -> list[torch.Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    if isinstance(mask, BlockMask):
        out = flex_attention(*inputs, block_mask=mask)
    else:
        out = F.scaled_dot_product_attention(*inputs, mask, is_causal=causal)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_documents_of_each_sample(group: dist.ProcessGroup, world_size: int) -> None:
    # A group of its own: which layouts were used goes with the group.
    seed = int(torch.randint(1 << 30, ()))
    group = dist.new_group(list(range(group.size())))
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    documents = [[8 * W, 16 * W], [24 * W], [6 * W, 2 * W, 16 * W]]
    length, balancer = 24 * W, symm_cp.PerDocumentHeadTail(documents, W)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(3, 4, length, 16, dtype=torch.float64, generator=generator) for _ in range(4)
    )
    mask = torch.zeros(3, 1, length, length, dtype=torch.bool)
    for sample, lengths in enumerate(documents):
        blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
        mask[sample, 0] = torch.block_diag(*blocks)
    rows = balancer.positions(rank)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[:, own] for part, own in zip(tensor, rows, strict=True)])

    ids = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in documents])

    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[b, i] == ids[b, j]) & (i >= j)

    blocks = create_block_mask(same_document, 3, None, length, length, "cpu", BLOCK_SIZE=16)
    for attn_mask, causal in ((mask, False), (mask[1, 0], False), (None, True), (blocks, False)):
        dense = mask if attn_mask is blocks else attn_mask
        expected = attended(q, k, v, grad, dense, causal)
        buffers = [t.clone() for t in (q, k, v, grad)]
        with symm_cp.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, load_balancer=balancer
        ):
            assert all(
                torch.equal(b, mine(t)) for b, t in zip(buffers, (q, k, v, grad), strict=True)
            )
            found = attended(*buffers, attn_mask, causal)
            full = symm_cp.context_parallel_unshard(mesh, found, [2, -2, 2, 2])
        assert_all_close(found, [mine(t) for t in expected])
        assert_all_close(full, expected)
        assert torch.equal(buffers[0], q)
    shards = symm_cp.context_parallel_shard(mesh, {"q": q}, {"q": 2}, balancer)
    assert torch.equal(symm_cp.context_parallel_unshard(mesh, [shards["q"]], [2])[0], q)
    local, _ = symm_cp.shard_batch(
        mesh, {"input_ids": torch.zeros(3, length)}, load_balancer=balancer
    )
    assert torch.equal(local["position_ids"], rows)


@pytest.mark.ranks(2)
def test_where_layouts_of_samples_are_refused(group: dist.ProcessGroup) -> None:
    mesh, q = mesh_of(group), torch.randn(2, 1, 8, 8)
    balancer = symm_cp.PerDocumentHeadTail([[4, 12], [16]], 2)
    one = symm_cp.PerDocumentHeadTail([[4, 12]], 2)
    assert one == symm_cp.PerDocumentHeadTail([4, 12], 2)
    with pytest.raises(NotImplementedError, match="has a layout for each of 2 samples"):
        symm_cp.all_gather_attention(q, q, q, group=group, load_balancer=balancer)
    for x, dim in ((torch.zeros(16), 0), (torch.zeros(3, 16), 1)):
        with pytest.raises(ValueError, match="has no batch of 2 samples in dimension 0"):
            symm_cp.context_parallel_shard(mesh, [x], [dim], balancer)
    with symm_cp.context_parallel(mesh, load_balancer=balancer):
        with pytest.raises(ValueError, match="has 1 samples, PerDocument"):
            F.scaled_dot_product_attention(q[:1], q[:1], q[:1])
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
