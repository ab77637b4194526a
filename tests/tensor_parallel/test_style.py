"""The styles against dense linears, and their other guarantees."""

from __future__ import annotations

import copy
import io
import pickle
import time
import warnings
from collections.abc import Callable
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
    part,
    same,
    weight_grad,
)

# --- one linear ------------------------------------------------------------------------------


def colwise(group: dist.ProcessGroup, dtype: torch.dtype, dim: int, bias: bool) -> None:
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    weight = linear.weight.detach().clone()
    bias_vector = linear.bias.detach().clone() if bias else None
    x, grad = torch.randn(B, S, K).to(dtype), torch.randn(B, S, N).to(dtype)
    parallelize_module(linear, mesh_of(group), FusedColwiseParallel(sequence_dim=dim))

    x_shard = leaf(part(x, group, dim))
    y = linear(x_shard)
    w_part = part(weight, group, 0)
    b_part = part(bias_vector, group, 0) if bias_vector is not None else None
    expected = reference.matmul(x, w_part.t(), b_part)
    if bias_vector is not None and dtype == torch.bfloat16:
        # The product is rounded once before the bias is added.
        rounded = reference.unit_roundoff(dtype) * expected.magnitude
        assert ((y.double() - expected.value).abs() <= rounded + expected.bound(dtype)).all()
    else:
        expected.check(y)

    grad_parts = list(grad.tensor_split(group.size(), -1))
    y.backward(grad_parts[group.rank()])
    weights = list(weight.tensor_split(group.size(), 0))
    x_grads = reference.matmul_reduce_scatter(grad_parts, weights, dim)
    assert x_shard.grad is not None
    x_grads[group.rank()].check(x_shard.grad)
    own_grad = grad_parts[group.rank()]
    weight_grad(own_grad, x, group.size(), dim).check(local(linear.weight.grad))
    if bias:
        rows = own_grad.reshape(B * S, -1)
        total = reference.matmul(rows.t(), torch.ones(B * S, 1, dtype=dtype))
        reference.Expected(total.value.squeeze(1), total.magnitude.squeeze(1), B * S).check(
            local(linear.bias.grad)
        )


def rowwise(group: dist.ProcessGroup, dtype: torch.dtype, dim: int, bias: bool) -> None:
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    weight = linear.weight.detach().clone()
    bias_vector = linear.bias.detach().clone() if bias else None
    x, grad = torch.randn(B, S, K).to(dtype), torch.randn(B, S, N).to(dtype)
    parallelize_module(linear, mesh_of(group), FusedRowwiseParallel(sequence_dim=dim))

    x_parts = [p.contiguous() for p in x.tensor_split(group.size(), -1)]
    w_parts = list(weight.tensor_split(group.size(), 1))
    x_part = leaf(x_parts[group.rank()])
    y = linear(x_part)
    expected = reference.matmul_reduce_scatter(
        x_parts, [w.t() for w in w_parts], dim, bias=bias_vector
    )[group.rank()]
    if bias_vector is not None and dtype == torch.bfloat16:
        rounded = reference.unit_roundoff(dtype) * expected.magnitude
        assert ((y.double() - expected.value).abs() <= rounded + expected.bound(dtype)).all()
    else:
        expected.check(y)

    y.backward(part(grad, group, dim))
    assert x_part.grad is not None
    reference.matmul(grad, w_parts[group.rank()]).check(x_part.grad)
    own_x = x_parts[group.rank()]
    weight_grad(grad, own_x, group.size(), dim).check(local(linear.weight.grad))
    if bias:
        rows = grad.reshape(B * S, N)
        # Summed within each rank, rounded, then summed over the ranks.
        parts = [g.reshape(-1, N).sum(0) for g in grad.double().tensor_split(group.size(), dim)]
        total = reference.matmul(rows.t(), torch.ones(B * S, 1, dtype=dtype))
        reference.Expected(
            total.value.squeeze(1),
            total.magnitude.squeeze(1),
            B * S + group.size(),
            torch.stack(parts).abs().sum(0),
        ).check(local(linear.bias.grad))


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
    ],
)
def test_one_linear(
    ranks: Ranks,
    world_size: int,
    check: Callable[..., None],
    dtype: torch.dtype,
    dim: int,
    bias: bool,
) -> None:
    if dim == 0 and B % world_size:
        dim = 1
    ranks.run(world_size, check, dtype, dim, bias)


# --- whole blocks ----------------------------------------------------------------------------


