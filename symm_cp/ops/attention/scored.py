"""A call's tiles by this project's kernels: for what torch's lack (see native_tiles.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from symm_cp.cuda.kept import kept
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.scoring import Scoring, Sight
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import Tile


@kept(maxsize=64)
def _positions(device: torch.device, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """The position in the sequence of each row of a rank."""
    return torch.tensor(list(layout.positions(rank)), dtype=torch.int64, device=device)


class ScoredTiles:
    """What the kernels are told of the tiles of one call on this rank.

    The rank matters only to calls with a bias or dropout.
    """

    def __init__(
        self,
        query: torch.Tensor,
        spec: AttentionSpec,
        rank: int = 0,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._device, self._spec, self._rank = query.device, spec, rank
        queries = spec.queries or spec.layout
        if bias is not None and bias.dtype not in (torch.float32, query.dtype):
            bias = bias.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
        self._scoring = Scoring(
            scale=factor_of(query, spec.scale),
            softcap=spec.softcap,
            bias=bias,
            bias_zero=queries.length - 1,
            dropout_p=spec.dropout_p,
            dropout_seed=spec.dropout_seed or 0,
            head_offset=spec.head_offset,
        )
        self._by_position = spec.bias or spec.dropout_p > 0

    @staticmethod
    def of(
        query: torch.Tensor, spec: AttentionSpec, rank: int, bias: torch.Tensor | None
    ) -> ScoredTiles | None:
        """Returns what a call needs; None if torch's kernels can compute it."""
        on_cpu = query.device.type == "cpu"
        if spec.rescores or (on_cpu and spec.value_features is not None):
            return ScoredTiles(query, spec, rank, bias)
        return None

    def scoring(self, tile: Tile) -> Scoring:
        """Returns how scores and weights of a tile are made."""
        return replace(self._scoring, sample_offset=tile.b_begin) if tile.b_begin else self._scoring

    def sight(self, tile: Tile, owner: int, mask: torch.Tensor | None) -> Sight:
        """Returns what the queries of a tile see of rank `owner`'s keys, under an additive mask."""
        if not self._by_position:
            return Sight(mask=mask, low=tile.low, high=tile.high)
        queries = _positions(self._device, self._spec.queries or self._spec.layout, self._rank)
        keys = _positions(self._device, self._spec.layout, owner)
        return Sight(
            mask=mask,
            low=tile.low,
            high=tile.high,
            query_positions=queries[tile.q_begin : tile.q_end],
            key_positions=keys[tile.k_begin : tile.k_end],
        )
