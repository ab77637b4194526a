"""Methods of `context_parallel`, `ContextParallel` and `shard_batch`, and meshes that mix them."""

from __future__ import annotations

import time
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import symm_cp
from symm_cp import tuning
from symm_cp.ops.attention.methods import default_method
from symm_cp.ops.attention.ulysses import UlyssesCall
from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, assert_all_close, dense, mesh_of, whole
from tests.exhaustive import exhaustive, some

MIXED = ("ulysses", "allgather")
MIXES = (MIXED, MIXED[::-1])


@contextmanager
def exchanges() -> Iterator[list[str]]:
    """Yields the calls that exchange heads: "forward" and "backward"."""
    made: list[str] = []
    attend, backward = UlyssesCall.attend, UlyssesCall.attend_backward

    def counted(self: UlyssesCall, *args: Any) -> Any:
        made.append("forward")
        return attend(self, *args)

    def counted_backward(self: UlyssesCall, *args: Any) -> Any:
        made.append("backward")
        return backward(self, *args)

    with (
        unittest.mock.patch.object(UlyssesCall, "attend", counted),
        unittest.mock.patch.object(UlyssesCall, "attend_backward", counted_backward),
    ):
        yield made


def mesh_2d(shape: tuple[int, int], ranks: list[int] | None = None) -> DeviceMesh:
    numbers = torch.arange(4) if ranks is None else torch.tensor(ranks)
    return DeviceMesh("cpu", numbers.view(shape), mesh_dim_names=("one", "other"))


def trains(
    mesh: DeviceMesh, method: Any, balancer: symm_cp.LoadBalancer | None, *, is_causal: bool
) -> None:
    """Raises unless attention in a context gives the results of one process."""
    W = mesh.size()
    length = 8 * W if balancer is None else balancer.seq_length
    given = whole(3, length, kv_heads=2)
    cut = symm_cp.context_parallel_shard(mesh, given, [2] * 4, balancer, method=method)
    *shards, grad = (t for t in cut if isinstance(t, torch.Tensor))
    leaves = [t.requires_grad_() for t in shards]
    with symm_cp.context_parallel(mesh, load_balancer=balancer, method=method), exchanges() as made:
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad)
    assert made == ["forward", "backward"]
    used = balancer or symm_cp.HeadTail(length, W)
    found = symm_cp.context_parallel_unshard(
        mesh, [out.detach(), *grads], [2] * 4, used, method=method
    )
    assert_all_close(found, dense(given, is_causal=is_causal))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_attention_by_heads(group: dist.ProcessGroup, world_size: int) -> None:
    length = 27
    W = group.size()
    for balancer in (None, symm_cp.HeadTail(length, W), symm_cp.Sequential(length, W)):
        for is_causal in (True, False):
            trains(mesh_of(group), "ulysses", balancer, is_causal=is_causal)


@pytest.mark.parametrize(
    ("shape", "method"),
    some(
        ((2, 2), MIXED),
        of=[(shape, mix) for shape in ((2, 2), (4, 1), (1, 4)) for mix in MIXES],
    ),
)
@pytest.mark.ranks(4)
def test_methods_of_two_dimensions(
    group: dist.ProcessGroup, shape: tuple[int, int], method: tuple[str, str]
) -> None:
    mesh = mesh_2d(shape)
    balancers = [None, symm_cp.Sequential(30, 4), symm_cp.PerDocumentHeadTail([7, 18], 4)]
    for balancer in balancers:
        trains(mesh, method, balancer, is_causal=balancer is not None)


