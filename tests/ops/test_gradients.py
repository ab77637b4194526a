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
from symm_cp.tensors.shards import Split
from symm_cp.testing import Ranks
from tests import device
from tests.ops.calls import calls, leaves
from tests.ops.functions import functions
from tests.ops.test_uneven import shape_with, splits

pytestmark = device.devices(*device.NAMES)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(grad: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = grad.clone()
    dist.all_reduce(summed, group=group)
    return summed


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def gather_gradients(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    algorithms = itertools.cycle((None, *tuning.ALGORITHMS, None))  # of no length of a loop
    for dim, used in itertools.product(range(3), ((0, 1), (1,), ())):
        for split in (Split.equal(2, W, dim), *splits(W, dim)):
            whole = torch.randn(shape_with((2, 3, 4), dim, split.length)).double()
            weights = [torch.randn(whole.shape[-1], n).double() for n in (3, 2)]
            probes = [
                [torch.randn(*whole.shape[:-1], n).double() for n in (3, 2)] for _ in range(W)
            ]
            kept = [torch.randn_like(whole) for _ in range(W)]
            dense, dense_weights = leaf(whole), [leaf(w) for w in weights]
            loss: Any = sum((dense * kept[r]).sum() for r in range(W))
            for r, i in itertools.product(range(W), used):
                loss = loss + ((dense @ dense_weights[i]) * probes[r][i]).sum()
            loss.backward()
            shard, own = leaf(split.of(rank, whole)), [leaf(w) for w in weights]
            with tuning.forced(next(algorithms)):
                gathered, outputs = symm_cp.all_gather_matmul(
                    shard, own, gather_dim=dim, group=group, return_gathered=True,
                    sizes=split.sizes,
                )  # fmt: skip
                loss = (gathered * kept[rank]).sum()
                for i in used:
                    loss = loss + (outputs[i] * probes[rank][i]).sum()
                loss.backward()
            torch.testing.assert_close(shard.grad, split.of(rank, dense.grad))
            for i in used:
                torch.testing.assert_close(total(own[i].grad, group), dense_weights[i].grad)


@WORLD_SIZES
def test_all_gather_matmul(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, gather_gradients)


@WORLD_SIZES
@pytest.mark.ranks
def test_matmul_reduce_scatter(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    algorithms = itertools.cycle((None, *tuning.ALGORITHMS, None))  # of no length of a loop
    for dim, op in itertools.product(range(3), ("sum", "avg")):
        for split in (Split.equal(2, W, dim), *splits(W, dim)):
            rows = [2, 3, 4] if dim == 2 else shape_with((2, 3, 4), dim, split.length)
            columns = split.length if dim == 2 else 5
            a = [leaf(torch.randn(rows).double()) for _ in range(W)]
            b = [leaf(torch.randn(4, columns).double()) for _ in range(W)]
            product = sum(x @ w for x, w in zip(a, b, strict=True))
            probe = torch.randn(product.shape).double()
            ((product / (W if op == "avg" else 1)) * probe).sum().backward()
            for need_a, need_b in ((True, True), (True, False), (False, True)):
                own_a = a[rank].detach().clone().requires_grad_(need_a)
                own_b = b[rank].detach().clone().requires_grad_(need_b)
                with tuning.forced(next(algorithms)):
                    output = symm_cp.matmul_reduce_scatter(
                        own_a, own_b, scatter_dim=dim, reduce_op=op, group=group, sizes=split.sizes
                    )
                    (output * split.of(rank, probe)).sum().backward()
                if need_a:
                    torch.testing.assert_close(own_a.grad, a[rank].grad)
                if need_b:
                    torch.testing.assert_close(own_b.grad, b[rank].grad)


@WORLD_SIZES
@pytest.mark.parametrize("algorithm", tuning.ALGORITHMS)
@pytest.mark.ranks
def test_low_precision(group: dist.ProcessGroup, world_size: int, algorithm: str) -> None:
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


@pytest.mark.parametrize("algorithm", tuning.ALGORITHMS)
@WORLD_SIZES
@pytest.mark.ranks
def test_complex(group: dist.ProcessGroup, world_size: int, algorithm: str) -> None:
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.ranks
def test_gradients_lie_like_weights(group: dist.ProcessGroup, world_size: int) -> None:
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.ranks
def test_strides_of_incoming_gradients(group: dist.ProcessGroup, world_size: int) -> None:
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


@WORLD_SIZES
@pytest.mark.ranks
def test_gradients_that_are_undefined(group: dist.ProcessGroup, world_size: int) -> None:
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
