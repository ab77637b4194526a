"""Attention with a `score_mod` and its gradient, written out in torch ops, tile by tile.

Shapes: B batch, H query heads, G key/value heads (a divisor of H), R rows of queries and K keys in
a tile, E features of a head. With S = score_mod(scale * q k^T), -inf where a key is masked:

    out = softmax(S) v,  lse = logsumexp(S),  P = exp(S - lse)
    dv = P^T dout,  dS = P * (dout v^T - rowsum(dout * out) + dlse)

and autograd differentiates `score_mod`, by the scores and by the tensors that it captures. All is
computed in float32 (float64 for float64), for a bounded number of scores at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.nn.functional as F

from symm_cp.ops.attention.flex.mask import Modifier, cut, over_indices
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.tiles import Forward, Total, rows_first
from symm_cp.schedule.tiles import Tile
from symm_cp.tensors.dtypes import wide

#: The positions of the queries and of the keys of a tile.
Indices: TypeAlias = Callable[[Tile], tuple[torch.Tensor, torch.Tensor]]


class Scores:
    """The scores of one rank's queries. `score_mod` None leaves them unchanged.

    The first head is number `head_offset`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        scale: float | None,
        score_mod: Modifier | None,
        head_offset: int = 0,
    ) -> None:
        self._query = query
        self.scale = factor_of(query, scale)
        self._score_mod = score_mod
        samples, heads = (torch.arange(size, device="cpu") for size in query.shape[:2])
        self._heads = (samples, heads + head_offset)

    @property
    def shape(self) -> torch.Size:
        """The shape of the queries."""
        return self._query.shape

    @property
    def copies(self) -> int:
        """The number of scores for each query and key."""
        return self._query.shape[0] * self._query.shape[1]

    def query(self, tile: Tile) -> torch.Tensor:
        """Returns a tile's queries."""
        return self._query[:, :, tile.q_begin : tile.q_end].to(wide(self._query.dtype))

    def raw(self, tile: Tile, key: torch.Tensor) -> torch.Tensor:
        """Returns scale * q k^T: (B, H, R, K)."""
        return times(self.query(tile), key.transpose(-1, -2)).mul_(self.scale)

    def modified(
        self, raw: torch.Tensor, visible: torch.Tensor | None, indices: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the modified scores, -inf for masked keys."""
        scores = raw
        if self._score_mod is not None:
            scores = over_indices(self._score_mod, score=True)(raw, *self._heads, *indices)
            scores = scores.to(raw.dtype)
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def times(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Returns rows (B, H, R, X) @ shared (B, G, X, Y), without repeating the shared heads."""
    B, H, R, X = rows.shape
    grouped = rows.reshape(B, shared.shape[1], -1, X)
    return torch.matmul(grouped, shared).view(B, H, R, shared.shape[-1])


def transposed_times(a: torch.Tensor, b: torch.Tensor, shared: int) -> torch.Tensor:
    """Returns a (B, H, R, X)^T @ b (B, H, R, Y), summed over heads that share a key head.

    The result is (B, G, X, Y), where G is `shared`.
    """
    left, right = (t.reshape(t.shape[0], shared, -1, t.shape[-1]) for t in (a, b))
    return torch.matmul(left.transpose(-1, -2), right)


def _weights(scores: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Returns exp(score - shift), with a shift (B, H, R) for each row; 0 in rows without keys."""
    shift = shift.masked_fill(shift == -torch.inf, torch.inf).unsqueeze(-1)
    # Denormal numbers make exp and products ten times slower, and biases by distance produce many.
    # So weights below 1e-35 of the largest (1e-304 in float64) become 0; smaller ones underflow.
    least = -80.0 if scores.dtype == torch.float32 else -700.0
    weights = (scores - shift).clamp_(min=least).exp_()
    return F.threshold(weights, math.exp(least) * 1.01, 0.0, inplace=True)


def _part(tile: Tile, part: Tile, visible: torch.Tensor | None) -> torch.Tensor | None:
    if visible is None:
        return None
    rows = slice(part.q_begin - tile.q_begin, part.q_end - tile.q_begin)
    return visible[:, :, rows, part.k_begin - tile.k_begin : part.k_end - tile.k_begin]


def add_scores(
    forward: Forward,
    scores: Scores,
    tile: Tile,
    visible: torch.Tensor | None,
    shards: Sequence[torch.Tensor],
    indices: Indices,
) -> None:
    """Adds a tile of some keys and values to `forward`."""
    for part in cut(tile, scores.copies):
        k, v = (t[:, :, part.k_begin : part.k_end].to(wide(t.dtype)) for t in shards)
        modified = scores.modified(scores.raw(part, k), _part(tile, part, visible), indices(part))
        top = modified.amax(-1)
        weights = _weights(modified, top)
        total = weights.sum(-1)
        lse = top + total.log()  # both -inf in rows that see no key
        out = times(weights, v).div_(total.masked_fill_(total == 0, 1).unsqueeze(-1))
        forward.merge(part, out, lse)


@contextmanager
def _reproducible() -> Iterator[None]:
    """Makes gradients of lookup tables independent of the order in which threads add to them."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class ScoreGradients:
    """The gradients of one rank's queries, of each part of the keys and values, and of captures."""

    def __init__(
        self,
        scores: Scores,
        grad_out: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        captured: Sequence[torch.Tensor],
    ) -> None:
        dtype = wide(out.dtype)
        self._scores, self._lse, self._captured = scores, lse, captured
        self._grad_out = grad_out.to(dtype)
        # Subtracted from every dout v^T of a row.
        self._delta = (self._grad_out * out.to(dtype)).sum(-1)
        self.grad_query = Total(rows_first(out, scores.shape, dtype))
        self.grad_query.finish()
        self.grad_captured = [torch.zeros_like(t, dtype=wide(t.dtype)) for t in captured]

    def add(
        self,
        tile: Tile,
        visible: torch.Tensor | None,
        shards: Sequence[torch.Tensor],
        indices: Indices,
        totals: tuple[Total, Total],
    ) -> None:
        """Adds a tile; `totals` receive the gradients of its keys and values."""
        for part in cut(tile, self._scores.copies):
            rows, begin, end = slice(part.q_begin, part.q_end), part.k_begin, part.k_end
            k, v = (t[:, :, begin:end].to(self._grad_out.dtype) for t in shards)
            grad_out, lse = self._grad_out[:, :, rows], self._lse[:, :, rows]
            raw = self._scores.raw(part, k).requires_grad_()
            with torch.enable_grad():
                modified = self._scores.modified(raw, _part(tile, part, visible), indices(part))
            weights = _weights(modified.detach(), lse)
            totals[1].add(begin, end, transposed_times(weights, grad_out, v.shape[1]))
            grad_weights = times(grad_out, v.transpose(-1, -2)).sub_(self._delta[:, :, rows, None])
            grad_raw = self._through(modified, raw, grad_weights.mul_(weights))
            if grad_raw is not None:
                grad_raw = grad_raw * self._scores.scale
                self.grad_query.add(part.q_begin, part.q_end, times(grad_raw, k))
                query = self._scores.query(part)
                totals[0].add(begin, end, transposed_times(grad_raw, query, k.shape[1]))

    def _through(
        self, modified: torch.Tensor, raw: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the scores' gradient, and adds to the captured tensors' gradients."""
        if not modified.requires_grad:
            return None
        with _reproducible():
            of_raw, *of_captured = torch.autograd.grad(
                modified, [raw, *self._captured], grad, allow_unused=True
            )
        for total, part in zip(self.grad_captured, of_captured, strict=True):
            if part is not None:
                total += part
        return of_raw