def by_flex(
    group: dist.ProcessGroup,
    method: Any,
    shape: tuple[int, int] | None,
    *,
    compiles: bool = False,
) -> None:
    """A mask and scores by head and position, with a captured tensor that wants a gradient."""
    W, length = group.size(), 8 * group.size()
    mesh = mesh_of(group) if shape is None else mesh_2d(shape)
    given, slopes = whole(13, length, kv_heads=2), torch.rand(4, dtype=torch.float64)
    group_slopes = slopes.clone().requires_grad_()
    all_slopes = slopes.clone().requires_grad_()
    block_mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k <= 3 + 5 * h), None, 4, length, length, "cpu", 4
    )
    balancer = symm_cp.HeadTail(length, W)
    rows = balancer.positions(group.rank())
    shards = [t[:, :, rows].requires_grad_() for t in given[:3]]

    def attend(*tensors: torch.Tensor) -> Any:
        return flex_attention(
            *tensors,
            score_mod=lambda score, b, h, q, k: score + group_slopes[h] * (k - q),
            block_mask=block_mask,
            enable_gqa=True,
        )

    if compiles:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with symm_cp.context_parallel(mesh, load_balancer=balancer, method=method), exchanges() as made:
        out = attend(*shards)
        *grads, of_slopes = torch.autograd.grad(out, [*shards, group_slopes], given[3][:, :, rows])
    assert made == ["forward", "backward"]
    dist.all_reduce(of_slopes, group=group)
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    distance = torch.arange(length) - torch.arange(length)[:, None]
    visible = (distance <= 0) & (-distance <= 3 + 5 * torch.arange(4)[:, None, None])
    bias = (all_slopes[:, None, None] * distance).masked_fill(~visible, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, bias[None], enable_gqa=True)
    *wanted, of_all = torch.autograd.grad(expected, (q, k, v, all_slopes), given[3])
    assert_all_close([out, *grads], [t[:, :, rows] for t in (expected, *wanted)])
    torch.testing.assert_close(of_slopes, of_all, **CLOSE)


@pytest.mark.parametrize(
    ("world_size", "method", "shape"),
    some(
        (2, "ulysses", None),
        of=[(2, "ulysses", None), (4, "ulysses", None), (4, MIXED, (2, 2))],
    ),
)
def test_flex_attention_by_methods(
    ranks: Ranks, world_size: int, method: Any, shape: tuple[int, int] | None
) -> None:
    ranks.run(world_size, by_flex, method, shape)


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "method", "shape"), [(2, "ulysses", None), (4, MIXED, (2, 2))]
)
def test_compiled_flex_attention_by_methods(
    ranks: Ranks, world_size: int, method: Any, shape: tuple[int, int] | None
) -> None:
    ranks.run(world_size, by_flex, method, shape, compiles=True)


@pytest.mark.ranks(4)
def test_which_positions_the_ranks_of_a_mesh_hold(group: dist.ProcessGroup) -> None:
    for ranks in (None, [0, 2, 1, 3]):
        mesh = mesh_2d((2, 2), ranks)
        positions = torch.arange(24)
        for method in MIXES:
            cut = symm_cp.context_parallel_shard(mesh, [positions], [0], method=method)[0]
            assert isinstance(cut, torch.Tensor)
            balancer = symm_cp.HeadTail(24, 4)
            assert torch.equal(cut, balancer.positions(dist.get_rank()))
            whole = symm_cp.context_parallel_unshard(mesh, [cut], [0], balancer, method=method)
            assert torch.equal(whole[0], positions)
            trains(mesh, method, None, is_causal=True)


@pytest.mark.ranks(4)
def test_batches_over_a_mesh_of_two_dimensions(group: dist.ProcessGroup) -> None:
    mesh = mesh_2d((2, 2))
    ids = torch.randint(50, (2, 22))
    batch = {"input_ids": ids, "labels": ids}
    local, reduce_loss = symm_cp.shard_batch(mesh, batch, method=MIXED)
    flat, other = symm_cp.shard_batch(group, batch)
    assert all(torch.equal(local[name], flat[name]) for name in flat)
    loss = torch.tensor(float(dist.get_rank()))
    assert torch.equal(reduce_loss(loss), other(loss))
    with pytest.raises(ValueError, match=r"shard_batch: mesh has 2 dimensions, method='allgather'"):
        symm_cp.shard_batch(mesh, batch)


