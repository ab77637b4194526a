"""Float8 products with scales, by torch's kernel and by what stands in for it on CPU."""

from __future__ import annotations

import pytest
import torch

from symm_cp.ops import scaled_mm

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
