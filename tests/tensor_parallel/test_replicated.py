"""Tensor parallelism between replicated activations, against dense linears."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from symm_cp.tensor_parallel import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
    replicated,
)
from symm_cp.testing import Ranks
from tests import reference
from tests.exhaustive import some
from tests.patience import patient
from tests.tensor_parallel.common import (
    WORLD_SIZES,
    B,
    Block,
    K,
    N,
    Recorder,
    S,
    leaf,
    local,
    mesh_of,
    part,
    replicated_plan,
    same,
)

# --- one linear ------------------------------------------------------------------------------


def _check(actual: torch.Tensor | None, expected: reference.Expected) -> None:
    """The product may be rounded once before a bias is added."""
    assert actual is not None
    once = reference.unit_roundoff(actual.dtype) * expected.magnitude
    assert actual.shape == expected.value.shape
    error = (actual.double() - expected.value).abs()
    assert (error <= once + expected.bound(actual.dtype)).all()


def _rows(grad: torch.Tensor) -> reference.Expected:
    rows = grad.reshape(-1, grad.shape[-1])
    total = reference.matmul(rows.t(), torch.ones(len(rows), 1, dtype=grad.dtype))
    return reference.Expected(total.value[:, 0], total.magnitude[:, 0], total.terms)


def colwise(group: dist.ProcessGroup, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    dense = copy.deepcopy(linear)
    x, grad = torch.randn(B, S, K).to(dtype), torch.randn(B, S, N).to(dtype)
    style = FusedColwiseParallel(input_layouts=Replicate())
    parallelize_module(linear, mesh_of(group), style)
    x_leaf, own = leaf(x), part(grad, group, -1).contiguous()
    y = linear(x_leaf)
    b_part = part(dense.bias, group, 0) if bias else None
    _check(y, reference.matmul(x, part(dense.weight, group, 0).t(), b_part))
    y.backward(own)
    products = [
        reference.matmul(g, w)
        for g, w in zip(
            grad.tensor_split(group.size(), -1),
            dense.weight.tensor_split(group.size()),
            strict=True,
        )
    ]
    values = torch.stack([p.value for p in products])
    magnitude = torch.stack([p.magnitude for p in products]).sum(0)
    partials = values.abs().sum(0)
    _check(x_leaf.grad, reference.Expected(values.sum(0), magnitude, N, partials))
    _check(local(linear.weight.grad), reference.matmul(own.flatten(0, -2).t(), x.flatten(0, -2)))
    if bias:
        _check(local(linear.bias.grad), _rows(own))


def rowwise(group: dist.ProcessGroup, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    dense = copy.deepcopy(linear)
    x, grad = torch.randn(B, S, K).to(dtype), torch.randn(B, S, N).to(dtype)
    style = FusedRowwiseParallel(output_layouts=Replicate())
    parallelize_module(linear, mesh_of(group), style)
    x_part = leaf(part(x, group, -1))
    y = linear(x_part)
    whole = reference.matmul(x, dense.weight.t(), dense.bias if bias else None)
    _check(y, whole)
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, y.detach(), group=group)
    assert all(torch.equal(other, y) for other in everywhere)  # to the last bit
    y.backward(grad)
    _check(x_part.grad, reference.matmul(grad, part(dense.weight, group, 1)))
    own = reference.matmul(grad.flatten(0, -2).t(), x_part.detach().flatten(0, -2))
    _check(local(linear.weight.grad), own)
    if bias:
        _check(local(linear.bias.grad), _rows(grad))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("check", [colwise, rowwise])
def test_one_linear(ranks: Ranks, world_size: int, check: Callable[..., None]) -> None:
    for dtype, bias in (
        (torch.float64, True),
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ):
        ranks.run(world_size, check, dtype, bias)


# --- whole blocks ----------------------------------------------------------------------------


def _blocks(group: dist.ProcessGroup) -> tuple[Block, Block]:
    dense = Block().double()
    block = copy.deepcopy(dense)
    return dense, parallelize_module(block, mesh_of(group), replicated_plan())


def same_grads(block: nn.Module, dense: nn.Module) -> None:
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        same(whole, dense.get_parameter(name).grad)


def block_trains(group: dist.ProcessGroup) -> None:
    dense, block = _blocks(group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (dense, block)]
    for _ in range(3):
        x = torch.randn(B, S, K, dtype=torch.float64)
        inputs = [leaf(x), leaf(x)]
        outputs = [m(y) for m, y in zip((dense, block), inputs, strict=True)]
        same(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()
        same(inputs[1].grad, inputs[0].grad)
        same_grads(block, dense)  # the norm's, too: its input is replicated
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_block_trains_as_the_dense_one(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, block_trains)


def communicates_twice(group: dist.ProcessGroup) -> None:
    _, block = _blocks(group)
    x = leaf(torch.randn(B, S, K, dtype=torch.float64))
    with Recorder() as forward:
        y = block(x)
    with Recorder() as backward:
        y.sum().backward()
    assert forward.communicating() == ["symm_mem::fused_matmul_all_reduce"]
    assert backward.communicating() == ["symm_mem::_fused_matmuls_all_reduce"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Recorder() as forward:
            block(x)
        assert forward.communicating() == ["symm_mem::fused_matmul_all_reduce"]


def test_one_fused_op_each_way(ranks: Ranks) -> None:
    ranks.run(2, communicates_twice)


# --- any order, some inputs ------------------------------------------------------------------


def second_derivatives(group: dist.ProcessGroup) -> None:
    """Second derivatives by replicated x and each rank's weights equal the dense block's."""
    dense, block = _blocks(group)
    x = torch.randn(2, 3, K, dtype=torch.float64)
    results = []
    for module in (dense, block):
        y = leaf(x)
        parameters = list(module.parameters())
        (grad, *_) = torch.autograd.grad(module(y).square().sum(), [y], create_graph=True)
        seconds = torch.autograd.grad(grad.square().sum(), [y, *parameters], allow_unused=True)
        names = ["x", *(name for name, _ in module.named_parameters())]
        results.append({n: g for n, g in zip(names, seconds, strict=True) if g is not None})
    assert {"x", "w1.weight", "w3.bias", "w2.weight", "norm.weight"} <= results[0].keys()
    for name, expected in results[0].items():
        actual = results[1][name]
        same(actual.full_tensor() if isinstance(actual, DTensor) else actual, expected)


def second_derivatives_of_parts(group: dist.ProcessGroup) -> None:
    """The derivative by x of a function of each rank's weight gradient equals the dense one."""
    x = torch.randn(2, 3, K, dtype=torch.float64)
    weight = torch.randn(N, K, dtype=torch.float64)
    seconds = []
    for own in (weight, part(weight, group, 0)):
        y, w = leaf(x), leaf(own)
        out = (
            y @ w.t() if own is weight else replicated.columns(y, [w], [None], group.group_name)[0]
        )
        (grad,) = torch.autograd.grad(out.pow(3).sum(), [w], create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), [y])
    torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-10, atol=0)