@pytest.mark.ranks(2)
def test_the_method_by_torchs_name(group: dist.ProcessGroup) -> None:
    mesh, given = mesh_of(group), whole(5, 8 * group.size())
    balancer = symm_cp.HeadTail(8 * group.size(), group.size())
    rows = balancer.positions(group.rank())
    shards = [t[:, :, rows] for t in given[:3]]
    symm_cp.set_rotate_method("ulysses")
    try:
        assert default_method() == "ulysses"
        with exchanges() as made:
            with symm_cp.context_parallel(mesh, load_balancer=balancer):
                F.scaled_dot_product_attention(*shards)
            symm_cp.all_gather_attention(*shards, group=group)
            with symm_cp.context_parallel(mesh, load_balancer=balancer, method="allgather"):
                F.scaled_dot_product_attention(*shards)
        assert made == ["forward"] * 2
    finally:
        symm_cp.set_rotate_method("allgather")
    with symm_cp.context_parallel(mesh, load_balancer=balancer), exchanges() as made:
        F.scaled_dot_product_attention(*shards)
    assert not made


def chooses(group: dist.ProcessGroup) -> list[str]:
    W, chosen = group.size(), []
    # The last rank has most of the work; more heads on one rank than on others; fewer than ranks.
    for heads, balancer in (
        (2 * W, symm_cp.Sequential(256 * W, W)),
        (W + 1, symm_cp.HeadTail(256 * W, W)),
        (W - 1, symm_cp.HeadTail(256 * W, W)),
    ):
        given = whole(7, 256 * W, heads=heads, kv_heads=heads)
        rows = balancer.positions(group.rank())
        shards = [t[:, :, rows].requires_grad_() for t in given[:3]]
        with (
            symm_cp.context_parallel(mesh_of(group), load_balancer=balancer, method="auto"),
            tuning.listening() as choices,
        ):
            out = F.scaled_dot_product_attention(*shards, is_causal=True)
            grads = torch.autograd.grad(out, shards, given[3][:, :, rows])
        assert_all_close([out.detach(), *grads], [t[:, :, rows] for t in dense(given)])
        chosen += [f"{key}: {choice.algorithm}" for key, choice in choices.items()]
    return chosen


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
def test_auto_chooses_what_is_faster_on_all_ranks_alike(ranks: Ranks, world_size: int) -> None:
    found = ranks.run(world_size, chooses)
    assert all(chosen == found[0] for chosen in found)
    algorithms = [line.rpartition(": ")[2] for line in found[0]]
    assert algorithms == ["ulysses"] * 2 + ["allgather"] * 4, found[0]


@pytest.mark.ranks(4)
def test_methods_that_do_not_fit_are_refused_by_name(group: dist.ProcessGroup) -> None:
    mesh, square = mesh_of(group), mesh_2d((2, 2))
    nameless = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    descending = mesh_2d((2, 2), [3, 2, 1, 0])
    q = torch.zeros(1, 3, 8, 4)
    pairs = r"must be \('ulysses', 'allgather'\) or \('allgather', 'ulysses'\)"
    cases: list[tuple[Any, Any, str]] = [
        (mesh, "ring", "unknown method='ring'; choose one of"),
        (mesh, MIXED, "requires mesh to be a DeviceMesh of 2 dimensions, .* got 1 dim"),
        (group, MIXED, "got ProcessGroup"),
        (
            square,
            "ulysses",
            r"mesh has 2 dimensions, method='ulysses' requires one: .*mesh\['other'\]",
        ),
        (square, ("ulysses", "ulysses"), pairs),
        (square, ("ulysses", "auto"), pairs),
        (square, ("ulysses",), pairs),
        (nameless, MIXED, "mesh has no dimension names"),
        (descending, MIXED, "must ascend along both dimensions"),
    ]
    for given, method, message in cases:
        with pytest.raises(ValueError, match=f"context_parallel: .*{message}"):
            symm_cp.context_parallel(given, method=method).__enter__()
        with pytest.raises(ValueError, match=f"ContextParallel: .*{message}"):
            parallelize_module(nn.Identity(), given, symm_cp.ContextParallel(method=method))
        as_group = message.replace("mesh", "group", 1)
        with pytest.raises(ValueError, match=f"all_gather_attention: .*{as_group}"):
            symm_cp.all_gather_attention(q, q, q, group=given, method=method)
    heads = "query has 3 heads for 4 ranks: method 'ulysses' requires"
    for attend in (F.scaled_dot_product_attention, flex_attention):
        region = symm_cp.context_parallel(mesh, method="ulysses")
        with region, pytest.raises(ValueError, match=heads):
            attend(q, q, q)
    # The refused calls leave the group as it was.
    trains(mesh, "ulysses", None, is_causal=True)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_ranks_that_differ(group: dist.ProcessGroup, world_size: int) -> None:
    """Ranks whose methods, heads or calls differ raise clear errors, and can go on."""
    W, rank = group.size(), group.rank()
    q, x = torch.randn(1, 2 * W, 8, 4, dtype=torch.float64), torch.ones(4, 4)
    for first, other in (
        (lambda: by(q, "ulysses"), lambda: by(q, "allgather")),
        (lambda: by(q, "ulysses"), lambda: by(q[:, :W], "ulysses")),
        (lambda: by(q, "ulysses"), lambda: symm_cp.all_gather_matmul(x, x, group=group)),
        (lambda: by(q, "ulysses"), lambda: by(q[:, :1], "ulysses")),
    ):

        def by(tensor: torch.Tensor, method: Any) -> torch.Tensor:
            out: torch.Tensor = symm_cp.all_gather_attention(
                tensor, tensor, tensor, group=group, method=method
            )
            return out

        begin = time.monotonic()
        with pytest.raises((RuntimeError, ValueError), match=r"all_gather_attention|requires"):
            (other if rank == W - 1 else first)()
        assert time.monotonic() - begin < 20.0
        assert by(q, "ulysses").shape == q.shape


