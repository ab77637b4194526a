"""Attention of one tile by our own kernels, against dense attention in float64 by autograd.

The reference shares nothing with the kernels: scores are written out whole, and dropout comes from
a generator in plain Python integers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from symm_cp.ops.attention import native_tiles, tiles_by_matmuls
from symm_cp.ops.attention.scoring import Scoring, Sight

KERNELS = {"native": native_tiles, "matmuls": tiles_by_matmuls}
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
    """One problem: what kernels take, and what flows back."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    scoring: Scoring
    sight: Sight

    def solve(self) -> dict[str, torch.Tensor]:
        """Results and gradients in float64, by autograd."""
        q, k, v = (t.double().requires_grad_() for t in (self.q, self.k, self.v))
        inputs = [q, k, v]
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(repeats, 1) for t in (k, v))
        scoring, sight = self.scoring, self.sight
        score = torch.einsum("bhse,bhke->bhsk", q, keys) * scoring.scale
        if scoring.softcap is not None:
            score = scoring.softcap * torch.tanh(score / scoring.softcap)
        S, K = score.shape[2:]
        q_at = list(range(S)) if sight.query_positions is None else sight.query_positions.tolist()
        k_at = list(range(K)) if sight.key_positions is None else sight.key_positions.tolist()
        if scoring.bias is not None:
            bias = scoring.bias.double().requires_grad_()
            inputs.append(bias)
            score = score + torch.stack(
                [torch.stack([bias[:, j - i + scoring.bias_zero] for j in k_at], 1) for i in q_at],
                1,
            )
        if sight.mask is not None:
            score = score + sight.mask.double()
        offset = torch.arange(K) - torch.arange(S).unsqueeze(1)
        if sight.low is not None:
            score = score.masked_fill(offset < sight.low, -torch.inf)
        if sight.high is not None:
            score = score.masked_fill(offset > sight.high, -torch.inf)
        blind = (score == -torch.inf).all(-1, keepdim=True)
        # Rows of -inf have gradients of NaN in autograd.
        seen = score.masked_fill(blind, 0.0)
        lse = seen.logsumexp(-1)
        weights = torch.exp(seen - lse.unsqueeze(-1)).masked_fill(blind, 0.0)
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
        grad_lse = self.grad_lse.double().masked_fill(blind.squeeze(-1), 0.0)
        grads = torch.autograd.grad([out, lse], inputs, [self.grad_out.double(), grad_lse])
        lse = lse.masked_fill(blind.squeeze(-1), -torch.inf)
        names = ("out", "lse", "query", "key", "value", "bias")
        return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))

    def run(self, kernel: Any) -> dict[str, torch.Tensor]:
        """The same by a kernel."""
        out, lse = kernel.forward(self.q, self.k, self.v, self.scoring, self.sight)
        grads = _backward(kernel, self, out, lse)
        names = ("out", "lse", "query", "key", "value", "bias")
        found = zip(names, (out, lse, *grads), strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}


def _backward(
    kernel: Any, tile: Tile, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    given = (tile.grad_out, tile.q, tile.k, tile.v, out, lse, tile.scoring, tile.sight)
    result: tuple[torch.Tensor | None, ...] = kernel.backward(*given, grad_lse=tile.grad_lse)
    return result


def _strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A random tensor with contiguous features and the other dimensions in any order, with gaps."""
    *outer, features = shape
    order = random.sample(range(len(outer)), len(outer))
    memory = torch.randn(*(outer[d] + 1 for d in order), features + 3)
    inverse = [order.index(d) for d in range(len(outer))]
    tensor = memory.to(dtype).permute(*inverse, len(outer))
    return tensor[tuple(slice(0, size) for size in shape)]


def _random_tile(dtype: torch.dtype, rows: int, keys: int, features: str = "") -> Tile:
    """With some of softcap, bias, mask, band, positions and dropout: those named."""
    B, G, repeats = random.choice([1, 2]), random.choice([1, 2]), random.choice([1, 3])
    H, E, V = G * repeats, random.choice([1, 8, 21, 40]), random.choice([1, 16, 33])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scoring = Scoring(scale=random.choice([0.3, E**-0.5]))
    sight = Sight()
    if "softcap" in features:
        scoring = replace(scoring, softcap=random.choice([0.7, 5.0]))
    if "positions" in features:
        sight = replace(
            sight,
            query_positions=_spans(rows, 300),
            key_positions=_spans(keys, 300) + random.choice([0, 5]),
        )
    if "bias" in features:
        furthest = 1000
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
        sight = replace(sight, mask=_mask(B, H, rows, keys, wide))
    if "band" in features:
        low = random.choice([None, random.randint(-rows, keys // 2)])
        high = random.choice([None, random.randint(-rows // 2, keys)])
        sight = replace(sight, low=low, high=high)
    return Tile(
        _strided(B, H, rows, E, dtype=dtype),
        _strided(B, G, keys, E, dtype=dtype),
        _strided(B, G, keys, V, dtype=dtype),
        _strided(B, H, rows, V, dtype=dtype),
        torch.randn(B, H, rows, dtype=wide),
        scoring,
        sight,
    )


def _spans(length: int, most: int) -> torch.Tensor:
    """Positions in two consecutive runs, or one."""
    cut, gap = random.randint(0, length), random.randint(0, most)
    at = torch.arange(length)
    return torch.where(at < cut, at, at + gap)


def _mask(B: int, H: int, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive, of any shape that broadcasts; expanded dimensions have stride 0."""
    sizes = [random.choice([1, size]) for size in (B, H, rows)]
    mask = torch.randn(*sizes, keys, dtype=dtype)
    mask = mask.masked_fill(torch.rand(mask.shape) < 0.3, -torch.inf)
    return random.choice([mask, mask.expand(B, H, rows, keys)])


def _check(tile: Tile, found: dict[str, torch.Tensor]) -> None:
    exact = tile.solve()
    assert found.keys() == exact.keys()
    dtype = tile.q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found["out"].dtype == dtype
    for name, expected in exact.items():
        actual = found[name]
        if name != "out":
            assert actual.dtype == wide, name
        scale = max(1.0, float(expected.nan_to_num(neginf=0.0).abs().max()))
        # lse comes of scores, of which none is rounded to the dtype.
        tolerance = TOLERANCE[wide if name == "lse" else dtype] * scale
        torch.testing.assert_close(
            actual.double(),
            expected,
            rtol=0,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
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


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_agrees_with_dense_attention(kernel: str, dtype: torch.dtype, features: str) -> None:
    rows, keys = random.choice([1, 7, 35]), random.choice([1, 18, 45])
    tile = _random_tile(dtype, rows, keys, features)
    _check(tile, tile.run(KERNELS[kernel]))