def some_need_gradients(group: dist.ProcessGroup) -> None:
    """Each subset of (input, weight, bias) that needs gradients gets those, and no others."""
    x = torch.randn(2, 3, K, dtype=torch.float64)
    for style in (
        FusedColwiseParallel(input_layouts=Replicate()),
        FusedRowwiseParallel(output_layouts=Replicate()),
    ):
        by_columns = isinstance(style, FusedColwiseParallel)
        dense = nn.Linear(K, N, dtype=torch.float64)
        linear = parallelize_module(copy.deepcopy(dense), mesh_of(group), style)
        for chosen in range(8):
            needs = [bool(chosen & 1), bool(chosen & 2), bool(chosen & 4)]
            results = []
            for module in (dense, linear):
                split = module is linear and not by_columns
                y = (part(x, group, -1) if split else x).clone().requires_grad_(needs[0])
                module.weight.requires_grad_(needs[1])
                module.bias.requires_grad_(needs[2])
                module.zero_grad()
                out = module(y)
                assert out.requires_grad == any(needs)
                if any(needs):
                    factor = torch.arange(N, dtype=torch.float64)
                    if module is linear and by_columns:
                        factor = part(factor, group, 0)
                    (out * factor).sum().backward()
                results.append([y.grad, module.weight.grad, module.bias.grad])
            for needed, expected, actual in zip(needs, *results, strict=True):
                assert (expected is not None) == (actual is not None) == needed
                if not needed:
                    continue
                if isinstance(actual, DTensor):
                    same(actual.full_tensor(), expected)
                else:
                    same(actual, expected if by_columns else part(expected, group, -1))


@pytest.mark.parametrize(
    "check", [second_derivatives, second_derivatives_of_parts, some_need_gradients]
)
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
def test_gradients(ranks: Ranks, world_size: int, check: Callable[..., None]) -> None:
    ranks.run(world_size, check)


