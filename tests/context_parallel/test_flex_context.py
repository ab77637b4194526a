"""`flex_attention` within `context_parallel`: masks and scores of the whole sequence."""

from __future__ import annotations

import gc
import itertools
import threading
import unittest.mock
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import symm_cp
from symm_cp.context_parallel import gathered_keys
from tests.context_parallel.common import (
    CLOSE,
    Tensors,
    assert_all_close,
    attention,
    mesh_of,
    whole,
)
from tests.exhaustive import some

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
HEADS = 4
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) | (kv_idx < 7)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def block_mask(length: int) -> BlockMask:
    return create_block_mask(prefix, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def dense(given: Tensors, *, scores: bool) -> Tensors:
    q, k, v = (t.detach().clone().requires_grad_() for t in given[:3])
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    bias = SLOPES[:, None, None] * (columns - rows[:, None]) if scores else None
    out, lse = attention(q, k, v, prefix(0, 0, rows[:, None], columns), bias=bias)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3]), lse]


@pytest.mark.parametrize(
    ("world_size", "length"),
    some((2, 75), (3, 64), of=itertools.product([1, 2, 3, 4], [64, 75])),
)
@pytest.mark.ranks
def test_trains_as_one_process(group: dist.ProcessGroup, world_size: int, length: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    mesh, W = mesh_of(group), group.size()
    given, mask = whole(seed, length), block_mask(length)
    choices = [
        None,
        symm_cp.Sequential(length, W),
        symm_cp.ProcessingTimeRoundRobin(mask, W),
    ]
    for balancer in choices:
        rows = (balancer or symm_cp.HeadTail(length, W)).positions(group.rank())
        for scores in (False, True):
            expected = [t[:, :, rows] for t in dense(given, scores=scores)]
            buffers = [t.clone() for t in given]
            with symm_cp.context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[2] * 4, load_balancer=balancer
            ):
                q, k, v = (t.requires_grad_() for t in buffers[:3])
                arguments = (q, k, v, alibi if scores else None, mask)
                out = flex_attention(*arguments)
                assert torch.equal(out, module.flex_attention(*arguments))
                found, lse = flex_attention(*arguments, return_lse=True)
                _, aux = flex_attention(*arguments, return_aux=AuxRequest(lse=True))
                assert torch.equal(found, out)
                assert torch.equal(aux.lse, lse)
                grads = torch.autograd.grad(out, (q, k, v), buffers[3])
            assert_all_close([out.detach(), *grads, lse.detach()], expected)


@pytest.mark.ranks(2)
def test_nothing_is_left_behind_and_other_threads_are_left_alone(group: dist.ProcessGroup) -> None:
    # Free other tests' modules, which redirect the function as long as they exist.
    torch._dynamo.reset()
    gc.collect()
    code, results = flex_attention.__code__, []
    q = torch.randn(1, 2, 16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warning, of being slow
        before = flex_attention(q, q, q)
        with symm_cp.context_parallel(mesh_of(group)):
            assert flex_attention.__code__ is not code
            thread = threading.Thread(target=lambda: results.append(flex_attention(q, q, q)))
            thread.start()
            thread.join()
            with pytest.raises(ValueError, match="must be that of the whole sequence"):
                flex_attention(q, q, q, block_mask=block_mask(16))
            with pytest.raises(NotImplementedError, match="max_scores"):
                flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True))
        assert flex_attention.__code__ is code
        assert torch.equal(results[0], before)
        assert torch.equal(flex_attention(q, q, q), before)


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_a_mask_that_was_cut_before(group: dist.ProcessGroup, world_size: int) -> None:
    W, mesh = group.size(), mesh_of(group)
    given, mask = whole(3, 32 * W), block_mask(32 * W)
    rows = symm_cp.HeadTail(32 * W, W).positions(group.rank())
    (local,) = symm_cp.context_parallel_shard(mesh, [mask], [0])
    assert isinstance(local, BlockMask)
    assert tuple(local.seq_lengths) == (32, 32 * W)
    q, k, v = (t[:, :, rows] for t in given[:3])
    with symm_cp.context_parallel(mesh):
        out = flex_attention(q, k, v, block_mask=local)
    expected = dense(given, scores=False)[0][:, :, rows]
    torch.testing.assert_close(out, expected, **CLOSE)
    # And with gathered keys, torch's own function takes it.
    full = symm_cp.all_gather_kv(k, v, seq_dim=2, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(flex_attention(q, *full, block_mask=local), expected, **CLOSE)


# --- as on CUDA: torch's kernels over gathered keys ------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "length"), some((3, 75), of=[(1, 75), (2, 64), (3, 75), (4, 64)])
)
@pytest.mark.exhaustive
@pytest.mark.ranks
def test_over_gathered_keys(group: dist.ProcessGroup, world_size: int, length: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    W = group.size()
    given, mask = whole(seed, length), block_mask(length)
    at = torch.arange(length)
    visible = prefix(0, 0, at[:, None], at)
    for balancer in (symm_cp.HeadTail(length, W), symm_cp.Sequential(length, W)):
        rows = balancer.positions(group.rank())
        parts = [t[:, :, rows].requires_grad_() for t in given[:3]]
        with (
            unittest.mock.patch.object(gathered_keys, "in_tiles", return_value=False),
            symm_cp.context_parallel(mesh_of(group), load_balancer=balancer),
        ):
            for scores in (False, True):
                expected = [t[:, :, rows] for t in dense(given, scores=scores)]
                # torch's function has no gradient on CPU.
                q, k, v = (t.detach() for t in parts)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found, lse = flex_attention(
                        q, k, v, alibi if scores else None, mask, return_lse=True
                    )
                assert_all_close([found, lse], [expected[0], expected[4]])
            bias = torch.zeros(length, length, dtype=torch.float64).masked_fill(
                ~visible, -torch.inf
            )
            expected = [t[:, :, rows] for t in dense(given, scores=False)[:4]]
            for attn_mask in (visible, bias, visible.expand(2, HEADS, -1, -1)):
                out = F.scaled_dot_product_attention(*parts, attn_mask=attn_mask)
                grads = torch.autograd.grad(out, parts, given[3][:, :, rows])
                assert_all_close([out.detach(), *grads], expected)
