"""`ContextParallel`, DTensors, and `all_gather_attention` for direct use."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import symm_cp
from tests.attention_reference import Problem
from tests.context_parallel.common import CLOSE, assert_all_close, dense, mesh_of, whole
from tests.context_parallel.test_methods import MIXED, exchanges, mesh_2d
from tests.exhaustive import some

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v)


METHODS = [(2, "ulysses", None), (4, "ulysses", None), (4, MIXED, (2, 2))]


@pytest.mark.parametrize(
    ("world_size", "method", "shape"),
    some((2, None, None), METHODS[0], of=[*((W, None, None) for W in (1, 2, 3, 4)), *METHODS]),
)
@pytest.mark.ranks
def test_style_needs_no_context(
    group: dist.ProcessGroup, world_size: int, method: Any, shape: tuple[int, int] | None
) -> None:
    W = group.size()
    given, mesh = whole(11, 10 * W), mesh_of(group) if shape is None else mesh_2d(shape)
    for balancer in (None, symm_cp.Sequential(10 * W, W)):
        style = symm_cp.ContextParallel(2, "scaled_dot_product_attention", balancer, method)
        block = parallelize_module(Block(), mesh, {"attention": style})
        rows = (balancer or symm_cp.HeadTail(10 * W, W)).positions(group.rank())
        shards = [t[:, :, rows].requires_grad_() for t in given[:3]]
        expected = [t[:, :, rows] for t in dense(given)]
        for recompute in (False, True):  # in the backward pass, out of any context
            with exchanges() as made:
                attend = functools.partial(checkpoint, block, use_reentrant=False)
                out = (attend if recompute else block)(*shards)
                grads = torch.autograd.grad(out, shards, given[3][:, :, rows])
            assert made == (["forward"] * (1 + recompute) + ["backward"] if method else [])
            assert_all_close([out.detach(), *grads], expected)
    # Outside of the module nothing has changed.
    full = F.scaled_dot_product_attention(*given[:3], is_causal=True)
    assert torch.equal(full, F.scaled_dot_product_attention(*given[:3], is_causal=True))


@pytest.mark.ranks(2)
def test_style_refuses_what_it_was_not_made_for(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    with pytest.raises(ValueError, match="seq_dim=1 must be 2"):
        symm_cp.ContextParallel(1)
    with pytest.raises(ValueError, match="paged"):
        symm_cp.ContextParallel(2, "paged")
    with pytest.raises(
        ValueError, match=r"ContextParallel: HeadTail.* does not fit a sequence of 8"
    ):
        parallelize_module(
            Attention(), mesh, symm_cp.ContextParallel(load_balancer=symm_cp.HeadTail(8, 3))
        )
    flex = symm_cp.ContextParallel.AttentionType.FLEX
    block = parallelize_module(Attention(), mesh, symm_cp.ContextParallel(2, flex))
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="the module called scaled_dot_product_attention"):
        block(q, q, q)


@WORLD_SIZES
@pytest.mark.ranks
def test_dtensors_keep_their_placement(group: dist.ProcessGroup, world_size: int) -> None:
    W, mesh = group.size(), mesh_of(group)
    given = whole(13, 8 * W)
    rows = symm_cp.HeadTail(8 * W, W).positions(group.rank())
    expected = [t[:, :, rows] for t in dense(given)]
    shards = [t[:, :, rows].requires_grad_() for t in given[:3]]
    for dim in (2, -2):
        tensors = [DTensor.from_local(t, mesh, [Shard(dim)], run_check=False) for t in shards]
        with symm_cp.context_parallel(mesh):
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert isinstance(out, DTensor)
        assert out.placements == tensors[0].placements
        assert out.shape == given[0].shape
        grads = torch.autograd.grad(out.to_local(), shards, given[3][:, :, rows])
        assert_all_close([out.to_local().detach(), *grads], expected)
    mask = torch.ones(8 * W, 8 * W, dtype=torch.bool)
    with (
        symm_cp.context_parallel(mesh),
        pytest.raises(NotImplementedError, match="DTensors with a tensor"),
    ):
        F.scaled_dot_product_attention(*tensors, mask)
    replicated = DTensor.from_local(given[0], mesh, [Replicate()], run_check=False)
    with pytest.raises(ValueError, match=r"must be Shard\(2\)"):
        symm_cp.all_gather_attention(replicated, *tensors[1:], group=group)
    with pytest.raises(TypeError, match="query is a DTensor"):
        symm_cp.all_gather_attention(tensors[0], *shards[1:], group=group)
    with pytest.raises(TypeError, match="query is not"):
        symm_cp.all_gather_attention(shards[0], *tensors[1:], group=group)


@pytest.mark.ranks(4)
def test_tensor_parallel_heads_and_a_context_parallel_sequence(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = (mesh.get_local_rank(name) for name in ("cp", "tp"))
    given = whole(17, 12)
    rows = symm_cp.HeadTail(12, 2).positions(cp)
    shards = [t[:, 2 * tp : 2 * tp + 2][:, :, rows].requires_grad_() for t in given[:3]]
    tensors = [DTensor.from_local(t, mesh, [Shard(2), Shard(1)], run_check=False) for t in shards]
    with symm_cp.context_parallel(mesh["cp"]):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
    assert out.shape == given[0].shape
    mine = [t[:, 2 * tp : 2 * tp + 2][:, :, rows] for t in (*dense(given), given[3])]
    grads = torch.autograd.grad(out.to_local(), shards, mine[4])
    assert_all_close([out.to_local().detach(), *grads], mine[:4])


@pytest.mark.ranks(4)
def test_sinks_and_biases_of_tensor_parallel_heads(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = (mesh.get_local_rank(name) for name in ("cp", "tp"))
    q, k, v, grad = (t.double() for t in whole(17, 12))
    H, seen = q.shape[1], torch.ones(12, 12).tril().bool()
    sinks, bias = torch.randn(H).double(), torch.randn(H, 23).double()
    exact = Problem(q, k, v, seen, grad, sinks=sinks, bias=bias).solve(torch.float64)
    balancer = symm_cp.HeadTail(12, 2)
    heads, rows = slice(2 * tp, 2 * tp + 2), balancer.positions(cp)
    places = [Shard(2), Shard(1)]
    tensors = [
        DTensor.from_local(t[:, heads][:, :, rows], mesh, places, run_check=False)
        for t in (q, k, v)
    ]
    added = [
        DTensor.from_local(t[heads], mesh, [Replicate(), Shard(0)], run_check=False)
        for t in (sinks, bias)
    ]
    leaves = [t.requires_grad_() for t in added]
    options = {"group": mesh["cp"], "is_causal": True, "load_balancer": balancer}
    out = symm_cp.all_gather_attention(*tensors, sinks=leaves[0], bias=leaves[1], **options)
    grads = torch.autograd.grad(out.to_local(), leaves, grad[:, heads][:, :, rows])
    found = [out.to_local().detach(), *(t.full_tensor() for t in grads)]
    assert_all_close(found, [exact["out"][:, heads][:, :, rows], exact["sinks"], exact["bias"]])
    everywhere = DTensor.from_local(sinks, mesh, [Replicate()] * 2, run_check=False)
    with pytest.raises(ValueError, match="sinks is a DTensor with placements"):
        symm_cp.all_gather_attention(*tensors, sinks=everywhere, **options)
    dropout = {"dropout_p": 0.1, "dropout_seed": torch.tensor(1)}
    with pytest.raises(NotImplementedError, match="sharded along samples or heads"):
        symm_cp.all_gather_attention(*tensors, **dropout, **options)


@WORLD_SIZES
@pytest.mark.ranks
def test_documents_and_windows_for_direct_use(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    documents = [9, 4, 8 * W]
    length = sum(documents)
    q, k, v, _ = whole(19, length)
    balancer = symm_cp.PerDocumentHeadTail(documents, W)
    rows = balancer.positions(rank)
    number = torch.repeat_interleave(torch.arange(3), torch.tensor(documents))
    mask = (number[:, None] == number[None, :]).tril().triu(-5)
    expected = F.scaled_dot_product_attention(q, k, v, mask)[:, :, rows]
    scores = (q @ k.mT / 4).masked_fill(~mask, -torch.inf)
    for edges in (balancer.cu_seqlens, balancer.cu_seqlens.tolist()):
        out, lse = symm_cp.all_gather_attention(
            *(t[:, :, rows] for t in (q, k, v)),
            group=group,
            is_causal=True,
            load_balancer=balancer,
            cu_seqlens=edges,
            window_left=5,
            return_lse=True,
        )
        torch.testing.assert_close(out, expected, **CLOSE)
        torch.testing.assert_close(lse, scores.logsumexp(-1)[:, :, rows], **CLOSE)
    with pytest.raises(TypeError, match=r"all_gather_attention: cu_seqlens must .* ints, has 9\.5"):
        symm_cp.all_gather_attention(out, out, out, group=group, cu_seqlens=[0, 9.5])  # type: ignore[list-item]
