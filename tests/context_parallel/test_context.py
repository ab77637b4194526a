"""`context_parallel`: buffers, which calls run context parallel, and the state afterwards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import symm_cp
from tests.context_parallel.common import CLOSE, assert_all_close, dense, mesh_of, whole
from tests.exhaustive import some

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def balancers(length: int, world_size: int) -> list[symm_cp.LoadBalancer | None]:
    found: list[symm_cp.LoadBalancer | None] = [
        symm_cp.HeadTail(length, world_size),
        symm_cp.Sequential(length, world_size),
        symm_cp.PerDocumentHeadTail([length - 5, 5], world_size),
    ]
    return [None, *found]


@pytest.mark.parametrize(
    ("world_size", "length"),
    some((1, 24), (2, 29), (3, 24), (4, 29), of=itertools.product([1, 2, 3, 4], [24, 29])),
)
@pytest.mark.ranks
def test_trains_as_one_process(group: dist.ProcessGroup, world_size: int, length: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    mesh = mesh_of(group)
    for causal in (True, False):
        given = whole(seed, length, kv_heads=2)
        expected = dense(given, is_causal=causal)
        for balancer in balancers(length, group.size()):
            buffers = [t.clone() for t in given]
            with symm_cp.context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[2, -2, 2, 2], load_balancer=balancer
            ):
                q, k, v, grad = buffers
                local = (balancer or symm_cp.HeadTail(length, group.size())).lengths[group.rank()]
                assert q.shape[2] == local
                for t in (q, k, v):
                    t.requires_grad_()
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                again = imported_by_name(q, k, v, is_causal=causal, enable_gqa=True)
                assert torch.equal(out, again)
                out.backward(grad)
                results = [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]
                full = symm_cp.context_parallel_unshard(mesh, results, [2, 2, -2, 2])
            assert_all_close(full, expected)
            later = symm_cp.context_parallel_unshard(
                mesh, results, [2] * 4, balancer or symm_cp.HeadTail(length, group.size())
            )
            assert all(torch.equal(a, b) for a, b in zip(later, full, strict=True))
            for buffer, original in zip(buffers, given, strict=True):
                assert torch.equal(buffer, original)


@WORLD_SIZES
@pytest.mark.ranks
def test_buffers_come_back_also_after_an_exception(
    group: dist.ProcessGroup, world_size: int
) -> None:
    mesh, W = mesh_of(group), group.size()
    base = torch.arange(2.0 * 8 * W * 3).view(2, 8 * W, 3)
    view, kept, first = base[:, :, 1], torch.arange(8.0 * W), torch.arange(8.0 * W).view(-1, 1)
    original, place = base.clone(), view.data_ptr()
    rows = symm_cp.HeadTail(8 * W, W).positions(group.rank())

    def fails() -> None:
        with symm_cp.context_parallel(
            mesh,
            buffers=[view, kept, first],
            buffer_seq_dims=[1, -1, 0],
            no_restore_buffers={kept},
        ):
            assert torch.equal(view, original[:, rows, 1])
            assert torch.equal(first.flatten(), rows.float())
            view.zero_()  # the shard, not what else lies in that memory
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fails()
    assert (view.data_ptr(), view.stride()) == (place, (24 * W, 3))
    assert torch.equal(base, original)
    assert torch.equal(kept, rows.float())
    assert first.shape == (8 * W, 1)
    assert not _get_current_function_mode_stack()


@pytest.mark.ranks(2)
def test_bad_buffers_are_refused_before_anything_is_cut(group: dist.ProcessGroup) -> None:
    mesh, W = mesh_of(group), group.size()
    x, y = torch.zeros(8 * W), torch.zeros(6 * W)
    one = {"buffers": [x], "buffer_seq_dims": [0]}
    cases = [
        ({"buffers": [x, y], "buffer_seq_dims": [0, 0]}, "does not fit a sequence of"),
        ({"buffers": [x], "buffer_seq_dims": [1]}, "seq_dim=1 is out of range"),
        ({"buffers": [x], "buffer_seq_dims": []}, "1 buffers and 0 sequence dimensions"),
        ({**one, "no_restore_buffers": {y}}, "must be among buffers"),
        ({"buffers": [nn.Parameter(x)], "buffer_seq_dims": [0]}, "is a parameter"),
        ({**one, "load_balancer": symm_cp.HeadTail(8 * W, W + 1)}, "does not fit a sequence of"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message), symm_cp.context_parallel(mesh, **arguments):
            raise AssertionError("never entered")
        assert x.shape == (8 * W,)
        assert y.shape == (6 * W,)
    assert not _get_current_function_mode_stack()


@pytest.mark.ranks(2)
def test_local_masks_dropout_and_hidden_attention_are_refused(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    q = torch.randn(2, 4, 8, 16)
    mask = torch.ones(8 * group.size(), 8 * group.size(), dtype=torch.bool)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with symm_cp.context_parallel(mesh):
        with pytest.raises(NotImplementedError, match=r"attn_mask of shape \[8, 8\]"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(8, 8, dtype=torch.bool))
        with pytest.raises(NotImplementedError, match="dropout_p with a score_mod or a floating"):
            F.scaled_dot_product_attention(q, q, q, mask.float(), dropout_p=0.1)
        with pytest.raises(NotImplementedError, match="would attend to this rank's part"):
            attention(q[:, 0], q[:, 0], q[:, 0])
        for module in (attention.eval(), layer.eval()):
            arguments = (q[:, 0],) if module is layer else (q[:, 0],) * 3
            with torch.no_grad(), pytest.raises(NotImplementedError, match="this rank's part"):
                module(*arguments)
        F.scaled_dot_product_attention(q, q, q)  # all is well


@WORLD_SIZES
@pytest.mark.ranks
def test_masks_of_the_whole_sequence(group: dist.ProcessGroup, world_size: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    W = group.size()
    given = whole(seed, 9 * W)
    generator = torch.Generator().manual_seed(seed)
    rows = symm_cp.HeadTail(9 * W, W).positions(group.rank())
    for shape in ((9 * W, 9 * W), (2, 1, 9 * W, 9 * W), (4, 9 * W, 9 * W)):
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        for mask in (noise > 0, noise):
            q, k, v = (t.clone().requires_grad_() for t in given[:3])
            out = F.scaled_dot_product_attention(q, k, v, mask)
            grads = torch.autograd.grad(out, (q, k, v), given[3])
            expected = [t[:, :, rows] for t in (out.detach(), *grads)]
            shards = [t[:, :, rows].requires_grad_() for t in given[:3]]
            with symm_cp.context_parallel(mesh_of(group), load_balancer=symm_cp.HeadTail(9 * W, W)):
                out = F.scaled_dot_product_attention(*shards, mask)
            grads = torch.autograd.grad(out, shards, given[3][:, :, rows])
            assert_all_close([out.detach(), *grads], expected)


class Layers(torch.nn.Module):
    """Attention with dropout in checkpoints, on positions that a buffer of the context gives."""

    def __init__(self, options: dict[str, Any] | None, compiles: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.inner, self.outer = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in "io")
        self.positions = torch.arange(12, dtype=torch.float64)[:, None].sin()
        self.options = options
        self.layer = torch.compile(self._layer, backend="aot_eager") if compiles else self._layer

    def _layer(self, linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.dropout(out.transpose(1, 2).flatten(2), 0.3) + x

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self._checkpointed(partial(self.layer, self.inner), x + self.positions)

    def _checkpointed(self, body: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return body(x) if self.options is None else checkpoint(body, x, **self.options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._checkpointed(self._inner, x)  # with a checkpoint inside
        return self._checkpointed(partial(self.layer, self.outer), x)


@pytest.mark.ranks(2)
def test_checkpoints_recompute_in_their_context_outside_of_it(group: dist.ProcessGroup) -> None:
    seed = int(torch.randint(1 << 30, ()))
    mesh = mesh_of(group)
    torch.manual_seed(seed)
    x = torch.randn(2, 12, 8, dtype=torch.float64)

    def grads(layers: Layers, where: str) -> list[torch.Tensor]:
        torch.manual_seed(seed)  # of dropout
        balancer = symm_cp.HeadTail(12, group.size())
        (local,) = symm_cp.context_parallel_shard(mesh, [x], [1], balancer)
        leaf = local.requires_grad_()
        buffers = {"buffers": [layers.positions], "buffer_seq_dims": [0]}
        with symm_cp.context_parallel(mesh, load_balancer=balancer, **buffers):
            loss = layers(leaf).square().sum()
            if where == "inside":
                loss.backward()
            elif where == "torch.autograd.backward":
                torch.autograd.backward([loss], [torch.ones_like(loss)])
            elif where == "torch.autograd.grad":
                return [*torch.autograd.grad(loss, [leaf, *layers.parameters()])]
        if where == "another context":
            other = symm_cp.Sequential(12, group.size())
            with symm_cp.context_parallel(mesh, load_balancer=other):
                loss.backward()
        elif where == "outside":
            # Batches that are cut ahead, in another layout, do not matter.
            symm_cp.context_parallel_shard(mesh, [x], [1], symm_cp.Sequential(12, group.size()))
            loss.backward()
        assert layers.positions.shape == (12, 1)
        return [leaf.grad, *(p.grad for p in layers.parameters())]  # type: ignore[list-item]

    expected = grads(Layers(None), "inside")
    for name in ("grad", "backward"):
        assert_all_close(
            grads(Layers({"use_reentrant": False}), f"torch.autograd.{name}"), expected
        )
    for where in ("inside", "outside", "another context"):
        for reentrant in (False, True):
            for compiles in (False, True):
                layers = Layers({"use_reentrant": reentrant}, compiles)
                assert_all_close(grads(layers, where), expected)
    tensors = [t.clone().requires_grad_() for t in whole(seed, 8)[:3]]
    with symm_cp.context_parallel(mesh):
        pass  # once it has ended, checkpoints of plain attention recompute plain attention
    for reentrant in (False, True):
        out = checkpoint(F.scaled_dot_product_attention, *tensors, use_reentrant=reentrant)
        given = whole(seed, 8)
        out.backward(given[3])
        want = dense(given, is_causal=False)
        assert_all_close([out.detach(), *(t.grad for t in tensors)], want)  # type: ignore[list-item]
        for t in tensors:
            t.grad = None


@pytest.mark.ranks(4)
def test_contexts_nest_on_one_mesh_and_on_two(group: dist.ProcessGroup) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[group.rank() // 2]
    outer, inner = mesh_of(group), mesh_of(mine)
    given = whole(5, 16)[:3]
    expected = F.scaled_dot_product_attention(*given, is_causal=True)

    def attend(group: dist.ProcessGroup) -> torch.Tensor:
        rows = symm_cp.HeadTail(16, group.size()).positions(group.rank())
        shards = [t[:, :, rows] for t in given]
        out = F.scaled_dot_product_attention(*shards, is_causal=True)
        torch.testing.assert_close(out, expected[:, :, rows], **CLOSE)
        return out

    with symm_cp.context_parallel(outer):
        attend(group)
        with symm_cp.context_parallel(inner):
            out = attend(mine)
            (full,) = symm_cp.context_parallel_unshard(inner, [out], [2])
            torch.testing.assert_close(full, expected, **CLOSE)
        attend(group)  # the rest of the outer body
        with symm_cp.context_parallel(outer, load_balancer=symm_cp.Sequential(16, 4)):
            out = F.scaled_dot_product_attention(
                *(t.chunk(4, 2)[group.rank()] for t in given), is_causal=True
            )
        torch.testing.assert_close(out, expected.chunk(4, 2)[group.rank()], **CLOSE)
        attend(group)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(*given, is_causal=True), expected, **CLOSE
    )


@pytest.mark.ranks(2)
def test_other_threads_are_left_alone(group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(q, q, q)
    found = []
    with symm_cp.context_parallel(mesh_of(group)):
        thread = threading.Thread(
            target=lambda: found.append(F.scaled_dot_product_attention(q, q, q))
        )
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.ranks(2)
def test_unsharding_takes_the_layout_that_was_used_or_none(group: dist.ProcessGroup) -> None:
    # A new group: the layouts in use are remembered by group.
    mesh, W = mesh_of(dist.new_group(list(range(group.size())))), group.size()
    x = torch.arange(12.0 * W)
    straight = symm_cp.Sequential(12 * W, W)
    with symm_cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0], load_balancer=straight):
        shard = x.clone()
    # The layout that was used, not a default.
    assert torch.equal(symm_cp.context_parallel_unshard(mesh, [shard], [0])[0], x)
    with symm_cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        other = x.clone()
    with pytest.raises(ValueError, match=r"were cut by \['HeadTail.*'Sequential"):
        symm_cp.context_parallel_unshard(mesh, [shard], [0])
    assert torch.equal(symm_cp.context_parallel_unshard(mesh, [shard], [0], straight)[0], x)
    head_tail = symm_cp.HeadTail(12 * W, W)
    assert torch.equal(symm_cp.context_parallel_unshard(mesh, [other], [-1], head_tail)[0], x)
    # Nothing is guessed for shards of another length, or of another group.
    with pytest.raises(ValueError, match="5 positions were not cut on this group: pass the load_b"):
        symm_cp.context_parallel_unshard(mesh, [x[:5]], [0])
    fresh = mesh_of(dist.new_group(list(range(group.size()))))
    with pytest.raises(ValueError, match="not cut on this group"):
        symm_cp.context_parallel_unshard(fresh, [shard], [0])
    with pytest.raises(ValueError, match="the buffer has 3"):
        symm_cp.context_parallel_unshard(mesh, [shard[:3]], [0], straight)
    with pytest.raises(ValueError, match="out of range"):
        symm_cp.context_parallel_unshard(mesh, [shard], [1], straight)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.ranks
def test_shards_are_remembered(group: dist.ProcessGroup, world_size: int) -> None:
    W, x = group.size(), torch.arange(12.0 * group.size())
    straight = symm_cp.Sequential(12 * W, W)
    ids = torch.arange(12 * W).expand(2, -1)
    for cut in ("shard", "batch"):
        mesh = mesh_of(dist.new_group(list(range(W))))
        if cut == "shard":
            (shard,) = symm_cp.context_parallel_shard(mesh, [x], [0], straight)
        else:
            local, _ = symm_cp.shard_batch(mesh, {"input_ids": ids}, load_balancer=straight)
            shard = local["input_ids"][0].float()
        assert isinstance(shard, torch.Tensor)
        assert torch.equal(symm_cp.context_parallel_unshard(mesh, [shard], [0])[0], x)
        # Nor does attention accept these shards as cut by another load balancer.
        q = shard.view(1, 1, -1, 1)
        if W > 1:
            with (
                pytest.raises(
                    ValueError, match=r"assumed to be cut by HeadTail.*cut by Sequential"
                ),
                symm_cp.context_parallel(mesh),
            ):
                F.scaled_dot_product_attention(q, q, q)
        with symm_cp.context_parallel(mesh, load_balancer=straight):
            F.scaled_dot_product_attention(q, q, q)


@WORLD_SIZES
@pytest.mark.ranks
def test_context_parallel_shard(group: dist.ProcessGroup, world_size: int) -> None:
    mesh, W, rank = mesh_of(group), group.size(), group.rank()
    x = torch.randn(3, 7 * W + 1, 2)
    balancer = symm_cp.HeadTail(7 * W + 1, W)
    listed = symm_cp.context_parallel_shard(mesh, [x, x[0]], [1, -2], balancer)
    named = symm_cp.context_parallel_shard(mesh, {"x": x}, {"x": 1}, balancer)
    rows = balancer.positions(rank)
    assert torch.equal(listed[0], x[:, rows])
    assert torch.equal(listed[1], x[0, rows])
    assert torch.equal(named["x"], x[:, rows])
    assert x.shape == (3, 7 * W + 1, 2)
    with pytest.raises(ValueError, match="must have the keys of buffers"):
        symm_cp.context_parallel_shard(mesh, {"x": x}, {"y": 1}, balancer)


@WORLD_SIZES
@pytest.mark.ranks
def test_shapes_that_the_function_takes(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    q, k, v, _ = whole(7, 8 * W)
    rows = symm_cp.HeadTail(8 * W, W).positions(rank)
    three, five = (t[:, 0] for t in (q, k, v)), (t.unflatten(0, (1, 2)) for t in (q, k, v))
    with symm_cp.context_parallel(mesh_of(group)):
        for tensors in (tuple(three), tuple(five)):
            shards = [t.index_select(-2, rows) for t in tensors]
            out = F.scaled_dot_product_attention(*shards, is_causal=True)
            assert out.shape == shards[0].shape
            results = out
        # Fewer features of values than of queries, and keys of another length (no mask).
        narrow = F.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, rows], v[:, :, rows, :5], is_causal=True
        )
        memory = k[:, :, : 3 * W]
        crossed = F.scaled_dot_product_attention(
            q[:, :, rows], *(memory.chunk(W, 2)[rank] for _ in range(2))
        )
    full = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, rows]
    torch.testing.assert_close(results[0], full, **CLOSE)
    torch.testing.assert_close(narrow, full[..., :5], **CLOSE)
    expected = F.scaled_dot_product_attention(q, memory, memory)[:, :, rows]
    torch.testing.assert_close(crossed, expected, **CLOSE)
