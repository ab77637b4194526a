"""The kernels of one tile that need no particular device, against torch's CPU kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from symm_cp.ops.attention import kernels as attention_kernels
from symm_cp.schedule.tiles import Tile, squares


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matmuls_agree_with_the_flash_kernel(kind: str, groups: int, dtype: torch.dtype) -> None:
    B, G, rows, E = 2, 2, random.choice([1, 7, 16]), random.choice([5, 16])
    keys = rows if kind == "causal" else random.choice([3, 20])
    q, grad = (torch.randn(B, G * groups, rows, E, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(B, G, keys, E, dtype=dtype) for _ in range(2))
    mask = None
    if kind == "masked":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        mask = torch.randn(rows, keys, dtype=wide)
        mask[:, 1:] = mask[:, 1:].masked_fill(torch.rand(rows, keys - 1) < 0.4, -torch.inf)
    options = {"causal": kind == "causal", "scale": random.choice([None, 0.3])}
    out, lse = attention_kernels.forward(q, k, v, mask, kind="matmul", **options)
    expected, expected_lse = attention_kernels.forward(q, k, v, mask, kind="cpu", **options)
    # Results of the kernels are rounded to the dtype; sums of up to 20 terms of about one.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-5}[dtype]
    near = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(out, expected, **near)
    torch.testing.assert_close(lse, expected_lse, **near)
    given = (grad, q, k, v, expected, expected_lse, mask)
    grads = attention_kernels.backward(*given, kind="matmul", **options)
    exact = attention_kernels.backward(*given, kind="cpu", **options)
    for found, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(found, wanted, **{**near, "atol": 4 * tolerance})


def test_rows_that_see_nothing() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[2] = -torch.inf
    out, lse = attention_kernels.forward(q, k, v, mask, causal=False, scale=None, kind="matmul")
    assert lse[0, 0, 2] == -torch.inf
    assert torch.equal(out[0, 0, 2], torch.zeros(8, dtype=torch.float64))
    known = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = attention_kernels.backward(
        torch.randn_like(q), q, k, v, out, known, mask, causal=False, scale=None, kind="matmul"
    )
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][0, 0, 2].any()


@pytest.mark.parametrize("masked", [False, True])
def test_on_cuda_the_kernel_is_the_one_that_torch_would_choose(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = torch.empty(1, 4, 3, 64, device="meta")  # any device but the CPU
    key = torch.empty(1, 2, 5, 64, device="meta")
    mask = torch.empty(3, 5, device="meta") if masked else None
    chosen = {0: "matmul", 1: "flash", 2: "efficient", 3: "cudnn"}
    asked: list[tuple[Any, dict[str, object]]] = []
    for number, kind in chosen.items():

        def choice(*given: object, number: int = number, **options: object) -> int:
            asked.append((given, options))
            return number

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        found = attention_kernels.kind_of(query, key, mask, causal=not masked)
        assert found == ("efficient" if masked and kind != "matmul" else kind)
        (_, keys, _, bias, _, causal), options = asked.pop()
        assert causal is not masked
        assert options == {"enable_gqa": not masked}
        assert keys.shape[1] == (4 if masked else 2)
        assert bias is None or bias.shape == (1, 4, 3, 5)


@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (5, 9), (9, 5), (1, 4), (4, 1)])
def test_squares_cover_a_causal_tile(rows: int, keys: int) -> None:
    tile = Tile(3, 3 + rows, 10, 10 + keys, high=0)
    seen = torch.zeros(rows, keys, dtype=torch.int64)
    for part in squares(tile):
        height, width = part.q_end - part.q_begin, part.k_end - part.k_begin
        assert part.full or height == width
        visible = torch.ones(height, width, dtype=torch.int64)
        visible = visible if part.full else visible.tril()
        seen[part.q_begin - 3 : part.q_end - 3, part.k_begin - 10 : part.k_end - 10] += visible
    assert torch.equal(seen, torch.ones_like(seen).tril())


def test_other_tiles_stay_as_they_are() -> None:
    for tile in (Tile(0, 4, 0, 8), Tile(0, 4, 0, 8, low=-1, high=2)):
        assert squares(tile) == (tile,)
