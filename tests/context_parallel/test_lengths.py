"""Sequences of several lengths in one context, each with its own load balancer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import symm_cp
from symm_cp.context_parallel.region import region_over
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, assert_all_close, mesh_of
from tests.exhaustive import exhaustive, some

Balancers = dict[int, symm_cp.LoadBalancer]


def balancers_of(kind: str, W: int, queries: int, keys: int) -> Balancers:
    one, other = symm_cp.HeadTail, symm_cp.Sequential
    if kind == "reverse":
        one, other = other, one
    return {queries: one(queries, W), keys: other(keys, W)}


def tensors(seed: int, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (queries, keys, keys, queries)
    return [torch.randn(2, 3, n, 8, dtype=torch.float64, generator=generator) for n in sizes]


def shards(group: dist.ProcessGroup, whole: list[torch.Tensor], by: Balancers) -> Any:
    """This rank's parts, and a function from a whole tensor to this rank's part."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, by[tensor.shape[2]].positions(group.rank())]

    q, k, v = (part(t).requires_grad_() for t in whole[:3])
    return q, k, v, part


def earlier(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask by the positions of queries and keys, which belong to different sequences."""
    return (kv_idx <= 2 * q_idx) & (kv_idx % 5 != 3)


def dense(whole: list[torch.Tensor], mask: torch.Tensor | None, causal: bool = False) -> Any:
    q, k, v = (t.clone().requires_grad_() for t in whole[:3])
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    return out.detach(), torch.autograd.grad(out, (q, k, v), whole[3])


def visible(queries: int, keys: int) -> torch.Tensor:
    return earlier(0, 0, torch.arange(queries)[:, None], torch.arange(keys))


def attends_across(group: dist.ProcessGroup, kind: str, queries: int, keys: int, seed: int) -> None:
    """Self- and cross-attention, with and without masks, by both functions, in one context."""
    W = group.size()
    by, whole = balancers_of(kind, W, queries, keys), tensors(seed, queries, keys)
    mask = visible(queries, keys)
    blocks = create_block_mask(earlier, None, None, queries, keys, device="cpu", BLOCK_SIZE=16)
    table = torch.randn(queries, keys, dtype=torch.float64)
    dist.broadcast(table, 0, group=group)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + table[q_idx, kv_idx]

    cases = [
        (dense(whole, None), lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
        (dense(whole, mask), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)),
        (dense(whole, table), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, table)),
        (dense(whole, None), lambda q, k, v: flex_attention(q, k, v)),
        (dense(whole, mask), lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)),
        (dense(whole, table), lambda q, k, v: flex_attention(q, k, v, score_mod=score)),
    ]
    local = by[queries].lengths[group.rank()], by[keys].lengths[group.rank()]
    functions = [by, lambda length: by[(queries, keys)[local.index(length)]]]
    for given in functions:
        for (out, grads), attend in cases:
            q, k, v, part = shards(group, whole, by)
            with symm_cp.context_parallel(mesh_of(group), load_balancer=given):
                got = attend(q, k, v)
                found = torch.autograd.grad(got, (q, k, v), part(whole[3]))
            assert_all_close([got, *found], [part(out), *(part(grad) for grad in grads)])
        # Self-attention over either sequence.
        for length in (queries, keys):
            own = tensors(seed + 1, length, length)
            out, grads = dense(own, None, causal=True)
            q, k, v, part = shards(group, own, by)
            with symm_cp.context_parallel(mesh_of(group), load_balancer=given):
                got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                found = torch.autograd.grad(got, (q, k, v), part(own[3]))
            assert_all_close([got, *found], [part(out), *(part(grad) for grad in grads)])


@pytest.mark.parametrize(
    ("world_size", "kind", "queries", "keys"),
    some(
        (2, "plain", 12, 21),
        of=[
            (W, kind, queries, keys)
            for W in (1, 2, 3, 4)
            for kind in ("plain", "reverse")
            for queries, keys in ((12, 21), (40, 9))
        ],
    ),
)
def test_each_length_has_its_layout(
    ranks: Ranks, world_size: int, kind: str, queries: int, keys: int
) -> None:
    seed = int(torch.randint(1 << 30, ()))
    ranks.run(world_size, attends_across, kind, queries, keys, seed)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_by_default_every_length_is_head_tail(group: dist.ProcessGroup, world_size: int) -> None:
    """Without load balancers, each length is cut as `shard_batch` cuts it by default."""
    W = group.size()
    by = {n * W: symm_cp.HeadTail(n * W, W) for n in (4, 6)}
    whole, mask = tensors(3, 4 * W, 6 * W), visible(4 * W, 6 * W)
    out, grads = dense(whole, mask)
    q, k, v, part = shards(group, whole, by)
    with symm_cp.context_parallel(mesh_of(group)):
        got = F.scaled_dot_product_attention(q, k, v, mask)
        found = torch.autograd.grad(got, (q, k, v), part(whole[3]))
    assert_all_close([got, *found], [part(out), *(part(grad) for grad in grads)])


@pytest.mark.ranks(2)
def test_buffers_of_several_lengths(group: dist.ProcessGroup) -> None:
    W, rank, mesh = group.size(), group.rank(), mesh_of(group)
    by = {12: symm_cp.HeadTail(12, W), 22: symm_cp.Sequential(22, W)}
    one, other = torch.randn(12, 2), torch.randn(2, 22)
    wanted = one[by[12].positions(rank)], other[:, by[22].positions(rank)]
    parts = symm_cp.context_parallel_shard(mesh, [one, other], [0, 1], by)
    for got, want in zip(parts, wanted, strict=True):
        assert torch.equal(got, want)
    whole = one.clone(), other.clone()
    with symm_cp.context_parallel(
        mesh, buffers=[one, other], buffer_seq_dims=[0, 1], load_balancer=by
    ):
        assert torch.equal(one, wanted[0])
        assert torch.equal(other, wanted[1])
        joined = symm_cp.context_parallel_unshard(mesh, [one, other], [0, 1])
    for got, restored, want in zip(joined, (one, other), whole, strict=True):
        assert torch.equal(restored, want)
        dist.broadcast(want, 0, group=group)
        if rank == 0:
            assert torch.equal(got, want)


@pytest.mark.ranks(2)
def test_what_is_ambiguous_is_refused(group: dist.ProcessGroup) -> None:
    mesh, W = mesh_of(group), group.size()
    by = {8: symm_cp.HeadTail(8, W), 12: symm_cp.Sequential(12, W)}

    def refused(error: type[Exception], match: str, load_balancer: Any, **options: Any) -> None:
        with (
            pytest.raises(error, match=match),
            symm_cp.context_parallel(mesh, load_balancer=load_balancer, **options),
        ):
            raise AssertionError

    refused(ValueError, "HeadTail.*8, .*does not fit a sequence of 9", {9: by[8]})
    refused(ValueError, "does not fit a sequence of 8", symm_cp.HeadTail(8, W + 1))
    refused(ValueError, "is an empty mapping", {})
    refused(TypeError, "of 8 positions is a str", {8: "head-tail"})
    refused(TypeError, "load_balancer is a str", "head-tail")
    # 9 positions are cut into 5 and 4, 10 into 5 and 5: rank 0 could not tell the lengths apart.
    close = {9: symm_cp.Sequential(9, W), 10: symm_cp.Sequential(10, W)}
    refused(ValueError, "rank 0 has 5 rows of .*9.* and of .*10.*pad the sequence", close)
    buffers = {"buffers": [torch.zeros(9)], "buffer_seq_dims": [0]}
    refused(ValueError, r"has lengths \[8, 12\], none of 9", by, **buffers)
    refused(TypeError, "is a function, must be", lambda length: by[8], **buffers)

    q, k, v, _ = tensors(0, 4, 6)
    mask = visible(8, 12)

    def within(load_balancer: Any, *args: Any, **options: Any) -> None:
        with symm_cp.context_parallel(mesh, load_balancer=load_balancer):
            F.scaled_dot_product_attention(*args, **options)

    with pytest.raises(ValueError, match=r"has 5 positions, but .* give it \[4, 6\]"):
        within(by, *(torch.zeros(1, 1, 5, 8),) * 3, is_causal=True)
    with pytest.raises(ValueError, match=r"load_balancer\(4\) returned .* gives rank . 6 pos"):
        within(lambda length: by[12], q, k, v, mask)
    with pytest.raises(TypeError, match=r"load_balancer\(4\) returned a NoneType"):
        within(lambda length: None, q, k, v, mask)
    # One load balancer does not give the order of keys of another length, which matters here ...
    with pytest.raises(ValueError, match=r"4 queries and 6 keys.*is for sequences of one length"):
        within(by[8], q, k, v, mask)
    within(by[8], q, k, v)  # ... and not here


class Crossed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        if self.kind == "flex_attention":
            return flex_attention(q, k, v, block_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("compiled", some(False, of=[False, True]))
@pytest.mark.ranks(2)
def test_the_style_takes_several_lengths(group: dist.ProcessGroup, compiled: bool) -> None:
    torch._dynamo.reset()
    queries, keys = 12, 22
    by = balancers_of("plain", group.size(), queries, keys)
    whole = tensors(5, queries, keys)
    blocks = create_block_mask(earlier, None, None, queries, keys, device="cpu", BLOCK_SIZE=16)
    out, grads = dense(whole, visible(queries, keys))
    for kind, mask in (("flex_attention", blocks), ("scaled_dot_product_attention", None)):
        if mask is None:
            if compiled:
                continue
            mask = visible(queries, keys)
        style = symm_cp.ContextParallel(attention_type=kind, load_balancer=by)
        module = parallelize_module(Crossed(kind), mesh_of(group), style)
        forward = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        q, k, v, part = shards(group, whole, by)
        got = forward(q, k, v, mask)
        found = torch.autograd.grad(got, (q, k, v), part(whole[3]))
        assert_all_close([got, *found], [part(out), *(part(grad) for grad in grads)])


@exhaustive
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.ranks(2)
def test_compiled_code_takes_the_layouts_of_its_region(
    group: dist.ProcessGroup, dynamic: bool
) -> None:
    """One compiled function runs in several regions, in each with the region's layouts."""
    torch._dynamo.reset()
    queries, keys, W = 12, 22, group.size()
    whole = tensors(7, queries, keys)
    blocks = create_block_mask(earlier, None, None, queries, keys, device="cpu", BLOCK_SIZE=16)
    masked, full = dense(whole, visible(queries, keys)), dense(whole, None)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def attend(q: Any, k: Any, v: Any) -> Any:
        return (
            flex_attention(q, k, v, block_mask=blocks),
            F.scaled_dot_product_attention(q, k, v),
        )

    for kind in ("plain", "reverse", "plain"):
        by = balancers_of(kind, W, queries, keys)
        q, k, v, part = shards(group, whole, by)
        with symm_cp.context_parallel(mesh_of(group), load_balancer=by):
            results = attend(q, k, v)
            found = torch.autograd.grad(results, (q, k, v), [part(whole[3])] * 2)
        assert_all_close(results, [part(out) for out, _ in (masked, full)])
        grads = [sum(pair) for pair in zip(masked[1], full[1], strict=True)]
        assert_all_close(found, [part(grad) for grad in grads])


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.ranks
def test_samples_may_have_layouts_of_their_own(group: dist.ProcessGroup, world_size: int) -> None:
    """Samples with layouts of their own attend to keys of another length."""
    W, rank = group.size(), group.rank()
    lengths = [[8 * W, 4 * W], [4 * W, 8 * W]]
    by = {
        12 * W: symm_cp.PerDocumentHeadTail(lengths, W),
        14 * W: symm_cp.Sequential(14 * W, W),
    }
    whole, mask = tensors(8, 12 * W, 14 * W), visible(12 * W, 14 * W)
    out, _ = dense(whole, mask)
    rows = by[12 * W].positions(rank)
    q = torch.stack([sample[:, own] for sample, own in zip(whole[0], rows, strict=True)])
    k, v = (t[:, :, by[14 * W].positions(rank)] for t in whole[1:3])
    with symm_cp.context_parallel(mesh_of(group), load_balancer=by):
        got = F.scaled_dot_product_attention(q, k, v, mask)
    want = torch.stack([sample[:, own] for sample, own in zip(out, rows, strict=True)])
    torch.testing.assert_close(got, want, **CLOSE)
    assert region_over(group, by).layouts is None
