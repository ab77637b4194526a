"""The references' error bounds: wide enough for torch's own kernels, too tight for mistakes."""

from __future__ import annotations

import pytest
import torch

from symm_cp.ops.matmul.scaled_mm import scaled_mm_out
from tests import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 17, 512])
def test_torch_matmul_is_within_the_bound(dtype: torch.dtype, k: int) -> None:
    a, b = torch.randn(33, k).to(dtype), torch.randn(k, 29).to(dtype)
    reference.matmul(a, b).check(a @ b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lost_term_is_out_of_bounds(dtype: torch.dtype) -> None:
    a, b = torch.randn(33, 64).to(dtype), torch.randn(64, 29).to(dtype)
    with pytest.raises(AssertionError, match="times the bound"):
        reference.matmul(a, b).check(a[:, :-1] @ b[:-1])


def test_accumulating_in_16_bits_is_out_of_bounds() -> None:
    a, b = torch.randn(33, 512).bfloat16(), torch.randn(512, 29).bfloat16()
    total = torch.zeros(33, 29, dtype=torch.bfloat16)
    for part in range(8):
        total += a[:, part * 64 : part * 64 + 64] @ b[part * 64 : part * 64 + 64]
    with pytest.raises(AssertionError, match="times the bound"):
        reference.matmul(a, b).check(total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partials_in_the_dtype_are_within_the_bound(dtype: torch.dtype, op: str) -> None:
    a = [torch.randn(12, 31).to(dtype) for _ in range(3)]
    b = [torch.randn(31, 8).to(dtype) for _ in range(3)]
    partials = [x @ y for x, y in zip(a, b, strict=True)]
    total = torch.stack(partials).to(reference.accumulator(dtype)).sum(0)
    total = (total / 3 if op == "avg" else total).to(dtype)
    expected = reference.matmul_reduce_scatter(a, b, 0, op)
    for part, actual in zip(expected, total.chunk(3), strict=True):
        part.check(actual)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_wrong_values_and_shapes_are_named(wrong: float) -> None:
    expected = reference.reduce([torch.ones(2, 3), torch.ones(2, 3)])
    actual = torch.full((2, 3), 2.0)
    expected.check(actual)
    actual[1, 2] = wrong
    with pytest.raises(AssertionError, match=r"element \(1, 2\)"):
        expected.check(actual)
    with pytest.raises(AssertionError, match=r"actual.shape"):
        expected.check(torch.full((3, 2), 2.0))


def test_scaled_matmul_is_within_the_bound() -> None:
    a = torch.randn(32, 64).to(torch.float8_e4m3fn)
    b = torch.randn(48, 64).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = torch.rand(32, 1) + 0.5, torch.rand(1, 48) + 0.5
    actual = torch.empty(32, 48)
    scaled_mm_out(a, b, scale_a, scale_b, actual)
    sharded = list(zip(a.float().chunk(2), scale_a.chunk(2), strict=True))
    shards, scales = [x for x, _ in sharded], [s for _, s in sharded]
    _, (expected,) = reference.scaled_all_gather_matmul(shards, scales, [b], [scale_b], 0)
    expected.check(actual)