def functions_to_second_order(group: dist.ProcessGroup) -> None:
    """Runs gradgradcheck on one rank; with several, perturbed inputs would differ by rank."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    name = group.group_name

    def columns(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return tuple(replicated.columns(x, [w, 2 * w], [b, None], name))

    def products(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return replicated.sum_products([x, x * x], [w.t(), w.t()], b, name)

    for function in (columns, products):
        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b))


def test_gradcheck(ranks: Ranks) -> None:
    ranks.run(1, functions_to_second_order)


# --- with the rest of torch ------------------------------------------------------------------


def autocasts_and_checkpoints(group: dist.ProcessGroup) -> None:
    dense = Block()
    block = parallelize_module(copy.deepcopy(dense), mesh_of(group), replicated_plan())
    x = torch.randn(B, S, K)
    with torch.autocast("cpu", torch.bfloat16):
        expected = dense(leaf(x))
        y = leaf(x)
        out = checkpoint(block, y, use_reentrant=False)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    expected.float().square().sum().backward()
    out.float().square().sum().backward()
    assert y.grad is not None
    assert y.grad.dtype == torch.float32
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        reference_grad = dense.get_parameter(name).grad
        assert whole.dtype == torch.float32
        scale = reference_grad.abs().max().item()
        torch.testing.assert_close(whole, reference_grad, rtol=0.1, atol=0.05 * scale)


def inference_then_training(group: dist.ProcessGroup) -> None:
    dense, block = _blocks(group)
    x = torch.randn(B, S, K, dtype=torch.float64)
    with torch.inference_mode():
        for tokens in (x, x[:, -1:], x[:1, -1:]):  # all, or the last of each sequence
            same(block(tokens), dense(tokens))
    dense(x).sum().backward()
    block(x).sum().backward()
    same_grads(block, dense)


def takes_and_returns_dtensors(group: dist.ProcessGroup) -> None:
    """Works with torch's styles: both linears of the pair are ours, or one is torch's."""
    mesh = mesh_of(group)
    x = torch.randn(B, S, K, dtype=torch.float64)
    for ours in ("both", "colwise", "rowwise"):
        dense = Block().double()
        block = copy.deepcopy(dense)
        colwise: dict[str, Any] = {n: ColwiseParallel() for n in ("w1", "w3")}
        if ours != "rowwise":
            style = FusedColwiseGroup(
                ("w1", "w3"), input_layouts=Replicate(), use_local_output=False
            )
            colwise = {"": style}
        rowwise: Any = RowwiseParallel(use_local_output=False)
        if ours != "colwise":
            rowwise = FusedRowwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(block, mesh, {**colwise, "w2": rowwise})
        prepare = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block, mesh, {"": prepare, "norm": SequenceParallel(sequence_dim=1)})
        block.norm.register_forward_hook(
            lambda m, i, o: o.redistribute(placements=[Replicate()])  # as PrepareModuleInput does
        )
        y = leaf(x)
        out = block(y)
        assert isinstance(out, DTensor)
        assert out.placements == (Replicate(),)
        assert out.shape == x.shape
        expected_input = leaf(x)
        expected = dense(expected_input)
        same(out.to_local(), expected)
        out.square().sum().to_local().backward()
        expected.square().sum().backward()
        same_grads(block, dense)
        same(y.grad, expected_input.grad)


def returns_dtensors_by_sequence(group: dist.ProcessGroup) -> None:
    mesh, size = mesh_of(group), group.size()
    col = FusedColwiseParallel(use_local_output=False)
    row = FusedRowwiseParallel(use_local_output=False)
    up = parallelize_module(nn.Linear(K, N), mesh, col)
    down = parallelize_module(nn.Linear(N, K), mesh, row)
    hidden = up(torch.randn(B, S // size, K))
    assert hidden.placements == (Shard(2),)
    assert hidden.shape == (B, S, N)
    out = down(hidden)
    assert out.placements == (Shard(1),)
    assert out.shape == (B, S, K)


@pytest.mark.parametrize(
    "check",
    [
        autocasts_and_checkpoints,
        inference_then_training,
        takes_and_returns_dtensors,
        returns_dtensors_by_sequence,
    ],
)
def test_with_torch(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks.run(2, check)


# --- errors ----------------------------------------------------------------------------------


def refuses(group: dist.ProcessGroup) -> None:
    """If one rank refuses its input, its peers get an error, and the next call works."""
    own = dist.new_group(list(range(group.size())))
    mesh, bad = mesh_of(own), own.rank() == 0
    col = parallelize_module(nn.Linear(K, N), mesh, FusedColwiseParallel(input_layouts=Replicate()))
    row = parallelize_module(
        nn.Linear(N, K), mesh, FusedRowwiseParallel(output_layouts=Replicate())
    )
    x = torch.ones(2, 3, K)
    sharded = DTensor.from_local(x, mesh, [Shard(1)])
    for wrong, message in (
        (x[0, 0], "must have at least 2 dimensions"),
        (x[..., :7], "has 7 features on this rank, must have 36"),
        (sharded, r"placed \(Shard\(dim=1\),\).*must be placed \(Replicate\(\),\)"),
    ):
        start = time.monotonic()
        with pytest.raises(ValueError if bad else RuntimeError, match=message) as caught:
            row(col(wrong if bad else x))
        assert bad or "ValueError on rank 0" in str(caught.value)
        assert time.monotonic() - start < patient(2)
        assert row(col(x)).shape == (2, 3, K)
    for cls, argument in (
        (FusedColwiseParallel, "input_layouts"),
        (FusedRowwiseParallel, "output_layouts"),
    ):
        with pytest.raises(TypeError, match=r"must be Shard\(sequence_dim\) or Replicate\(\)"):
            cls(**{argument: "replicate"})
        with pytest.raises(ValueError, match="is the last dimension, which holds the features"):
            cls(**{argument: Shard(-1)})
        with pytest.raises(TypeError, match="use_local_output must be a bool"):
            cls(use_local_output=None)
        assert "Replicate()" in repr(cls(**{argument: Replicate()}))
        assert "Shard(dim=0)" in repr(cls(**{argument: Shard(0)}))


@pytest.mark.parametrize("world_size", [2, 3])
def test_errors(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, refuses)
