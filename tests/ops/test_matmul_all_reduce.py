"""Fused matmul-all-reduce against dense float64 references, on all ranks together.

Results above csrc/ops/matmul_all_reduce.cpp's bound, and sums of several products, take the kernel
in Python; so do all with devices whose streams are simulated.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from tests import device, reference
from tests.exhaustive import some
from tests.ops.refusals import Wrong, check_refusals
from tests.ops.test_random import assert_same_bits

pytestmark = device.devices(*device.NAMES)

OPS = torch.ops.symm_mem
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FLOAT8 = torch.float8_e4m3fn
#: None: natively.
ALGORITHMS = (*tuning.ALGORITHMS, None)


def inner_sizes(W: int) -> list[int]:
    """K of each rank: uneven, and one rank has nothing to multiply if there are several."""
    return [4] if W == 1 else [5 * r for r in range(W)]


@WORLD_SIZES
@pytest.mark.ranks
def test_sums_of_products(group: dist.ProcessGroup, world_size: int) -> None:
    """Sums of products and an addend; and of addends alone."""
    W, rank, name = group.size(), group.rank(), group.group_name
    for algorithm, op, dtype in itertools.product(ALGORITHMS, ("sum", "avg"), FLOATING[1:3]):
        As = [[torch.randn(2, 5, k).to(dtype) for k in (3, 4)] for _ in range(W)]
        Bs = [[torch.randn(k, 6).to(dtype) for k in (3, 4)] for _ in range(W)]
        addends = [torch.randn(2, 5, 6).to(dtype) for _ in range(W)]
        bias = torch.randn(6).to(dtype)
        # One product of the concatenated operands; the addend is multiplied by the identity.
        joint_A = [torch.cat([*a, c], -1) for a, c in zip(As, addends, strict=True)]
        joint_B = [torch.cat([*b, torch.eye(6).to(dtype)]) for b in Bs]
        exact = reference.matmul_all_reduce(joint_A, joint_B, op, bias)
        with tuning.forced(algorithm):
            call = As[rank], Bs[rank], addends[rank], bias, op, name
            out = OPS._fused_matmuls_all_reduce(*call)
            # Three products, each rounded to 16 bits, are added.
            roundings = reference.unit_roundoff(dtype) * 3 * exact.magnitude
            error = (out.double() - exact.value).abs()
            assert bool((error <= exact.bound(dtype) + roundings).all())
            assert_same_bits(out, group)
            total = OPS._fused_matmuls_all_reduce([], [], addends[rank], None, op, name)
            reference.reduce(addends, op).check(total)
            assert_same_bits(total, group)


@pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_large(group: dist.ProcessGroup, world_size: int) -> None:
    """Results that more than two ranks sum in two shots; parts that end within a row; one row."""
    W, rank = group.size(), group.rank()
    shapes = (1030, 3, 301), (7, 64, 9_001), (6, 5, 10_000), (1, 64, 1024)
    for dtype, algorithm, (rows, inner, columns) in itertools.product(
        (torch.float32, torch.bfloat16), ALGORITHMS, shapes
    ):
        As = [torch.randn(rows, inner).to(dtype) for _ in range(W)]
        Bs = [torch.randn(columns, inner).to(dtype).t() for _ in range(W)]
        bias = torch.randn(columns).to(dtype)
        exact = reference.matmul_all_reduce(As, Bs, "sum", bias)
        for _ in range(3):  # both slots
            with tuning.forced(algorithm):
                out = symm_cp.matmul_all_reduce(As[rank], Bs[rank], bias, group=group)
            exact.check(out)
        assert_same_bits(out, group)


@pytest.mark.ranks(3)
def test_integers(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    for dtype in (torch.int32, torch.int64, torch.int8):
        As = [torch.randint(-3, 3, (5, 4), dtype=dtype) for _ in range(W)]
        Bs = [torch.randint(-3, 3, (4, 3), dtype=dtype) for _ in range(W)]
        for algorithm in ALGORITHMS:
            with tuning.forced(algorithm):
                out = symm_cp.matmul_all_reduce(As[rank], Bs[rank], Bs[0][0], group=group)
            assert torch.equal(out, sum(a @ b for a, b in zip(As, Bs, strict=True)) + Bs[0][0])


@pytest.mark.parametrize("world_size", some(1, 3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_scaled(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    cases = itertools.product(((2, 5), (1,), (0,)), ("sum", "avg"), (False, True), (False, True))
    for lead, op, by_rows, has_bias in cases:
        # cuBLAS has one result type for rows with scales, and few for a bias.
        dtype = torch.bfloat16
        sizes = [16 * (r + 1) for r in range(W)]
        As = [torch.randn(*lead, k).to(FLOAT8) for k in sizes]
        Bs = [torch.randn(32, k).to(FLOAT8).t() for k in sizes]
        rows, columns = ((*lead, 1), (1, 32)) if by_rows else ((), ())
        A_scales = [torch.rand(rows) + 0.5 for _ in range(W)]
        B_scales = [torch.rand(columns) + 0.5 for _ in range(W)]
        bias = torch.randn(32).to(dtype) if has_bias else None
        exact = reference.scaled_matmul_all_reduce(As, A_scales, Bs, B_scales, op, bias)
        for algorithm in ALGORITHMS:
            with tuning.forced(algorithm):
                out = symm_cp.scaled_matmul_all_reduce(
                    As[rank], Bs[rank], A_scales[rank], B_scales[rank],
                    reduce_op=op, group=group, bias=bias, out_dtype=dtype,
                )  # fmt: skip
            assert out.dtype == dtype
            exact.check(out)
            assert_same_bits(out, group)


@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_gradients(group: dist.ProcessGroup, world_size: int) -> None:
    """Each rank's loss is its own, and its output depends on every rank's input."""
    W, rank, sizes = group.size(), group.rank(), inner_sizes(group.size())
    for algorithm, op, lead in itertools.product(ALGORITHMS, ("sum", "avg"), ((7,), (2, 3), (0,))):
        As = [torch.randn(*lead, k).double().requires_grad_() for k in sizes]
        Bs = [torch.randn(k, 6).double().requires_grad_() for k in sizes]
        value = torch.randn(6).double()
        biases = [value.clone().requires_grad_() for _ in range(W)]
        probes = [torch.randn(*lead, 6).double() for _ in range(W)]
        total = sum(a @ b for a, b in zip(As, Bs, strict=True)) / (W if op == "avg" else 1)
        torch.autograd.backward([((total + biases[r]) * probes[r]).sum() for r in range(W)])
        dense = As[rank], Bs[rank], biases[rank]
        for needed in itertools.product((False, True), repeat=3):
            own = [x.detach().clone().requires_grad_(n) for x, n in zip(dense, needed, strict=True)]
            with tuning.forced(algorithm):
                out = symm_cp.matmul_all_reduce(*own, reduce_op=op, group=group)
                if any(needed):
                    (out * probes[rank]).sum().backward()
            for got, want, is_needed in zip(own, dense, needed, strict=True):
                if is_needed:
                    torch.testing.assert_close(got.grad, want.grad)
                else:
                    assert got.grad is None


@pytest.mark.ranks(2)
def test_refusals(group: dist.ProcessGroup) -> None:
    name = group.group_name
    A, B, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)

    def fused(*args: Any, op: str = "sum") -> Any:
        return OPS.fused_matmul_all_reduce(*args, op, name)

    def summed(*args: Any) -> Any:
        return OPS._fused_matmuls_all_reduce(*args, "sum", name)

    cases: list[Wrong] = [
        (ValueError, r"A must have at least 2 dimensions, has", lambda: fused(A[0], B, None)),
        (ValueError, r"B\[0\] of shape \[2, 5\] needs 3 rows", lambda: fused(A, B[:2], None)),
        (TypeError, "B.0. is torch.float64 and A is", lambda: fused(A, B.double(), None)),
        (TypeError, "A is torch.complex64: complex", lambda: fused(A.cfloat(), B.cfloat(), None)),
        (ValueError, r"bias has shape \[3\], must have \[5\]", lambda: fused(A, B, bias[:3])),
        (ValueError, r"bias has shape \[1, 5\], must have \[5\]", lambda: fused(A, B, bias[None])),
        (TypeError, "bias is torch.float64 and A is", lambda: fused(A, B, bias.double())),
        (ValueError, "reduce_op='max' must be", lambda: fused(A, B, bias, op="max")),
        (ValueError, "1 A tensors and 2 B tensors", lambda: summed([A], [B, B], None, None)),
        (
            ValueError,
            r"A\[1\] @ B\[1\] has shape \[2, 5\], must have \[4, 5\]",
            lambda: summed([A, A[:2]], [B, B], None, None),
        ),
        (
            ValueError,
            r"A\[0\] @ B\[0\] has shape \[4, 5\], must have \[5, 5\]",
            lambda: summed([A], [B], torch.randn(5, 5), None),
        ),
    ]  # fmt: skip
    check_refusals(group, lambda: fused(A, B, None), cases)
    leaf = torch.randn(4, 16).to(FLOAT8)
    with pytest.raises(ValueError, match=r"A_scale of shape \[3\] does not fit"):
        OPS.fused_scaled_matmul_all_reduce(
            leaf, leaf.t(), torch.ones(3), torch.ones(()), "sum", name
        )
