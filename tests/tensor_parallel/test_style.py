"""The styles against dense linears, and their other guarantees.

Activations between linears are split along dimension `dim`, or replicated if it is None.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from symm_cp.tensor_parallel import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
)
from symm_cp.testing import Ranks
from tests import reference
from tests.patience import patient
from tests.tensor_parallel.common import (
    WORLD_SIZES,
    B,
    Block,
    K,
    N,
    Recorder,
    S,
    fused_block,
    fused_plan,
    leaf,
    local,
    mesh_of,
    own,
    part,
    same,
    same_grads,
    weight_grad,
    whole,
)

# --- one linear ------------------------------------------------------------------------------

Drawn = tuple[nn.Linear, nn.Linear, torch.Tensor, torch.Tensor]


def drawn(group: dist.ProcessGroup, style: Any, dtype: torch.dtype, bias: bool) -> Drawn:
    """A linear of a style, the same in one process, an input and a gradient."""
    dense = nn.Linear(K, N, bias=bias, dtype=dtype)
    linear = parallelize_module(copy.deepcopy(dense), mesh_of(group), style)
    return linear, dense, torch.randn(B, S, K).to(dtype), torch.randn(B, S, N).to(dtype)


def check_output(y: torch.Tensor, expected: reference.Expected, dim: int | None) -> None:
    """Products are rounded once before a bias is added: to bfloat16, or as they are summed."""
    if y.dtype == torch.bfloat16 or dim is None:
        once = reference.unit_roundoff(y.dtype) * expected.magnitude
        assert ((y.double() - expected.value).abs() <= once + expected.bound(y.dtype)).all()
    else:
        expected.check(y)


def sum_of_rows(grad: torch.Tensor, world_size: int, dim: int | None) -> reference.Expected:
    """The gradient of a bias; parts along `dim` are summed, rounded, and then added up."""
    rows = grad.flatten(0, -2)
    total = reference.matmul(rows.t(), torch.ones(len(rows), 1, dtype=grad.dtype))
    parts = None
    if dim is not None:
        sums = [g.flatten(0, -2).sum(0) for g in grad.double().tensor_split(world_size, dim)]
        parts = torch.stack(sums).abs().sum(0)
    terms = total.terms + world_size
    return reference.Expected(total.value[:, 0], total.magnitude[:, 0], terms, parts)


def colwise(group: dist.ProcessGroup, dtype: torch.dtype, dim: int | None, bias: bool) -> None:
    style = FusedColwiseParallel(input_layouts=Replicate() if dim is None else Shard(dim))
    linear, dense, x, grad = drawn(group, style, dtype, bias)
    W, rank = group.size(), group.rank()
    weights, grads = dense.weight.tensor_split(W), grad.tensor_split(W, -1)
    x_leaf, own_grad = leaf(own(x, group, dim)), grads[rank].contiguous()
    y = linear(x_leaf)
    expected = reference.matmul(x, weights[rank].t(), part(dense.bias, group, 0) if bias else None)
    check_output(y, expected, dim) if bias else expected.check(y)
    y.backward(own_grad)
    of_x = (
        reference.matmul_all_reduce(grads, weights)
        if dim is None
        else reference.matmul_reduce_scatter(grads, weights, dim)[rank]
    )
    assert x_leaf.grad is not None
    of_x.check(x_leaf.grad)
    weight_grad(own_grad, x, W if dim is not None else 1, dim or 0).check(local(linear.weight.grad))
    if bias:
        sum_of_rows(own_grad, W, None).check(local(linear.bias.grad))


def rowwise(group: dist.ProcessGroup, dtype: torch.dtype, dim: int | None, bias: bool) -> None:
    style = FusedRowwiseParallel(output_layouts=Replicate() if dim is None else Shard(dim))
    linear, dense, x, grad = drawn(group, style, dtype, bias)
    W, rank = group.size(), group.rank()
    xs, weights = x.tensor_split(W, -1), dense.weight.tensor_split(W, 1)
    x_part = leaf(xs[rank].contiguous())
    y = linear(x_part)
    factors, b = (xs, [w.t() for w in weights]), dense.bias if bias else None
    if dim is None:
        reference.matmul_all_reduce(*factors, bias=b).check(y)
        everywhere: list[Any] = [None] * W
        dist.all_gather_object(everywhere, y.detach(), group=group)
        assert all(torch.equal(other, y) for other in everywhere)  # to the last bit
    else:
        expected = reference.matmul_reduce_scatter(*factors, dim, bias=b)[rank]
        check_output(y, expected, dim) if bias else expected.check(y)
    y.backward(own(grad, group, dim))
    assert x_part.grad is not None
    reference.matmul(grad, weights[rank]).check(x_part.grad)
    of_weight = weight_grad(grad, xs[rank], W if dim is not None else 1, dim or 0)
    of_weight.check(local(linear.weight.grad))
    if bias:
        sum_of_rows(grad, W, dim).check(local(linear.bias.grad))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("check", [colwise, rowwise])
@pytest.mark.parametrize(
    ("dtype", "dim", "bias"),
    [
        (torch.float32, 1, True),
        (torch.float32, 0, False),
        (torch.float64, -2, True),
        (torch.bfloat16, 1, True),
        (torch.bfloat16, -2, False),
        (torch.float64, None, True),
        (torch.float32, None, False),
        (torch.float32, None, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, None, False),
    ],
)
def test_one_linear(
    ranks: Ranks,
    world_size: int,
    check: Callable[..., None],
    dtype: torch.dtype,
    dim: int | None,
    bias: bool,
) -> None:
    if dim == 0 and B % world_size:
        dim = 1
    ranks.run(world_size, check, dtype, dim, bias)


# --- whole blocks ----------------------------------------------------------------------------


def block_trains(group: dist.ProcessGroup, dim: int | None) -> None:
    dense, block = fused_block(group, dim)
    names = [name for name, _ in dense.named_parameters()]
    assert [name for name, _ in block.named_parameters()] == names
    assert list(block.state_dict()) == list(dense.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (dense, block)]
    for _ in range(3):
        x = torch.randn(B, S, K, dtype=torch.float64)
        inputs = leaf(x), leaf(own(x, group, dim))
        y, y_own = (m(each) for m, each in zip((dense, block), inputs, strict=True))
        same(y_own, own(y, group, dim))
        for output in (y, y_own):
            output.square().sum().backward()
        same(whole(inputs[1].grad), own(whole(inputs[0].grad), group, dim))
        if dim is not None:  # the norm is outside of the styles: each rank has a partial gradient
            dist.all_reduce(block.norm.weight.grad, group=group)
        same_grads(block, dense)
        norms = [nn.utils.clip_grad_norm_([m.w1.weight, m.w2.weight], 1.0) for m in (dense, block)]
        same(whole(norms[1]), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_block_trains_as_the_dense_one(ranks: Ranks, world_size: int) -> None:
    for dim in (1, -2, None):
        ranks.run(world_size, block_trains, dim)


@pytest.mark.ranks(3)
def test_parameters_are_placed_as_torch_does(group: dist.ProcessGroup) -> None:
    dense, block = fused_block(group)
    torchs = parallelize_module(
        copy.deepcopy(dense),
        mesh_of(group),
        {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()},
    )
    for name in ("w1.weight", "w1.bias", "w3.weight", "w3.bias", "w2.weight", "w2.bias"):
        ours, theirs = block.get_parameter(name), torchs.get_parameter(name)
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        assert ours.placements == theirs.placements
        assert torch.equal(ours.full_tensor(), dense.get_parameter(name))
        assert torch.equal(local(ours), local(theirs))
    assert block.w2.bias.placements == (Replicate(),)
    # A checkpoint of one loads into the other.
    torchs.load_state_dict(block.state_dict())


@pytest.mark.ranks(2)
def test_only_fused_ops_communicate(group: dist.ProcessGroup) -> None:
    x = torch.randn(B, S, K, dtype=torch.float64)
    inside: dict[int | None, tuple[list[str], int]] = {
        # In backward: the bias of w2; w2; then w1 and w3: input gradient, weight gradients.
        1: (["fused_all_gather_matmul", "fused_matmul_reduce_scatter"], 4),
        None: (["fused_matmul_all_reduce"], 1),
    }
    for dim, (names, count) in inside.items():
        _, block = fused_block(group, dim)
        x_own, ops = leaf(own(x, group, dim)), [f"symm_mem::{name}" for name in names]
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            if dim is None or mode is torch.enable_grad:
                with mode(), Recorder() as forward:
                    y = block(x_own)
                assert forward.communicating() == ops
        with Recorder() as backward:
            y.sum().backward()
        assert all(name.startswith("symm_mem::") for name in backward.communicating())
        assert len(backward.communicating()) == count, backward.communicating()


# --- with the rest of torch ------------------------------------------------------------------


def copies_and_checkpoints(group: dist.ProcessGroup) -> None:
    dense, block = fused_block(group)
    clone = copy.deepcopy(block)
    assert clone.w1.shared is clone.w3.shared is not block.w1.shared
    x = torch.randn(B, S, K, dtype=torch.float64)
    x_shard = part(x, group, 1)
    dense(x).sum().backward()
    for module in (block, clone):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint(module, x_shard, use_reentrant=False).sum().backward()
        same(module.w1.weight.grad.full_tensor(), dense.w1.weight.grad)
        same(module.w2.bias.grad.full_tensor(), dense.w2.bias.grad)


def autocasts_and_checkpoints(group: dist.ProcessGroup) -> None:
    for dim, backend in ((1, ""), (None, ""), (1, "aot_eager")):
        dense = Block()
        block = parallelize_module(copy.deepcopy(dense), mesh_of(group), fused_plan(dim))
        x = torch.randn(B, S, K)
        x_own = leaf(own(x, group, dim))
        run = partial(checkpoint, block, use_reentrant=False)
        if backend:
            run = torch.compile(block, backend=backend, fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            expected = dense(x)
            out = run(x_own)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, own(expected, group, dim), rtol=0.05, atol=0.05)
        for each in (expected, out):
            each.float().square().sum().backward()
        assert whole(x_own.grad).dtype == torch.float32
        if dim is not None:
            dist.all_reduce(block.norm.weight.grad, group=group)
        for name, parameter in block.named_parameters():
            found, want = whole(parameter.grad), whole(dense.get_parameter(name).grad)
            assert found.dtype == torch.float32
            scale = want.abs().max().item()
            torch.testing.assert_close(found, want, rtol=0.1, atol=0.05 * scale)


def takes_dtensors(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    dense, block = fused_block(group)
    parallelize_module(block, mesh, {"norm": SequenceParallel(sequence_dim=1)})
    x = torch.randn(B, S, K, dtype=torch.float64)
    y = dense(x)
    y.sum().backward()
    y_shard = block(DTensor.from_local(part(x, group, 1), mesh, [Shard(1)]))
    same(y_shard, part(y, group, 1))
    y_shard.sum().backward()
    same(block.norm.weight.grad.full_tensor(), dense.norm.weight.grad)
    same(block.w3.weight.grad.full_tensor(), dense.w3.weight.grad)
    replicated = DTensor.from_local(x, mesh, [Replicate()])
    with pytest.raises(
        ValueError, match=r"placed \(Replicate\(\),\).*must be placed \(Shard\(dim=1\),\)"
    ):
        block.w1(replicated)


def trains_with_frozen_weights(group: dist.ProcessGroup) -> None:
    dense, block = Block().double(), None
    dense.w1.weight.requires_grad_(False)
    dense.w2.bias.requires_grad_(False)
    block = parallelize_module(copy.deepcopy(dense), mesh_of(group), fused_plan())
    x = torch.randn(B, S, K, dtype=torch.float64)
    dense(x).sum().backward()
    block(part(x, group, 1)).sum().backward()
    assert block.w1.weight.grad is None
    assert block.w2.bias.grad is None
    for name in ("w1.bias", "w3.weight", "w2.weight"):
        same(block.get_parameter(name).grad.full_tensor(), dense.get_parameter(name).grad)


def loads_from_a_pickle(group: dist.ProcessGroup) -> None:
    _, block = fused_block(group)
    saved = io.BytesIO()
    torch.save(block.state_dict(), saved)
    saved.seek(0)
    block.load_state_dict(torch.load(saved, weights_only=False))
    assert pickle.loads(pickle.dumps(FusedRowwiseParallel(sequence_dim=0))).sequence_dim == 0


@pytest.mark.parametrize(
    "check",
    [
        copies_and_checkpoints,
        autocasts_and_checkpoints,
        takes_dtensors,
        trains_with_frozen_weights,
        loads_from_a_pickle,
    ],
)
def test_with_torch(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks.run(2, check)


# --- errors ----------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.ranks(3)
def test_errors(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)

    def apply(module: nn.Module, style: Any) -> Callable[[], object]:
        return lambda: parallelize_module(module, mesh, style)

    fused = parallelize_module(nn.Linear(K, N), mesh, FusedColwiseParallel())
    mixed = nn.ModuleDict({"a": nn.Linear(8, 6), "b": nn.Linear(12, 6)})
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "no linear named 'c'", apply(mixed, FusedColwiseGroup(("a", "c")))),
        (ValueError, "must have the same in_features", apply(mixed, FusedColwiseGroup(("a", "b")))),
        (ValueError, "is already a DTensor", apply(fused, FusedRowwiseParallel())),
        (NotImplementedError, "not OwnForward", apply(OwnForward(6, 6), FusedColwiseParallel())),
        (NotImplementedError, "not Embedding", apply(nn.Embedding(6, 6), FusedColwiseParallel())),
        (ValueError, "out of range for a 1-D input", lambda: fused(torch.ones(K))),
        (ValueError, "is the last dimension of an input", lambda: fused(torch.ones(3, K))),
        (
            ValueError,
            "has 7 features on this rank, must have 36",
            lambda: fused(torch.ones(3, 2, 7)),
        ),
        (ValueError, "sequence_dim=-1", lambda: FusedColwiseParallel(sequence_dim=-1)),
        (ValueError, "multiple_of=0", lambda: FusedColwiseParallel(multiple_of=0)),
        (ValueError, "must be different names", lambda: FusedColwiseGroup(("a", "a"))),
        (TypeError, "sequence of names, not 'ab'", lambda: FusedColwiseGroup("ab")),
        (TypeError, "not str", lambda: FusedRowwiseParallel(sequence_dim="1")),  # type: ignore[arg-type]
    ]
    for kind, argument in (
        (FusedColwiseParallel, "input_layouts"),
        (FusedRowwiseParallel, "output_layouts"),
    ):
        for error, message, options in (
            (TypeError, r"must be Shard\(sequence_dim\) or Replicate\(\)", {argument: "replicate"}),
            (ValueError, "is the last dimension, which holds the features", {argument: Shard(-1)}),
            (TypeError, "use_local_output must be a bool", {"use_local_output": None}),
        ):
            cases.append((error, message, partial(kind, **options)))
        for layout in (Replicate(), Shard(0)):
            assert repr(layout) in repr(kind(**{argument: layout}))
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    row = parallelize_module(nn.Linear(K, N), mesh, FusedRowwiseParallel())
    with pytest.raises(ValueError, match="not divisible by world size 3"):
        row(torch.ones(2, 10, K // 3))
    assert row(torch.ones(2, 9, K // 3)).shape == (2, 3, N)  # calls work after the errors
    # Nothing was changed by a group that could not be applied.
    assert not any(isinstance(p, DTensor) for p in mixed.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_errors_on_one_rank_reach_the_others(group: dist.ProcessGroup, world_size: int) -> None:
    """The peers of a rank that raises before the op do not wait for their time-out."""
    all_ranks = dist.new_group(list(range(group.size())))
    mesh, bad, W = mesh_of(all_ranks), all_ranks.rank() == 0, all_ranks.size()
    col = parallelize_module(nn.Linear(K, N), mesh, FusedColwiseParallel())
    row = parallelize_module(nn.Linear(N, K), mesh, FusedRowwiseParallel())
    plan = {
        "0": FusedColwiseParallel(input_layouts=Replicate()),
        "1": FusedRowwiseParallel(output_layouts=Replicate()),
    }
    both = parallelize_module(nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)), mesh, plan)
    pair = nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(K, N)})
    pair.forward = lambda x: pair.a(x) + pair.b(x)  # type: ignore[method-assign]
    parallelize_module(pair, mesh, FusedColwiseGroup(("a", "b")))
    x, x_part = torch.ones(2, 3, K), torch.ones(2, 3 * W, N // W)
    replicated = DTensor.from_local(torch.ones(2, 3 * W, K), mesh, [Replicate()])
    sharded = DTensor.from_local(x, mesh, [Shard(1)])
    as_placed = r"placed \(Shard\(dim=1\),\).*must be placed \(Replicate\(\),\)"
    wrong: list[tuple[nn.Module, torch.Tensor, torch.Tensor, str]] = [
        (col, x, x[0, 0], "out of range for a 1-D input"),
        (col, x, replicated, "the input is a DTensor placed"),
        (pair, x, x[..., :7], "has 7 features on this rank"),
        (row, x_part, x_part[0], "is the last dimension of an input"),
        (both, x, x[0, 0], "must have at least 2 dimensions"),
        (both, x, x[..., :7], "has 7 features on this rank, must have 36"),
        (both, x, sharded, as_placed),
    ]
    for module, good_input, bad_input, message in wrong:
        start = time.monotonic()
        with pytest.raises(ValueError if bad else RuntimeError, match=message) as caught:
            module(bad_input if bad else good_input)
        assert bad or "ValueError on rank 0" in str(caught.value)
        assert time.monotonic() - start < patient(2)
        assert col(x).shape == (2, 3 * W, N // W)  # in step again
        assert both(x).shape == (2, 3, K)


@pytest.mark.ranks(4)
def test_mesh(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="must have one dimension, this one has 2"):
        parallelize_module(nn.Linear(4, 4), mesh, FusedColwiseParallel())
    linear = parallelize_module(nn.Linear(4, 4), mesh["tp"], FusedColwiseParallel())
    assert linear(torch.ones(1, 3, 4)).shape == (1, 6, 2)
