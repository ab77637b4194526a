"""The kernels of one tile that need no particular device, against torch's CPU kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from symm_cp.ops.attention import kernels as attention_kernels
from symm_cp.ops.attention.attend import with_grad_of_lse
from symm_cp.ops.attention.tiles import additive
from symm_cp.schedule.tiles import Tile, squares
from tests.ops.calls import CountedFunctions, CountedOps


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


Choose = Callable[[int], list[tuple[Any, bool]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Makes torch choose a given kernel; the returned list records the arguments of each choice."""

    def by_number(number: int) -> list[tuple[Any, bool]]:
        asked: list[tuple[Any, bool]] = []

        def choice(*given: object, enable_gqa: bool) -> int:
            asked.append((given, enable_gqa))
            return number

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        return asked

    return by_number


KINDS = {0: "matmul", 1: "flash", 2: "efficient", 3: "cudnn"}


@pytest.mark.parametrize("number", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_on_cuda_the_kernel_is_the_one_that_torch_would_choose(
    masked: bool, number: int, choose: Choose
) -> None:
    # Any device but the CPU.
    query, key = torch.empty(1, 4, 5, 64, device="meta"), torch.empty(1, 2, 5, 64, device="meta")
    mask = torch.empty(5, 5, device="meta") if masked else None
    kind = KINDS[number]
    if masked and kind != "matmul":
        kind = "efficient"
    asked = choose(number)
    names = {"efficient": "_efficient_", "flash": "_flash_", "cudnn": "_cudnn_", "matmul": "bmm"}
    by_heads = masked or kind in ("efficient", "matmul")
    options = {"causal": not masked, "scale": None}
    results: list[torch.Tensor] = []
    for backward in (False, True):
        with CountedOps() as ops, CountedFunctions() as functions:
            if backward:
                attention_kernels.backward(results[0], query, key, key, *results, mask, **options)
            else:
                results += attention_kernels.forward(query, key, key, mask, **options)
        assert any(names[kind] in name for name in ops.counts)
        # Keys and values are repeated once, and a mask is padded once; so is the log-sum-exp.
        assert functions.counts["repeat_interleave"] == 2 * by_heads
        of_lse = backward and kind == "efficient"
        assert functions.counts["pad"] == masked + of_lse
    (forward, gqa), (backward, backward_gqa) = asked
    assert gqa is backward_gqa is not masked
    assert backward[0].requires_grad, "torch was not asked for a kernel with a backward pass"
    for given in (forward, backward):
        _, keys, _, bias, _, causal = given
        assert causal is not masked
        assert keys.shape[1] == (4 if masked else 2)
        assert bias is None or bias.shape == (1, 4, 5, 5)
        assert bias is None or (bias.dtype == query.dtype and bias.stride(-2) % 16 == 0)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("version", [91900, 92600])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [64, 128, 192])
def test_cudnn_differentiates_only_where_its_gradients_are_finite(
    keys: int,
    causal: bool,
    version: int,
    capability: tuple[int, int],
    choose: Choose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choose(3)
    q = torch.empty(1, 2, keys, 64, device="meta")
    assert attention_kernels.kind_of(q, q, None, causal=causal) == "cudnn"
    broken = keys % 128 == 64 and not causal and version < 92600 and capability == (9, 0)
    kind = attention_kernels.kind_of(q, q, None, causal=causal, backward=True)
    assert kind == ("flash" if broken else "cudnn")


def test_masks_of_tiles_are_kept_as_kernels_take_them() -> None:
    visible = torch.ones(6, 37, dtype=torch.bool, device="meta")
    mask = additive(visible, torch.bfloat16)
    assert (mask.shape, mask.dtype) == (visible.shape, torch.bfloat16)
    assert mask.stride(0) % 16 == 0
    query, key = (torch.empty(2, 4, n, 64, device="meta", dtype=mask.dtype) for n in (6, 37))
    with CountedOps() as ops:
        bias = attention_kernels._aligned(mask, query, key)
    assert bias.shape == (2, 4, 6, 37)
    assert set(ops.counts) == {"expand"}


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


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_causal_masks_with_a_scale_that_is_not_positive(scale: float) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    out, lse = attention_kernels.forward(q, k, v, None, causal=True, scale=scale)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    scores = (scale * (q @ k.mT)).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_lse_as_part_of_the_output(dtype: torch.dtype) -> None:
    """Kernels subtract grad_out . out from each row, which must be less by the gradient of lse."""
    eps = torch.finfo(dtype).eps
    for of_lse, of_out in itertools.product((0.0, 1e-7, 1e-3, 100.0), (0.0, 1e-7, 1.0)):
        grad_out, out = (torch.randn(2, 3, 20, 9).to(dtype) for _ in range(2))
        grad_out[:, 1] *= of_out
        grad_lse = torch.randn(2, 3, 20) * of_lse
        grad_lse[0, :, :5] = 0
        changed = with_grad_of_lse(grad_out, out, grad_lse)
        terms = grad_out.double() * out.double()
        wanted, size = terms.sum(-1) - grad_lse.double(), terms.abs().sum(-1) + grad_lse.abs()
        found = (changed[0].double() * changed[1].double()).sum(-1)
        assert ((found - wanted).abs() <= 2 * eps * size).all(), (of_lse, of_out)
        # Gradients of values change by less than rounding, or by two of the smallest numbers.
        most = grad_lse.abs().unsqueeze(-1) * eps / 2 + 2.0**-23 * (dtype == torch.float16)
        assert ((changed[0] - grad_out).abs() <= most).all(), (of_lse, of_out)
        assert all(map(torch.equal, with_grad_of_lse(grad_out, out, grad_lse * 0), (grad_out, out)))
        assert with_grad_of_lse(grad_out, out, None) == (grad_out, out)
