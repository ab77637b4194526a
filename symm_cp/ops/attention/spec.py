"""What a call of attention computes: the options of the ops, checked once, as one frozen spec.

Shapes: B batch, H query heads, G key/value heads (H, or with `enable_gqa` a divisor of it), S rows
of this rank's shard, E features of a head, V features of a value.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from symm_cp.group.memory import Group
from symm_cp.ops.attention.checks import (
    check_bias_length,
    check_scores,
    check_tensors,
    check_windows,
    seed_of,
)
from symm_cp.ops.attention.masks import HiddenKeys, masks_of
from symm_cp.ops.attention.methods import ROTATE_METHODS, rotate_method
from symm_cp.ops.attention.options import Options, ScoreOptions
from symm_cp.ops.attention.spread import spread_of
from symm_cp.ops.common import call_signature
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import NO_MASK, Mask
from symm_cp.schedule.tiles import Tile, for_samples, seen_by_peers, tiles
from symm_cp.tensors.dtypes import dtype_name

# With more than this many distinct per-sample masks, send every key: finding the subset that peers
# see costs more than it saves.
_MOST_MASKS = 4


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a call computes: identical on all ranks, which compare it by `call_name`.

    Every field but the layout has a default that changes nothing.
    """

    #: How the sequence of keys and values is spread over the ranks.
    layout: SequenceLayout
    #: Which keys a query sees, by positions in the sequence: one mask, or one for each sample.
    mask: Mask | tuple[Mask, ...] = NO_MASK
    #: Further hidden keys, in short gaps between visible ones; None if there are none.
    hidden: HiddenKeys | None = None
    #: The factor of scores; None is 1 / sqrt(E).
    scale: float | None = None
    #: How gradients of keys and values travel: see `set_rotate_method`.
    method: str = ROTATE_METHODS[0]
    #: The layout of the queries; None if it equals the keys' or does not matter.
    queries: SequenceLayout | None = None
    #: The features of a value, if not E.
    value_features: int | None = None
    #: Scores become softcap * tanh(score / softcap).
    softcap: float | None = None
    #: Whether the denominator of the softmax includes a learned logit of each head.
    sinks: bool = False
    #: Whether a bias by distance is added to the scores.
    bias: bool = False
    #: The share of the weights that is dropped, and the seed of the generator that chooses them.
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    #: The number of the first head, which dropout depends on.
    head_offset: int = 0

    @classmethod
    def of(
        cls,
        op: str,
        group: Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
    ) -> AttentionSpec:
        """Returns the spec of a call; raises `ValueError` or `TypeError` if arguments clash."""
        check_tensors(op, query, key, value, options.enable_gqa)
        check_windows(op, options)
        check_scores(op, query, options)
        layout, queries = spread_of(op, group, query, key, options)
        mask, hidden = masks_of(op, options, query, layout.length)
        return cls.over(op, query, value, options, layout, queries, mask=mask, hidden=hidden)

    @classmethod
    def over(
        cls,
        op: str,
        query: torch.Tensor,
        value: torch.Tensor,
        options: ScoreOptions,
        layout: SequenceLayout,
        queries: SequenceLayout | None,
        **mask: Any,
    ) -> AttentionSpec:
        """Returns the spec of checked options over known layouts; `mask` are fields of the spec."""
        if options.bias is not None:
            check_bias_length(op, options.bias, queries or layout, layout)
        return cls(
            layout=layout,
            scale=options.scale,
            method=rotate_method(),
            queries=queries,
            value_features=value_features_of(query, value),
            softcap=options.softcap,
            sinks=options.sinks is not None,
            bias=options.bias is not None,
            dropout_p=options.dropout_p,
            dropout_seed=seed_of(options),
            head_offset=options.head_offset if options.dropout_p > 0 else 0,
            **mask,
        )

    @property
    def rescores(self) -> bool:
        """Whether scores or weights change by more than a scale and a mask."""
        return self.softcap is not None or self.bias or self.dropout_p > 0

    def tiles(self, rank: int, owner: int, rows: int) -> tuple[Tile, ...]:
        """Returns the tiles of a rank's `rows` queries and the keys of rank `owner`."""
        place = rank, owner, self.queries, rows
        if isinstance(self.mask, Mask):
            return tiles(self.layout, self.mask, *place)
        return tuple(for_samples(self.mask, lambda mask: tiles(self.layout, mask, *place)))

    def hidden_keys(
        self, tile: Tile, owner: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns `HiddenKeys.mask` of a tile of rank `owner`'s keys; None if it hides none."""
        return None if self.hidden is None else self.hidden.mask(tile, self.layout, owner, device)

    def sent_rows(self, owner: int) -> slice:
        """Returns the rows of a rank's keys and values that it sends to its peers."""
        masks = (self.mask,) if isinstance(self.mask, Mask) else tuple(set(self.mask))
        related = all(mask.relates_positions and not mask.is_causal for mask in masks)
        if not related or len(masks) > _MOST_MASKS:
            return slice(0, self.layout.lengths[owner])
        return slice(*seen_by_peers(self.layout, masks, self.queries)[owner])

    def first_sent(self, rank: int, owner: int, tiles: Sequence[Tile]) -> int:
        """Returns the first row of rank `owner`'s keys that this rank was sent, for its tiles."""
        if owner == rank:
            return 0
        sent = self.sent_rows(owner)
        for tile in tiles:
            assert sent.start <= tile.k_begin <= tile.k_end <= sent.stop, (
                f"rank {rank} sees keys {tile.k_begin} to {tile.k_end} of rank {owner}, which "
                f"sends {sent.start} to {sent.stop}: seen_by_peers does not fit {self.mask}"
            )
        return sent.start

    def _sent_lengths(self) -> list[int]:
        sent = map(self.sent_rows, range(self.layout.world_size))
        return [rows.stop - rows.start for rows in sent]

    def shard_shapes(self, key: torch.Tensor) -> list[tuple[tuple[int, ...], ...]] | None:
        """Returns the shapes of the keys and values that ranks send; None when all are equal."""
        lengths = self._sent_lengths()
        if len(set(lengths)) == 1:
            return None
        B, G, _, E = key.shape
        V = self.features(key)
        return [((B, G, length, E), (B, G, length, V)) for length in lengths]

    def features(self, key: torch.Tensor) -> int:
        """Returns the number of features of a value."""
        return key.shape[3] if self.value_features is None else self.value_features

    def grad_shapes(self, key: torch.Tensor) -> list[tuple[int, ...]]:
        """Returns each rank's shape of the consecutive gradients of its sent keys and values."""
        B, G, _, E = key.shape
        return [(B * length * G * (E + self.features(key)),) for length in self._sent_lengths()]

    def call_name(self, op: str, key: torch.Tensor, *details: object) -> bytes:
        """Returns the text that names a call in errors, and that ranks compare.

        `details` are further hashable values that must be identical on all ranks.
        """
        B, G, _, E = key.shape
        return _call_name(op, dtype_name(key.dtype), (B, G, E), self, details)


@lru_cache(maxsize=512)
def _call_name(
    op: str, dtype: str, sizes: tuple[int, ...], spec: AttentionSpec, details: tuple[object, ...]
) -> bytes:
    B, G, E = sizes
    shape: list[int | str] = [B, G, spec.layout.length, E]
    digest = zlib.crc32(repr((spec, *details)).encode())
    if spec.value_features is not None:
        shape[3:] = [f"{E}/{spec.value_features}"]
    if spec.dropout_seed is not None:
        # The part that is likely to differ comes first: names end after `wire.MAX_CALL_NAME` bytes.
        seed = f"{digest:08x} dropout_seed={spec.dropout_seed}: must be equal"
        return call_signature(op, detail=f"{seed}; {dtype}{_listed(shape)}")
    text = f"{dtype}{_listed(shape)} layout+mask {digest:08x}"
    return call_signature(op, detail=text)


def _listed(shape: list[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def value_features_of(query: torch.Tensor, value: torch.Tensor) -> int | None:
    """Returns the number of features of a value, None if queries have the same."""
    return None if value.shape[3] == query.shape[3] else value.shape[3]
