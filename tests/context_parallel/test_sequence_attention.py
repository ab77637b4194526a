"""Attention with a `SequenceMask` against dense attention in one process."""

from __future__ import annotations

import itertools
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.context_parallel import gathered_keys
from symm_cp.context_parallel.flex_hook import current_mode
from symm_cp.context_parallel.hooks import entered
from symm_cp.context_parallel.region import region_over
from symm_cp.context_parallel.sequence_attention import attend_sequence
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.ops.attention.flex.mask import evaluate
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, attention, mesh_of, whole
from tests.exhaustive import exhaustive, some

HEADS, BATCH = 4, 2


def even(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 2 == 0


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) | (h == 1)


def masks(length: int) -> list[SequenceMask]:
    positions = torch.arange(length)
    documents = torch.stack([positions // 7, (positions + 3) // 11])
    holes = torch.rand(BATCH, length) < 0.7
    return [
        SequenceMask(),
        SequenceMask(is_causal=True),
        SequenceMask(is_causal=True, window_left=5),
        SequenceMask(window_left=3, window_right=6, document_ids=documents),
        SequenceMask(is_causal=True, document_ids=documents[:1], key_mask=holes),
        SequenceMask(key_mask=holes[:1]),
        SequenceMask(is_causal=True, prefix_lengths=torch.tensor([9, length])),
        SequenceMask(is_causal=True, window_left=4, prefix_lengths=torch.tensor([11])),
        SequenceMask(mask_mod=even),
        SequenceMask(mask_mod=by_head, document_ids=documents, key_mask=holes, window_left=9),
    ]


def dense(
    tensors: list[torch.Tensor],
    mask: SequenceMask,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    q, k, v = tensors
    lengths = (torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    visible = evaluate(mask.as_mask_mod(), BATCH, HEADS, *lengths)
    if bias is not None:
        bias = bias[:, lengths[1] - lengths[0][:, None] + q.shape[2] - 1]
    return attention(q, k, v, visible, softcap=softcap, sinks=sinks, bias=bias)[0]


def attends(group: dist.ProcessGroup, layout: str, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    W = group.size()
    given = whole(seed, length, heads=HEADS, kv_heads=2)
    given[2] = given[2][..., :8].contiguous()  # values of another width
    given[3] = given[3][..., :8].contiguous()
    balancer = {
        "HeadTail": lambda: symm_cp.HeadTail(length, W),
        "samples": lambda: symm_cp.PerDocumentHeadTail([[length // 2] * 2, [length]], W),
    }[layout]()
    rows = balancer.positions(group.rank()).expand(BATCH, -1)
    own = [torch.stack([t[b][:, rows[b]] for b in range(BATCH)]) for t in given]
    region = region_over(mesh_of(group), balancer)
    for mask in masks(length):
        for softcap, with_sinks in ((None, False), (2.0, True)):
            sinks = torch.randn(HEADS, dtype=torch.float64) if with_sinks else None
            parts, tensors = ([t.clone().requires_grad_() for t in ts[:3]] for ts in (own, given))
            if sinks is not None:
                for each in (parts, tensors):
                    each.append(sinks.clone().requires_grad_())
            features: dict[str, Any] = {"softcap": softcap}
            got, _ = attend_sequence(
                "attention",
                region,
                *parts[:3],
                mask,
                enable_gqa=True,
                sinks=(*parts, None)[3],
                **features,
            )
            want = dense(tensors[:3], mask, sinks=(*tensors, None)[3], **features)
            grads = torch.autograd.grad(got, parts, own[3])
            expected = list(torch.autograd.grad(want, tensors, given[3]))
            local = [
                torch.stack([t[b][:, rows[b]] for b in range(BATCH)]) for t in (want, *expected[:3])
            ]
            for actual, right in zip((got, *grads[:3]), local, strict=True):
                torch.testing.assert_close(actual, right, **CLOSE)
            if sinks is not None:
                total = grads[3].clone()
                dist.all_reduce(total, group=group)
                torch.testing.assert_close(total, expected[3], **CLOSE)


@pytest.mark.parametrize(
    ("world_size", "layout", "length"),
    some(
        (2, "HeadTail", 37),
        of=[
            (w, layout, length)
            for w in (1, 2, 3, 4)
            for layout, length in (("HeadTail", 37), ("HeadTail", 48), ("samples", 48))
        ],
    ),
)
def test_forward_and_backward(ranks: Ranks, world_size: int, layout: str, length: int) -> None:
    ranks.run(world_size, attends, layout, length, int(torch.randint(1 << 30, ())))


def by_torch(group: dist.ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    length = 40
    given = whole(seed, length, heads=HEADS, kv_heads=2)
    balancer = symm_cp.HeadTail(length, group.size())
    rows = balancer.positions(group.rank())
    region = region_over(mesh_of(group), balancer)
    sinks = torch.randn(HEADS, dtype=torch.float64)
    with unittest.mock.patch.object(gathered_keys, "in_tiles", return_value=False):
        for mask in masks(length)[-2:]:
            parts = [t[:, :, rows] for t in given[:3]]
            bias = torch.randn(HEADS, 2 * length - 1, dtype=torch.float64)
            features: dict[str, Any] = {"softcap": 2.0, "sinks": sinks, "bias": bias}
            options = {"enable_gqa": True, "torch_flex": gathered_keys.original}
            got, _ = attend_sequence("attention", region, *parts, mask, **options, **features)
            torch.testing.assert_close(got, dense(given[:3], mask, **features)[:, :, rows], **CLOSE)
            with pytest.raises(NotImplementedError, match="dropout_p is not supported"):
                attend_sequence("attention", region, *parts, mask, enable_gqa=True, dropout_p=0.5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_functions_of_positions_by_torchs_kernels(ranks: Ranks) -> None:
    """As on CUDA: over gathered keys."""
    ranks.run(2, by_torch, int(torch.randint(1 << 30, ())))


def compiled(group: dist.ProcessGroup, seed: int, softcap: float | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    length = 24
    given = whole(seed, length, heads=HEADS, kv_heads=2)
    balancer = symm_cp.HeadTail(length, group.size())
    rows = balancer.positions(group.rank())
    bias = torch.randn(HEADS, 2 * length - 1, dtype=torch.float64)
    parts = [*(t[:, :, rows].clone() for t in given[:3]), bias.clone()]
    tensors = [*given[:3], bias]
    for leaf in (*parts, *tensors):
        leaf.requires_grad_()
    mask = SequenceMask(mask_mod=by_head)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mode = current_mode()
        assert mode is not None
        options = {"enable_gqa": True, "softcap": softcap, "bias": b}
        return attend_sequence("attention", mode.region, q, k, v, mask, **options)[0]

    with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer):
        got = attend(*parts)
        grads = torch.autograd.grad(got, parts, given[3][:, :, rows])
    want = dense(tensors[:3], mask, softcap=softcap, sinks=None, bias=bias)
    expected = torch.autograd.grad(want, tensors, given[3])
    for actual, right in zip((got, *grads[:3]), (want, *expected[:3]), strict=True):
        torch.testing.assert_close(actual, right[:, :, rows], **CLOSE)
    total = grads[3].clone()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, expected[3], **CLOSE)


@exhaustive
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bias_with_functions_of_positions_in_graphs(ranks: Ranks, softcap: float | None) -> None:
    ranks.run(2, compiled, int(torch.randint(1 << 30, ())), softcap)


def mask_of_ones_own(length: int, documents: list[int]) -> SequenceMask:
    """Causal windows of 5 in documents, and the first two tokens of each: no option says this."""
    lengths = torch.tensor(documents)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = (kv <= q) & (q - kv < 5)
        first = (kv - starts[kv] < 2) & (kv <= q)
        return (starts[q] == starts[kv]) & (near | first)

    return SequenceMask(mask_mod=visible)


def attends_by_ones_own(group: dist.ProcessGroup, seed: int) -> None:
    length, documents, W = 48, [9, 23, 16], group.size()
    given, mask = whole(seed, length, heads=HEADS, kv_heads=2), mask_of_ones_own(length, documents)
    tensors = [t.clone().requires_grad_() for t in given[:3]]
    want = dense(tensors, mask, softcap=None, sinks=None)
    expected = (want, *torch.autograd.grad(want, tensors, given[3]))

    positions = torch.arange(length)
    matrix = evaluate(mask.as_mask_mod(), 1, 1, positions, positions)[0, 0]
    added = torch.zeros(matrix.shape, dtype=torch.float64).masked_fill(~matrix, -torch.inf)

    def by_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mode = current_mode()
        assert mode is not None
        return attend_sequence("attention", mode.region, q, k, v, mask, enable_gqa=True)[0]

    def by_matrix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, matrix, enable_gqa=True)

    def by_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)

    balancers = symm_cp.HeadTail(length, W), symm_cp.Sequential(length, W)
    calls = by_function, by_matrix, by_sum
    for balancer, method, attend, compiles in itertools.product(
        balancers, ("allgather", "ulysses"), calls, (False, True)
    ):
        torch._dynamo.reset()
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiles else attend
        rows = balancer.positions(group.rank())
        parts = [t[:, :, rows].clone().requires_grad_() for t in given[:3]]
        with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer, method=method):
            got = call(*parts)
            grads = torch.autograd.grad(got, parts, given[3][:, :, rows])
        for actual, right in zip((got, *grads), expected, strict=True):
            torch.testing.assert_close(actual, right[:, :, rows], **CLOSE)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_a_mask_of_ones_own(ranks: Ranks, world_size: int) -> None:
    """Eager and compiled, by keys and by heads, in two layouts, forward and backward."""
    ranks.run(world_size, attends_by_ones_own, int(torch.randint(1 << 30, ())))


def dropped(group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """Whole outputs with dropout, with a mask of the op's and with one that tiles compute."""
    length = 32
    given = whole(seed, length)
    balancer = symm_cp.HeadTail(length, group.size())
    rows = balancer.positions(group.rank())
    region = region_over(mesh_of(group), balancer)
    outs = []
    for mask in (SequenceMask(is_causal=True), SequenceMask(mask_mod=by_head)):
        torch.manual_seed(seed)
        with entered(region, region.watch()):
            out, _ = attend_sequence(
                "attention", region, *(t[:, :, rows] for t in given[:3]), mask, dropout_p=0.5
            )
        outs += symm_cp.context_parallel_unshard(mesh_of(group), [out], [2], balancer)
    torch.manual_seed(seed)
    parts = [t[:, :, rows].requires_grad_() for t in given[:3]]
    with symm_cp.context_parallel(mesh_of(group), load_balancer=balancer):
        out = F.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.5)
    torch.testing.assert_close(
        out, outs[0][:, :, rows], msg=lambda m: f"by scaled_dot_product_attention: {m}"
    )
    grads = torch.autograd.grad(out, parts, given[3][:, :, rows])
    return outs + symm_cp.context_parallel_unshard(mesh_of(group), grads, [2] * 3, balancer)


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    seed = int(torch.randint(1 << 30, ()))
    expected, actual = (ranks.run(size, dropped, seed)[0] for size in (1, 2))
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    given = whole(seed, 32)
    plain = F.scaled_dot_product_attention(*given[:3], is_causal=True)
    assert not torch.allclose(expected[0], plain)


def refuses(group: dist.ProcessGroup) -> None:
    region = region_over(mesh_of(group), symm_cp.HeadTail(16, group.size()))
    q, k, v, _ = (t[:, :, : 16 // group.size()] for t in whole(0, 16))
    with pytest.raises(ValueError, match="mask and is_causal=True exclude each other"):
        attend_sequence("attention", region, q, k, v, SequenceMask(), is_causal=True)
    with pytest.raises(ValueError, match=r"query has 8 rows and key 4.*equal lengths"):
        attend_sequence("attention", region, q, k[:, :, :4], v[:, :, :4], is_causal=True)
    with pytest.raises(RuntimeError, match=r"scaled_dot_product_attention: got an attention mask"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=SequenceMask())  # type: ignore[arg-type]


def test_what_is_refused(ranks: Ranks) -> None:
    ranks.run(2, refuses)
