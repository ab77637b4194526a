"""Changes of scores and weights of a tile: scale, soft cap, bias, dropout.

`ScoredTiles` makes the arguments that this project's kernels (native_tiles.py) take for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from symm_cp.cuda.cached import cached
from symm_cp.ops.attention.kernels import factor_of
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import Tile
from symm_cp.tensors.dtypes import wide


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How products of queries and keys become weights, the same for all tiles of a call.

    `bias` (H, D), float32 or the query's dtype, is added by distance: entry
    [h, key position - query position + bias_zero]. `dropout_p` is from 0 to 1; dropout depends on
    the seed (int64), the positions, and on sample and head, counted from the offsets (see
    philox.py).
    """

    scale: float
    softcap: float | None = None
    bias: torch.Tensor | None = None
    bias_zero: int = 0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    sample_offset: int = 0
    head_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class TileMask:
    """Which keys the queries of a tile see, and where both are in the whole sequence.

    Query i sees key j when low <= j - i <= high (None: no limit), unless the additive `mask` hides
    it. `fully_masked` marks rows that see no key; only torch's kernels need it.
    `query_positions` (S,) and `key_positions` (K,) are int64, on the query's device; None means 0,
    1, 2 and so on. Only bias and dropout use them.
    """

    mask: torch.Tensor | None = None
    low: int | None = None
    high: int | None = None
    fully_masked: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether query i sees no key after i, before `mask`."""
        return self.low is None and self.high == 0


def in_band(
    rows: int,
    keys: int,
    low: int | None,
    high: int | None,
    device: torch.device,
    *,
    first: int = 0,
) -> torch.Tensor:
    """Which keys j query i sees: low <= j - i <= high (None: no limit); (rows, keys) of bool.

    The queries are those from number `first` on.
    """
    queries = torch.arange(first, first + rows, device=device)
    offset = torch.arange(keys, device=device) - queries.unsqueeze(1)
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if low is not None:
        visible &= offset >= low
    if high is not None:
        visible &= offset <= high
    return visible


class Gradients(NamedTuple):
    """Sums of gradients, with the shapes of query, key and value.

    `bias` is (B, H, D), summed over samples in the end; None if it is not wanted.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None


@cached(maxsize=64)
def _positions(device: torch.device, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """The position in the sequence of each row of a rank."""
    return torch.tensor(list(layout.positions(rank)), dtype=torch.int64, device=device)


class ScoredTiles:
    """Arguments of the kernels for the tiles of one call on this rank.

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
            bias = bias.to(wide(query.dtype))
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
        """Returns the arguments for a call; None if torch's kernels can compute it."""
        on_cpu = query.device.type == "cpu"
        if spec.rescores or (on_cpu and spec.value_features is not None):
            return ScoredTiles(query, spec, rank, bias)
        return None

    def scoring(self, tile: Tile) -> Scoring:
        """Returns how a tile's products become weights."""
        return replace(self._scoring, sample_offset=tile.b_begin) if tile.b_begin else self._scoring

    def tile_mask(self, tile: Tile, owner: int, mask: torch.Tensor | None) -> TileMask:
        """Returns the mask of a tile of rank `owner`'s keys, given an additive mask."""
        if not self._by_position:
            return TileMask(mask=mask, low=tile.low, high=tile.high)
        queries = _positions(self._device, self._spec.queries or self._spec.layout, self._rank)
        keys = _positions(self._device, self._spec.layout, owner)
        return TileMask(
            mask=mask,
            low=tile.low,
            high=tile.high,
            query_positions=queries[tile.q_begin : tile.q_end],
            key_positions=keys[tile.k_begin : tile.k_end],
        )
