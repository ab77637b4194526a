"""Linears between replicated activations: gradients of any order, DTensors (see test_style.py)."""

from __future__ import annotations

import copy
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

from symm_cp.tensor_parallel import (
    FusedColwiseGroup,
    FusedColwiseParallel,
    FusedRowwiseParallel,
    replicated,
)
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.tensor_parallel.common import (
    B,
    Block,
    K,
    N,
    S,
    fused_block,
    leaf,
    mesh_of,
    part,
    same,
    same_grads,
    whole,
)

# --- any order, some inputs ------------------------------------------------------------------


def second_derivatives(group: dist.ProcessGroup) -> None:
    """Second derivatives by replicated x and each rank's weights equal the dense block's."""
    dense, block = fused_block(group, None)
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
        same(whole(results[1][name]), expected)


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
                if isinstance(actual, DTensor) or by_columns:
                    same(whole(actual), expected)
                else:
                    same(actual, part(expected, group, -1))


@pytest.mark.parametrize(
    "check", [second_derivatives, second_derivatives_of_parts, some_need_gradients]
)
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
def test_gradients(ranks: Ranks, world_size: int, check: Callable[..., None]) -> None:
    ranks.run(world_size, check)


@pytest.mark.ranks(1)
def test_gradcheck(group: dist.ProcessGroup) -> None:
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


# --- with the rest of torch ------------------------------------------------------------------


def inference_then_training(group: dist.ProcessGroup) -> None:
    dense, block = fused_block(group, None)
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
        inference_then_training,
        takes_and_returns_dtensors,
        returns_dtensors_by_sequence,
    ],
)
def test_with_torch(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks.run(2, check)
