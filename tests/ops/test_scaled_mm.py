"""Float8 products with scales, by torch's kernel and by what stands in for it on CPU."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.ops.matmul import scaled_mm

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("torchs_own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FLOAT8])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(33, 1), (33, 48), (1, 48)])
def test_rows_have_scales(
    rows: tuple[int, int],
    biased: bool,
    dtype: torch.dtype,
    torchs_own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torchs_own:
        monkeypatch.setattr(scaled_mm, "torch_scales_rows_on_cpu", lambda: False)
    a, b = torch.randn(33, 64).to(FLOAT8), torch.randn(48, 64).to(FLOAT8).t()
    scale_a = torch.rand(rows[0], 1) + 0.5
    scale_b = torch.rand(1, rows[1]) + 0.5
    bias = torch.randn(48) if biased else None
    divisor = torch.full((), 4.0) if dtype == FLOAT8 else None
    out = torch.empty(33, 48, dtype=dtype)
    scaled_mm.scaled_mm_out(a, b, scale_a, scale_b, out, bias=bias, scale_result=divisor)
    expected = (a.double() * scale_a) @ (b.double() * scale_b)
    expected = expected + bias if bias is not None else expected
    expected = expected / divisor if divisor is not None else expected
    # One rounding of the result, and a few of float32 sums on the way.
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=ulp, atol=1e-4 + ulp / 64)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Makes torch's kernel check cuBLAS's requirements for its operands."""
    own = torch.ops.aten._scaled_mm.out

    def strict(a: Any, b: Any, scale_a: Any, scale_b: Any, *options: Any, out: Any) -> Any:
        by_rows = scale_a.numel() != 1 or scale_b.numel() != 1
        for tensor in (a, b, out, *((scale_a, scale_b) if by_rows else ())):
            assert tensor.data_ptr() % 16 == 0
        assert a.is_contiguous()
        assert b.stride(0) == 1
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return own(a, b, scale_a, scale_b, *options, out=out)

    patch = unittest.mock.patch.object
    with patch(torch.ops.aten._scaled_mm, "out", strict), patch(scaled_mm, "ANY_ADDRESS", ()):
        yield


def test_operands_may_begin_anywhere() -> None:
    memory = torch.randn(64 * 64).to(FLOAT8)
    a, b = memory[3:][: 6 * 32].view(6, 32), memory[5:][: 16 * 32].view(16, 32).t()
    rows, columns = torch.rand(9, 1)[3:], torch.rand(1, 17)[:, 1:]
    out = torch.empty(6 * 16 + 1)[1:].view(6, 16)
    with as_on_cuda():
        scaled_mm.scaled_mm_out(a, b, rows, columns, out)
    expected = (a.double() * rows) @ (b.double() * columns)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.ranks(3)
def test_slices_of_scales_are_aligned(group: dist.ProcessGroup) -> None:
    """With 6 rows per rank, the second rank's scales begin 24 bytes after the first rank's."""
    W, rank = group.size(), group.rank()
    torch.manual_seed(0)
    whole, weight = torch.randn(6 * W, 32).to(FLOAT8), torch.randn(16 * W, 32).to(FLOAT8).t()
    rows, columns = torch.rand(6 * W, 1) + 0.5, torch.rand(1, 16 * W) + 0.5
    product = (whole.double() * rows) @ (weight.double() * columns)
    results, expected = [], []
    with as_on_cuda():
        for scale in (rows, rows[6 * rank :][:6]):
            _, result = symm_cp.scaled_all_gather_matmul(
                whole[6 * rank :][:6], weight, scale, columns, group=group, out_dtype=torch.float32
            )
            results.append(result)
            expected.append(product)
        for dim in range(2):
            results.append(
                symm_cp.scaled_matmul_reduce_scatter(
                    whole,
                    weight,
                    rows,
                    columns,
                    scatter_dim=dim,
                    group=group,
                    out_dtype=torch.float32,
                )
            )
            expected.append(W * product.chunk(W, dim)[rank])
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
