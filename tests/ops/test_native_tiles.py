"""Attention of one tile by our own kernels, against dense attention in float64 by autograd.

The reference shares nothing with the kernels: scores are written out whole, and dropout comes from
a generator in plain Python integers.
"""

from __future__ import annotations

import ctypes
import platform
import random
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from symm_cp import native
from symm_cp.ops.attention import native_tiles, philox, tiles_by_matmuls
from symm_cp.ops.attention.scoring import Scoring, TileMask
from tests import processors
from tests.exhaustive import exhaustive, in_turns, pairs, some
from tests.tile_kernels import KERNELS, backward, forward

#: Round-offs of results of about one: of the dtype, and of sums of some hundred terms.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 4e-5,
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
}


def _random_words(counter: list[int], seed: int, rounds: int = 7) -> list[int]:
    """Philox4x32 in plain integers."""
    x, keys = list(counter), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(rounds):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [b >> 32 ^ x[1] ^ keys[0], b % 2**32, a >> 32 ^ x[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return x


def _is_kept(sample: int, head: int, q: int, k: int, scoring: Scoring) -> bool:
    words = _random_words([k // 128 * 16 + k % 16, q, head, sample], scoring.dropout_seed)
    piece = k % 128 // 16
    number = words[piece % 4] >> 16 if piece >= 4 else words[piece % 4] % 65536
    return number >= round(scoring.dropout_p * 65536)


@dataclass
class Tile:
    """One problem: the inputs of kernels, and the gradients that flow back."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    scoring: Scoring
    tile_mask: TileMask

    def solve(self) -> dict[str, torch.Tensor]:
        """Results and gradients in float64, by autograd."""
        q, k, v = (t.double().requires_grad_() for t in (self.q, self.k, self.v))
        inputs = [q, k, v]
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(repeats, 1) for t in (k, v))
        scoring, tile_mask = self.scoring, self.tile_mask
        score = torch.einsum("bhse,bhke->bhsk", q, keys) * scoring.scale
        if scoring.softcap is not None:
            score = scoring.softcap * torch.tanh(score / scoring.softcap)
        S, K = score.shape[2:]
        q_at = (
            list(range(S))
            if tile_mask.query_positions is None
            else tile_mask.query_positions.tolist()
        )
        k_at = (
            list(range(K)) if tile_mask.key_positions is None else tile_mask.key_positions.tolist()
        )
        if scoring.bias is not None:
            bias = scoring.bias.double().requires_grad_()
            inputs.append(bias)
            score = score + torch.stack(
                [torch.stack([bias[:, j - i + scoring.bias_zero] for j in k_at], 1) for i in q_at],
                1,
            )
        if tile_mask.mask is not None:
            score = score + tile_mask.mask.double()
        offset = torch.arange(K) - torch.arange(S).unsqueeze(1)
        if tile_mask.low is not None:
            score = score.masked_fill(offset < tile_mask.low, -torch.inf)
        if tile_mask.high is not None:
            score = score.masked_fill(offset > tile_mask.high, -torch.inf)
        fully_masked = (score == -torch.inf).all(-1, keepdim=True)
        # Rows of -inf have gradients of NaN in autograd.
        seen = score.masked_fill(fully_masked, 0.0)
        lse = seen.logsumexp(-1)
        weights = torch.exp(seen - lse.unsqueeze(-1)).masked_fill(fully_masked, 0.0)
        if scoring.dropout_p > 0:
            kept = [
                [
                    [
                        [
                            _is_kept(
                                scoring.sample_offset + b, scoring.head_offset + h, i, j, scoring
                            )
                            for j in k_at
                        ]
                        for i in q_at
                    ]
                    for h in range(q.shape[1])
                ]
                for b in range(q.shape[0])
            ]
            weights = weights * torch.tensor(kept) / (1 - scoring.dropout_p)
        out = weights @ values
        grad_lse = self.grad_lse.double().masked_fill(fully_masked.squeeze(-1), 0.0)
        grads = torch.autograd.grad([out, lse], inputs, [self.grad_out.double(), grad_lse])
        lse = lse.masked_fill(fully_masked.squeeze(-1), -torch.inf)
        names = ("out", "lse", "query", "key", "value", "bias")
        return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))

    def run(self, kernel: Any) -> dict[str, torch.Tensor]:
        """Results and gradients by a kernel."""
        out, lse = forward(kernel, self.q, self.k, self.v, self.scoring, self.tile_mask)
        grads = _backward(kernel, self, out, lse)
        names = ("out", "lse", "query", "key", "value", "bias")
        found = zip(names, (out, lse, *grads), strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}


def _backward(
    kernel: Any, tile: Tile, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    given = (tile.grad_out, tile.q, tile.k, tile.v, out, lse, tile.scoring, tile.tile_mask)
    result: tuple[torch.Tensor | None, ...] = backward(kernel, *given, grad_lse=tile.grad_lse)
    return result


def _strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A random tensor with contiguous features and the other dimensions in any order, with gaps."""
    *outer, features = shape
    order = random.sample(range(len(outer)), len(outer))
    memory = torch.randn(*(outer[d] + 1 for d in order), features + 3)
    inverse = [order.index(d) for d in range(len(outer))]
    tensor = memory.to(dtype).permute(*inverse, len(outer))
    return tensor[tuple(slice(0, size) for size in shape)]


def _random_tile(
    dtype: torch.dtype,
    rows: int,
    keys: int,
    features: str = "",
    heads: tuple[int, int, int] | None = None,
) -> Tile:
    """A random tile with the named ones of softcap, bias, mask, band, positions and dropout.

    `heads` are B, G and H / G.
    """
    few = random.choice([1, 2]), random.choice([1, 2]), random.choice([1, 3])
    B, G, repeats = few if heads is None else heads
    H, E, V = G * repeats, random.choice([1, 8, 21, 40]), random.choice([1, 16, 33])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scoring = Scoring(scale=random.choice([0.3, E**-0.5]))
    tile_mask = TileMask()
    if "softcap" in features:
        scoring = replace(scoring, softcap=random.choice([0.7, 5.0]))
    if "positions" in features:
        tile_mask = replace(
            tile_mask,
            query_positions=_spans(rows, 300),
            key_positions=_spans(keys, 300) + random.choice([0, 5]),
        )
    if "bias" in features:
        furthest = 1000 + max(rows, keys)  # beyond any distance of the positions
        bias = torch.randn(H, 2 * furthest + 1, dtype=random.choice([wide, dtype]))
        scoring = replace(scoring, bias=bias, bias_zero=furthest)
    if "dropout" in features:
        scoring = replace(
            scoring,
            dropout_p=random.choice([0.1, 0.5]),
            dropout_seed=random.getrandbits(64) - 2**63,
            sample_offset=random.choice([0, 3]),
            head_offset=random.choice([0, 8]),
        )
    if "mask" in features:
        tile_mask = replace(tile_mask, mask=_mask(B, H, rows, keys, wide))
    if "band" in features:
        low = random.choice([None, random.randint(-rows, keys // 2)])
        high = random.choice([None, random.randint(-rows // 2, keys)])
        tile_mask = replace(tile_mask, low=low, high=high)
    return Tile(
        _strided(B, H, rows, E, dtype=dtype),
        _strided(B, G, keys, E, dtype=dtype),
        _strided(B, G, keys, V, dtype=dtype),
        _strided(B, H, rows, V, dtype=dtype),
        torch.randn(B, H, rows, dtype=wide),
        scoring,
        tile_mask,
    )


def _spans(length: int, most: int) -> torch.Tensor:
    """Positions in two consecutive runs, or one."""
    cut, gap = random.randint(0, length), random.randint(0, most)
    at = torch.arange(length)
    return torch.where(at < cut, at, at + gap)


def _mask(B: int, H: int, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """A random additive mask of a shape that broadcasts; expanded dimensions have stride 0."""
    sizes = [random.choice([1, size]) for size in (B, H, rows)]
    mask = torch.randn(*sizes, keys, dtype=dtype)
    mask = mask.masked_fill(torch.rand(mask.shape) < 0.3, -torch.inf)
    return random.choice([mask, mask.expand(B, H, rows, keys)])


def _check(
    dtype: torch.dtype, found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == exact.keys()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, expected in exact.items():
        assert found[name].dtype == (dtype if name == "out" else wide), name
        scale = max(1.0, float(expected.nan_to_num(neginf=0.0).abs().max()))
        if name in ("key", "value"):  # sums over rows, which may cancel
            scale = max(scale, float(found["out"].shape[2]) ** 0.5)
        # lse is computed from scores, which are not rounded to the dtype.
        tolerance = TOLERANCE[wide if name == "lse" else dtype] * scale
        actual = found[name].double()
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance, msg=f"{name}: {{}}".format
        )


FEATURES = [
    "",
    "softcap",
    "bias",
    "mask",
    "band",
    "dropout",
    "bias positions",
    "dropout positions",
    "softcap bias mask band positions dropout",
]


@pytest.mark.parametrize("features", some("", FEATURES[-1], of=FEATURES))
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_agrees_with_dense_attention(kernel: str, dtype: torch.dtype, features: str) -> None:
    rows, keys = random.choice([1, 7, 35]), random.choice([1, 18, 45])
    tile = _random_tile(dtype, rows, keys, features)
    _check(dtype, tile.run(KERNELS[kernel]), tile.solve())


@pytest.mark.parametrize("dtype", some(torch.bfloat16, of=TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel", some("native", of=KERNELS))
def test_many_blocks(kernel: str, dtype: torch.dtype) -> None:
    tile = _random_tile(dtype, random.randint(130, 300), random.randint(520, 1200), "softcap band")
    _check(dtype, tile.run(KERNELS[kernel]), tile.solve())


def _check_with_matmuls(dtype: torch.dtype, tile: Tile) -> None:
    expected = replace(
        tile, **{name: getattr(tile, name).double() for name in ("q", "k", "v", "grad_out")}
    ).run(tiles_by_matmuls)
    _check(dtype, tile.run(native_tiles), expected)


@pytest.mark.parametrize("features", ["mask", "bias dropout positions"])
@pytest.mark.parametrize("dtype", some(torch.float32, torch.bfloat16, of=TOLERANCE), ids=str)
def test_native_kernel_agrees_with_matmuls(dtype: torch.dtype, features: str) -> None:
    # Several blocks of keys, of which dropout cuts few rows: plain torch takes its time there.
    rows, keys = random.choice([1, 9]), random.randint(520, 1200)
    _check_with_matmuls(dtype, _random_tile(dtype, rows, keys, features))


# Rows and heads: one head of many rows, or two of a group.
SHAPES = [(1700, (1, 1, 1)), (1300, (1, 2, 2))]
PLAIN = [(width, "", torch.float32, shape) for width, shape in in_turns((1, 511, 1024), SHAPES)]
MOVING = pairs(
    [1, 33, 300, 511, 1023, 1024, 1025],
    ["", "softcap mask", "bias dropout positions"],
    TOLERANCE,
    SHAPES,
    also=PLAIN,
)


@pytest.mark.parametrize(("width", "features", "dtype", "shape"), some(*PLAIN, of=MOVING), ids=str)
def test_window_moves_on(width: int, features: str, dtype: torch.dtype, shape: Any) -> None:
    rows, heads = shape
    # More keys than kernels keep at hand, and fewer; 1024 is the widest window they keep any of.
    tile = _random_tile(dtype, rows, rows + random.randint(-99, 99), features, heads)
    high = random.choice([0, 77, -random.randint(1, rows // 3)])
    _check_with_matmuls(
        dtype, replace(tile, tile_mask=replace(tile.tile_mask, low=high - width + 1, high=high))
    )


@pytest.mark.parametrize("dtype", some(torch.float32, of=TOLERANCE), ids=str)
def test_corner_of_a_window(dtype: torch.dtype) -> None:
    # One-sided limits: the rest of a window in a peer's keys, or a short causal tile.
    for side in ("low", "high"):
        tile = _random_tile(dtype, random.randint(130, 600), random.randint(130, 600))
        tile_mask = TileMask(**{side: random.randint(-100, 100)})
        _check_with_matmuls(dtype, replace(tile, tile_mask=tile_mask))


@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_in_parts_with_a_sink(kernel: str) -> None:
    run = KERNELS[kernel]
    tile = _random_tile(torch.float64, 20, 30, "softcap")
    H = tile.q.shape[1]
    # A sink is a key of its own score, and of values 0.
    inputs = [t.clone().requires_grad_() for t in (tile.q, tile.k, tile.v, torch.randn(H).double())]
    q, k, v, sink = inputs
    repeats = H // k.shape[1]
    cap = tile.scoring.softcap
    assert cap is not None
    score = q @ k.repeat_interleave(repeats, 1).mT * tile.scoring.scale
    score = cap * torch.tanh(score / cap)
    score = torch.cat((score, sink.view(-1, 1, 1).expand(*score.shape[:3], 1)), -1)
    lse = score.logsumexp(-1)
    out = (score - lse.unsqueeze(-1)).exp()[..., :-1] @ v.repeat_interleave(repeats, 1)
    expected = torch.autograd.grad([out, lse], inputs[:3], [tile.grad_out, tile.grad_lse])
    cut = random.randint(0, 30)
    parts = [(tile.k[:, :, at], tile.v[:, :, at]) for at in (slice(0, cut), slice(cut, None))]
    merged = torch.zeros_like(out), sink.detach().view(-1, 1).expand_as(lse)
    grad_q, others = torch.zeros_like(q), []
    for key, value in parts:
        found, found_lse = forward(run, tile.q, key, value, tile.scoring, tile.tile_mask)
        total = torch.logaddexp(merged[1], found_lse)
        weights = [torch.exp(part - total).unsqueeze(-1) for part in (merged[1], found_lse)]
        merged = weights[0] * merged[0] + weights[1] * found, total
        grads = _backward(run, replace(tile, k=key, v=value), out.detach(), lse.detach())
        assert grads[0] is not None
        grad_q += grads[0]
        others.append(grads[1:3])
    torch.testing.assert_close(merged, (out.detach(), lse.detach()))
    torch.testing.assert_close(grad_q, expected[0])
    for index in (0, 1):
        whole = torch.cat([part[index] for part in others], 2)
        torch.testing.assert_close(whole, expected[1 + index])


@pytest.mark.parametrize("dtype", some(torch.float32, torch.bfloat16, of=TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel", some("native", of=KERNELS))
def test_nan_spreads(kernel: str, dtype: torch.dtype) -> None:
    for keys in (1, 3, 600):
        tile = _random_tile(dtype, 5, keys, random.choice(["", "softcap", "bias"]))
        tile.k[0, 0, random.randrange(keys), 0] = torch.nan
        expected, found = tile.solve(), tile.run(KERNELS[kernel])
        for name, tensor in expected.items():
            if name != "bias":  # sums over samples
                assert torch.equal(found[name].isnan(), tensor.isnan()), (name, keys)
        assert expected["out"].isnan().any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_behind_a_band_is_not_seen(kernel: str) -> None:
    tile = _random_tile(torch.float32, 8, 8)
    tile = replace(tile, tile_mask=TileMask(high=0))
    tile.k[:, :, 5, 0] = torch.nan
    out, lse = forward(KERNELS[kernel], tile.q, tile.k, tile.v, tile.scoring, tile.tile_mask)
    assert not out[:, :, :5].isnan().any()
    assert not lse[:, :, :5].isnan().any()
    assert out[:, :, 5:].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("empty", ["B", "G", "S", "K", "E", "V", "band"])
def test_sizes_of_zero(kernel: str, empty: str) -> None:
    sizes = {"B": 2, "G": 2, "S": 3, "K": 4, "E": 5, "V": 6} | {empty: 0}
    B, G, S, K, E, V = (sizes[name] for name in "BGSKEV")
    for dtype in TOLERANCE:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v, grad = (
            torch.randn(B, G, rows, columns).to(dtype)
            for rows, columns in ((S, E), (K, E), (K, V), (S, V))
        )
        bias = torch.zeros(G, 9)
        scoring = Scoring(scale=0.5, softcap=3.0, bias=bias, bias_zero=3)
        tile_mask = TileMask(low=7) if empty == "band" else TileMask()
        run = KERNELS[kernel]
        out, lse = forward(run, q, k, v, scoring, tile_mask)
        assert out.shape == (B, G, S, V)
        assert lse.dtype == wide
        if empty in ("K", "band"):
            assert not out.any()
            assert (lse == -torch.inf).all()
        elif empty == "E":
            torch.testing.assert_close(lse, torch.full_like(lse, K).log())
        grads = backward(
            run, grad, q, k, v, out, lse, scoring, tile_mask, grad_lse=torch.ones_like(lse)
        )
        for tensor, given in zip(grads, (q, k, v, bias), strict=True):
            assert tensor.shape == given.shape
            assert tensor.dtype == wide
            assert tensor.isfinite().all()
            if empty in ("K", "band"):
                assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    tile = _random_tile(dtype, 258, 700, "softcap bias dropout")
    q, k, v, grad = (
        torch.randn(*t.shape[:3], 16).to(dtype) for t in (tile.q, tile.k, tile.v, tile.grad_out)
    )
    tile = replace(tile, q=q, k=k, v=v, grad_out=grad)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            results.append(tile.run(native_tiles))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name


# --- dropout -----------------------------------------------------------------------------------


def _kept_by(
    kernel: Any, scoring: Scoring, queries: range, keys: range, heads: int
) -> torch.Tensor:
    """The weights that a kernel keeps, (heads, S, K), from equal weights and one-hot values."""
    K = len(keys)
    q = torch.zeros(1, heads, len(queries), 8)
    k, v = torch.zeros(1, heads, K, 8), torch.eye(K).expand(1, heads, K, K)
    tile_mask = TileMask(query_positions=torch.tensor(queries), key_positions=torch.tensor(keys))
    out, lse = forward(kernel, q, k, v, scoring, tile_mask)
    torch.testing.assert_close(lse, torch.full_like(lse, K).log())
    kept = out[0] != 0
    weight = torch.full_like(out[0][kept], 1 / K / (1 - scoring.dropout_p))
    torch.testing.assert_close(out[0][kept], weight)
    return kept


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_cut_anywhere_drops_the_same(kernel: str) -> None:
    scoring = Scoring(scale=1.0, dropout_p=0.4, dropout_seed=random.getrandbits(63))
    begin = random.randrange(1 << 20)
    whole = _kept_by(native_tiles, scoring, range(7, 27), range(begin, begin + 300), 3)
    for _ in range(5):
        rows, keys = sorted(random.sample(range(21), 2)), sorted(random.sample(range(301), 2))
        head = random.randrange(3)
        part = _kept_by(
            KERNELS[kernel],
            replace(scoring, head_offset=head),
            range(7 + rows[0], 7 + rows[1]),
            range(begin + keys[0], begin + keys[1]),
            1,
        )
        assert torch.equal(part[0], whole[head, slice(*rows), slice(*keys)])


def test_16_bits_are_computed_here_where_32_are() -> None:
    """torch's kernel may take up to 30 times as long with float16."""
    if native_tiles.has_blocks(torch.float32):
        assert native_tiles.has_blocks(torch.bfloat16)
        by_torch = torch.ops.mkldnn._is_mkldnn_fp16_supported()
        assert native_tiles.has_blocks(torch.float16) or by_torch


def test_dropout_is_random() -> None:
    p, rows, keys = random.choice([0.1, 0.5, 0.9]), 200, 640
    scoring = Scoring(scale=1.0, dropout_p=p, dropout_seed=random.getrandbits(63))

    def kept(**changed: Any) -> torch.Tensor:
        found = _kept_by(native_tiles, replace(scoring, **changed), range(rows), range(keys), 2)
        return (found.double() - (1 - p)) / (p * (1 - p)) ** 0.5

    def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> None:
        # The mean of products of independent numbers of variance 1: within 6 standard errors.
        assert abs(float((a * b).mean())) < 6 / a.numel() ** 0.5

    first = kept()
    assert abs(float(first.mean())) < 6 / first.numel() ** 0.5
    assert_uncorrelated(first[0], first[1])
    for distance in (1, 2, 16, 64, 128):
        assert_uncorrelated(first[..., distance:], first[..., :-distance])
        assert_uncorrelated(first[:, distance:], first[:, :-distance])
    assert_uncorrelated(first, kept(sample_offset=1))
    assert_uncorrelated(first, kept(dropout_seed=scoring.dropout_seed + 1))
    assert_uncorrelated(first, kept(dropout_seed=scoring.dropout_seed ^ 1 << 40))


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_weights_dropped(kernel: str) -> None:
    tile = _random_tile(torch.float32, 4, 6)
    tile = replace(tile, scoring=replace(tile.scoring, dropout_p=1.0))
    found = tile.run(KERNELS[kernel])
    assert not found["out"].any()
    assert not found["value"].any()
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_known_answers_of_philox() -> None:
    # The vectors that come with the authors' own implementation (Random123), for 7 and 10 rounds.
    ones = 0xFFFFFFFF
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, rounds, answer in (
        ((0, 0, 0, 0), 0, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ones,) * 4, (1 << 64) - 1, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (digits, 0x299F31D0A4093822, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        ((0, 0, 0, 0), 0, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (digits, 0x299F31D0A4093822, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = tuple(torch.tensor([word]) for word in counter)
        assert len(words) == 4
        assert tuple(int(word) for word in philox.philox(words, seed, rounds)) == answer
        assert tuple(_random_words(list(counter), seed, rounds)) == answer


@exhaustive
@pytest.mark.parametrize("options", ["-mavx512f -mavx512bw", "-mavx2", "-msse2", ""])
def test_bits_do_not_depend_on_vectors(options: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" and options:
        pytest.skip("options of x86-64 compilers")
    if missing := {name[2:] for name in options.split()} - processors.features():
        pytest.skip(f"no {missing} here")
    csrc = native.source_dir()
    sources = [Path(__file__).with_name("philox_bits.cpp"), csrc / "attention" / "philox.cpp"]
    library = tmp_path / "philox.so"
    command = [
        *shlex.split(native.find_compiler()),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        f"-I{csrc}",
    ]
    subprocess.run([*command, *options.split(), *sources, "-o", library], check=True)
    kept_bits = ctypes.CDLL(str(library)).kept_bits
    for _ in range(20):
        scoring = Scoring(
            scale=1.0, dropout_p=random.random(), dropout_seed=random.getrandbits(64) - 2**63
        )
        sample, head, q = (random.getrandbits(20) for _ in range(3))
        number, bits = random.getrandbits(24), (ctypes.c_uint16 * 8)()
        kept_bits(
            ctypes.c_uint64(scoring.dropout_seed % 2**64), philox.threshold(scoring.dropout_p),
            sample, head, q, ctypes.c_int64(number), bits,
        )  # fmt: skip
        for k in range(128):
            expected = _is_kept(sample, head, q, number * 128 + k, scoring)
            assert bool(bits[k // 16] >> k % 16 & 1) == expected, k


# --- bad arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"bias": torch.zeros(2, 8), "bias_zero": 4}, IndexError, "needs those from 0 to 8"),
        ({"bias": torch.zeros(2, 99), "bias_zero": 3}, IndexError, "needs those from -1 to 7"),
        ({"bias": torch.zeros(3, 99)}, ValueError, "bias must be \\(2, distances\\)"),
        ({"dropout_p": 1.5}, ValueError, "from 0 to 1, not 1.5"),
    ],
)
def test_bad_scoring(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(error, match=words):
        forward(native_tiles, q, k, k, Scoring(scale=1.0, **changed), TileMask())


def test_bad_tensors() -> None:
    q, scoring = torch.zeros(1, 2, 5, 4), Scoring(scale=1.0, dropout_p=0.5)
    for key, value, words in (
        (torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 5, 4), "shapes do not match"),
        (torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 3), "shapes do not match"),
        (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 6, 4), "shapes do not match"),
        (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), "4 dimensions"),
    ):
        with pytest.raises(ValueError, match=words):
            forward(native_tiles, q, key, value, scoring, TileMask())
    with pytest.raises(TypeError, match="dtypes differ"):
        forward(native_tiles, q, q.double(), q, scoring, TileMask())
    for positions, words in (
        (torch.arange(4), "must be 5 contiguous int64 numbers"),
        (torch.arange(5) - 1, "must not be negative"),
    ):
        with pytest.raises(ValueError, match=words):
            forward(native_tiles, q, q, q, scoring, TileMask(query_positions=positions))
