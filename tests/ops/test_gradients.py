"""Gradients of the ops against those of the dense computation, on all ranks together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.cuda import has_streams
from symm_cp.ops.op import declared
from symm_cp.testing import Ranks
from tests import device
from tests.ops.calls import calls, leaves
from tests.ops.functions import functions

pytestmark = device.devices(*device.NAMES)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
SHAPES = [(3, 4), (2, 3, 5), (2, 2, 3, 4)]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(grad: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = grad.clone()
    dist.all_reduce(summed, group=group)
    return summed


def gather_gradients(group: dist.ProcessGroup) -> None:
    """Each rank has its own loss: a weight's dense gradient is the sum of all ranks' gradients."""
    W, rank = group.size(), group.rank()
    algorithms = itertools.cycle(
        (*tuning.ALGORITHMS, tuning.ALGORITHMS[1])
    )  # of no length that others have
    for shape in SHAPES:
        for dim in range(-len(shape), len(shape)):
            full = list(shape)
            full[dim] *= W
            A, Bs = rand(*full), [rand(full[-1], 6), rand(full[-1], 3)]
            probes = [[rand(*full[:-1], 6), rand(*full[:-1], 3)] for _ in range(W)]
            A_probes = [rand(*full) for _ in range(W)]
            for use_A, used in itertools.product((False, True), ((0, 1), (0,), (1,), ())):
                if not use_A and not used:
                    continue
                dense_A = A.clone().requires_grad_()
                dense_Bs = [B.clone().requires_grad_() for B in Bs]
                loss = sum(
                    ((dense_A @ dense_Bs[i]) * probes[r][i]).sum() for r in range(W) for i in used
                ) + sum((dense_A * A_probes[r]).sum() for r in range(W) if use_A)
                loss.backward()
                shard = A.chunk(W, dim)[rank].clone().requires_grad_()
                weights = [B.clone().requires_grad_() for B in Bs]
                with tuning.forced(next(algorithms)):
                    gathered, outputs = symm_cp.all_gather_matmul(
                        shard, weights, gather_dim=dim, group=group, return_gathered=True
                    )
                    own = sum((outputs[i] * probes[rank][i]).sum() for i in used)
                    if use_A:
                        own = own + (gathered * A_probes[rank]).sum()
                    own.backward()
                torch.testing.assert_close(shard.grad, dense_A.grad.chunk(W, dim)[rank])
                for i, (weight, dense_B) in enumerate(zip(weights, dense_Bs, strict=True)):
                    if i in used:
                        torch.testing.assert_close(total(weight.grad, group), dense_B.grad)
                    else:
                        assert weight.grad is None


@WORLD_SIZES
def test_all_gather_matmul(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gather_gradients)


def scatter_gradients(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    algorithms = itertools.cycle(
        (*tuning.ALGORITHMS, tuning.ALGORITHMS[1])
    )  # of no length that others have
    for shape in SHAPES:
        for dim, reduce_op in itertools.product(range(-len(shape), len(shape)), ("sum", "avg")):
            size, N = list(shape), 4
            if dim % len(shape) == len(shape) - 1:
                N *= W
            else:
                size[dim] *= W
            As = [rand(*size).requires_grad_() for _ in range(W)]
            Bs = [rand(size[-1], N).requires_grad_() for _ in range(W)]
            product = sum(A @ B for A, B in zip(As, Bs, strict=True))
            product = product / (W if reduce_op == "avg" else 1)
            probe = torch.randn_like(product)
            (product * probe).sum().backward()
            for need_a, need_b in ((True, True), (True, False), (False, True)):
                a = As[rank].detach().clone().requires_grad_(need_a)
                b = Bs[rank].detach().clone().requires_grad_(need_b)
                with tuning.forced(next(algorithms)):
                    output = symm_cp.matmul_reduce_scatter(
                        a, b, scatter_dim=dim, reduce_op=reduce_op, group=group
                    )
                    (output * probe.chunk(W, dim)[rank]).sum().backward()
                for given, exact, needed in ((a, As[rank], need_a), (b, Bs[rank], need_b)):
                    if needed:
                        torch.testing.assert_close(given.grad, exact.grad)
                    else:
                        assert given.grad is None


@WORLD_SIZES
def test_matmul_reduce_scatter(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, scatter_gradients)


def low_precision(group: dist.ProcessGroup, algorithm: str) -> None:
    """In bfloat16 the weight gradient stays close to the dense one, whatever W is."""
    W, rank = group.size(), group.rank()
    shards = [torch.randn(64, 32).bfloat16() for _ in range(W)]
    B, probe = torch.randn(32, 16).bfloat16(), torch.randn(64 * W, 16).bfloat16()
    shard, weight = shards[rank].clone().requires_grad_(), B.clone().requires_grad_()
    with tuning.forced(algorithm):
        output = symm_cp.all_gather_matmul(shard, weight, group=group)
        (output * probe).sum().backward()
    exact = torch.cat(shards).double().t() @ probe.double()
    parts = sum(
        (s.double().t() @ p.double()).abs() for s, p in zip(shards, probe.chunk(W), strict=True)
    )
    # One rounding for each shard's product and one of the sum.
    bound = torch.finfo(torch.bfloat16).eps / 2 * (parts + exact.abs()) * 1.01 + 1e-4
    assert ((weight.grad.double() - exact).abs() <= bound).all()


@WORLD_SIZES
@pytest.mark.parametrize("algorithm", tuning.ALGORITHMS)
def test_low_precision(ranks: Ranks, world_size: int, algorithm: str) -> None:
    ranks.run(world_size, low_precision, algorithm)


def complex_gradients(group: dist.ProcessGroup, algorithm: str) -> None:
    """Gradients of complex numbers, which are conjugated."""
    W, rank = group.size(), group.rank()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.complex128)

    A, Bs, probes = random(3 * W, 4), [random(4, 2) for _ in range(W)], random(W, 3 * W, 2)
    leaves = [A, *Bs]
    dense = [x.clone().requires_grad_() for x in leaves]
    products = torch.stack([dense[0] @ B for B in dense[1:]])
    ((products * probes).sum() + (products.sum(0) * probes[0]).sum()).abs().backward()
    shard = A.chunk(W)[rank].clone().requires_grad_()
    B = Bs[rank].clone().requires_grad_()
    with tuning.forced(algorithm):
        gathered, out = symm_cp.all_gather_matmul(shard, B, group=group, return_gathered=True)
        scattered = symm_cp.matmul_reduce_scatter(gathered, B, group=group)
        own = (out * probes[rank]).sum() + (scattered * probes[0].chunk(W)[rank]).sum()
        loss = own.detach().clone()
        dist.all_reduce(torch.view_as_real(loss), group=group)
        # The gradient of |z| of the sum z of all ranks' parts.
        own.backward(loss / loss.abs())
    torch.testing.assert_close(shard.grad, dense[0].grad.chunk(W)[rank])
    torch.testing.assert_close(B.grad, dense[1 + rank].grad)


@pytest.mark.parametrize("algorithm", tuning.ALGORITHMS)
@WORLD_SIZES
def test_complex(ranks: Ranks, world_size: int, algorithm: str) -> None:
    ranks.run(world_size, complex_gradients, algorithm)


def gradients_lie_like_weights(group: dist.ProcessGroup) -> None:
    """Gradients have the strides of their weights, so that autograd need not copy them."""
    W = group.size()
    shapes = ((8, 6), (1, 6), (8, 1))  # one row or column is contiguous either way
    for algorithm, linear, shape in itertools.product(tuning.ALGORITHMS, (False, True), shapes):
        inner = shape[linear]
        up, down = (rand(*shape).requires_grad_() for _ in range(2))
        strides: list[tuple[int, ...]] = []
        for weight in (up, down):
            weight.register_hook(lambda grad, strides=strides: strides.append(grad.stride()))
        with tuning.forced(algorithm):
            hidden = symm_cp.all_gather_matmul(
                rand(2, inner), up.T if linear else up, gather_dim=0, group=group
            )
            out = symm_cp.matmul_reduce_scatter(
                rand(2 * W, inner), down.T if linear else down, group=group
            )
            (hidden.sum() + out.sum()).backward()
        assert strides == [up.stride()] * 2, (algorithm, linear, shape)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_lie_like_weights(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gradients_lie_like_weights)


class Undefined(torch.autograd.Function):
    """The sum of a tensor, whose backward pass gives no gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