def block_trains(group: dist.ProcessGroup, dim: int) -> None:
    dense, block = fused_block(group, dim)
    names = [name for name, _ in dense.named_parameters()]
    assert [name for name, _ in block.named_parameters()] == names
    assert list(block.state_dict()) == list(dense.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (dense, block)]
    for _ in range(3):
        x = torch.randn(B, S, K, dtype=torch.float64)
        y = dense(x)
        y.square().sum().backward()
        y_shard = block(part(x, group, dim))
        same(y_shard, part(y, group, dim))
        y_shard.square().sum().backward()
        # The norm is outside of the styles: each rank has a partial gradient.
        dist.all_reduce(block.norm.weight.grad, group=group)
        for name, parameter in block.named_parameters():
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            same(whole, dense.get_parameter(name).grad)
        norms = [nn.utils.clip_grad_norm_([m.w1.weight, m.w2.weight], 1.0) for m in (dense, block)]
        norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        same(norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_block_trains_as_the_dense_one(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, block_trains, 1)
    ranks.run(world_size, block_trains, -2)


def placed_as_torch_does(group: dist.ProcessGroup) -> None:
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


def test_parameters_are_placed_as_torch_does(ranks: Ranks) -> None:
    ranks.run(3, placed_as_torch_does)


def only_fused_ops(group: dist.ProcessGroup) -> None:
    _, block = fused_block(group)
    x_shard = leaf(torch.randn(B, S // group.size(), K, dtype=torch.float64))
    with Recorder() as forward:
        y_shard = block(x_shard)
    with Recorder() as backward:
        y_shard.sum().backward()
    assert forward.communicating() == [
        "symm_mem::fused_all_gather_matmul",
        "symm_mem::fused_matmul_reduce_scatter",
    ]
    assert all(name.startswith("symm_mem::") for name in backward.communicating())
    # The bias of w2; w2; then w1 and w3: input gradient, weight gradients.
    assert len(backward.communicating()) == 4, backward.communicating()


def test_only_fused_ops_communicate(ranks: Ranks) -> None:
    ranks.run(2, only_fused_ops)


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


def autocasts(group: dist.ProcessGroup) -> None:
    block = parallelize_module(Block(), mesh_of(group), fused_plan())
    x_shard = leaf(torch.randn(B, S // group.size(), K))
    with torch.autocast("cpu", torch.bfloat16):
        y_shard = block(x_shard)
        assert block.w1.shared is not None
    assert y_shard.dtype == torch.bfloat16
    y_shard.sum().backward()
    assert x_shard.grad is not None
    assert x_shard.grad.dtype == torch.float32
    assert local(block.w1.weight.grad).dtype == torch.float32


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
        autocasts,
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


def refuses(group: dist.ProcessGroup) -> None:
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
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    row = parallelize_module(nn.Linear(K, N), mesh, FusedRowwiseParallel())
    with pytest.raises(ValueError, match="not divisible by world size 3"):
        row(torch.ones(2, 10, K // 3))
    assert row(torch.ones(2, 9, K // 3)).shape == (2, 3, N)  # calls work after the errors
    # Nothing was changed by a group that could not be applied.
    assert not any(isinstance(p, DTensor) for p in mixed.parameters())


def test_errors(ranks: Ranks) -> None:
    ranks.run(3, refuses)


def one_rank_refuses(group: dist.ProcessGroup) -> None:
    """The peers of a rank that raises before the op do not wait for their time-out."""
    own = dist.new_group(list(range(group.size())))
    mesh, bad = mesh_of(own), own.rank() == 0
    col = parallelize_module(nn.Linear(K, N), mesh, FusedColwiseParallel())
    row = parallelize_module(nn.Linear(N, K), mesh, FusedRowwiseParallel())
    pair = nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(K, N)})
    pair.forward = lambda x: pair.a(x) + pair.b(x)  # type: ignore[method-assign]
    parallelize_module(pair, mesh, FusedColwiseGroup(("a", "b")))
    x_shard, x_part = torch.ones(2, 3, K), torch.ones(2, 3 * own.size(), N // own.size())
    replicated = DTensor.from_local(torch.ones(2, 3 * own.size(), K), mesh, [Replicate()])
    wrong: list[tuple[nn.Module, torch.Tensor, torch.Tensor, str]] = [
        (col, x_shard, x_shard[0, 0], "out of range for a 1-D input"),
        (col, x_shard, replicated, "the input is a DTensor placed"),
        (pair, x_shard, x_shard[..., :7], "has 7 features on this rank"),
        (row, x_part, x_part[0], "is the last dimension of an input"),
    ]
    for module, good_input, bad_input, message in wrong:
        start = time.monotonic()
        with pytest.raises(ValueError if bad else RuntimeError, match=message) as caught:
            module(bad_input if bad else good_input)
        assert bad or "ValueError on rank 0" in str(caught.value)
        assert time.monotonic() - start < patient(2)
        assert col(x_shard).shape == (2, 3 * own.size(), N // own.size())  # in step again


@pytest.mark.parametrize("world_size", [2, 3])
def test_errors_on_one_rank_reach_the_others(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, one_rank_refuses)


def refuses_a_mesh_of_two_dimensions(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="must have one dimension, this one has 2"):
        parallelize_module(nn.Linear(4, 4), mesh, FusedColwiseParallel())
    linear = parallelize_module(nn.Linear(4, 4), mesh["tp"], FusedColwiseParallel())
    assert linear(torch.ones(1, 3, 4)).shape == (1, 6, 2)


def test_mesh(ranks: Ranks) -> None:
    ranks.run(4, refuses_a_mesh_of_two_dimensions)