@exhaustive
@pytest.mark.parametrize(
    ("world_size", "method", "shape"),
    [(2, "ulysses", None), (2, "auto", None), (4, "ulysses", None), (4, MIXED, (2, 2))],
)
@pytest.mark.ranks
def test_one_compiled_function_serves_other_lengths(
    group: dist.ProcessGroup, world_size: int, method: Any, shape: tuple[int, int] | None
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # loads Dynamo

    torch._dynamo.reset()
    W = group.size()
    mesh = mesh_of(group) if shape is None else mesh_2d(shape)
    norm = nn.Linear(16, 16, dtype=torch.float64)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return norm(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for length in (8 * W, 12 * W, 20 * W, 32 * W):
        given = whole(length, length)
        balancer = symm_cp.HeadTail(length, W)
        rows = balancer.positions(group.rank())
        shards = [t[:, :, rows].requires_grad_() for t in given[:3]]
        with (
            symm_cp.context_parallel(mesh, load_balancer=balancer, method=method),
            exchanges() as made,
        ):
            out = run(*shards)
            grads = torch.autograd.grad(out, shards, given[3][:, :, rows])
        assert method == "auto" or made == ["forward", "backward"]
        leaves = [t.requires_grad_() for t in given[:3]]
        expected = layer(*leaves)
        wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, given[3])]
        assert_all_close([out.detach(), *grads], [t[:, :, rows] for t in wanted])
    assert counter.frame_count <= 2  # as with "allgather": the first call differs


@pytest.mark.ranks(2)
def test_the_innermost_method_counts(group: dist.ProcessGroup) -> None:
    mesh, given = mesh_of(group), whole(9, 8 * group.size())
    balancer = symm_cp.HeadTail(8 * group.size(), group.size())
    rows = balancer.positions(group.rank())
    shards = [t[:, :, rows] for t in given[:3]]
    expected = dense(given)[0][:, :, rows]
    with symm_cp.context_parallel(mesh, load_balancer=balancer), exchanges() as made:
        with symm_cp.context_parallel(mesh, load_balancer=balancer, method="ulysses"):
            inner = F.scaled_dot_product_attention(*shards, is_causal=True)
        assert made == ["forward"]
        outer = F.scaled_dot_product_attention(*shards, is_causal=True)
    assert made == ["forward"]
    for out in (inner, outer):
        torch.testing.assert_close(out, expected, **CLOSE)