def laid_out_otherwise(grad: torch.Tensor) -> list[torch.Tensor]:
    """Tensors with the values of a gradient, and strides of other kinds."""
    backwards = grad.permute(*reversed(range(grad.dim()))).contiguous()
    wide = torch.stack([grad, grad], -1)[..., 0]
    return [backwards.permute(*reversed(range(grad.dim()))), wide]


def strides_of_gradients(group: dist.ProcessGroup) -> None:
    """Autograd promises no strides for incoming gradients."""
    found = calls(group) | functions(group)
    if has_streams(torch.device("cpu")):  # torch's own kernels serve other devices
        for op in declared():
            if op.cpu_only:
                found.pop(op.name, None)
    for name, call in found.items():
        given = leaves(call.inputs)
        outputs = [out for out in call.run(*given) if out.requires_grad]

        def gradients(grads: list[torch.Tensor], given: Any = given, outputs: Any = outputs) -> Any:
            return torch.autograd.grad(outputs, given, grads, retain_graph=True, allow_unused=True)

        plain = [torch.randn_like(out).contiguous() for out in outputs]
        others = list(zip(*map(laid_out_otherwise, plain), strict=True))
        # Values that all elements share, as `sum` expands them, in the last dimensions or in all.
        for fewer in (1, 2, 9):
            same = [out.new_full((), 2.0).expand(out.shape) for out in outputs]
            if fewer < 9:
                same = [
                    torch.randn(out.shape[:-fewer] + (1,) * fewer).to(out).expand(out.shape)
                    for out in outputs
                    if out.dim() >= fewer
                ]
                if len(same) < len(outputs):
                    continue
            for kind, (grads, dense) in enumerate(
                [*((each, plain) for each in others), (same, [each.contiguous() for each in same])]
            ):
                told = f"{name}, strides of kind {kind}"
                for got, want in zip(gradients(list(grads)), gradients(dense), strict=True):
                    torch.testing.assert_close(got, want, msg=lambda m, t=told: f"{t}: {m}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_strides_of_incoming_gradients(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, strides_of_gradients)


def undefined_gradients(group: dist.ProcessGroup) -> None:
    """Ranks without gradients take part; only the last rank has gradients, or none has."""
    W, rank = group.size(), group.rank()
    for dim, sizes in ((0, None), (1, None), (0, [2 + r for r in range(W)])):
        shape = [3, 4] if sizes is None else [sizes[rank], 4]
        other, x = rand(4 * (W if dim == 1 else 1), 5), rand(*shape)
        for all_undefined in (True, False):
            shard = x.clone().requires_grad_()
            y = symm_cp.all_gather_matmul(shard, other, gather_dim=dim, group=group, sizes=sizes)
            given = rank == W - 1 and not all_undefined
            (y.sum() if given else Undefined.apply(y)).backward()
            dense = x.clone().requires_grad_()
            if all_undefined:
                expected = torch.zeros_like(x)
            else:
                part = other if dim == 0 else other.chunk(W)[rank]
                (dense @ part).sum().backward()
                assert dense.grad is not None
                expected = dense.grad
            torch.testing.assert_close(shard.grad, expected)


@WORLD_SIZES
def test_gradients_that_are_undefined(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, undefined_gradients)
