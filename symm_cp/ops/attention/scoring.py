"""What is computed of the scores of a tile beyond products of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What makes weights of products of queries and keys, the same for all tiles of a call.

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
class Sight:
    """Which keys the queries of a tile see, and where both are in the whole sequence.

    `query_positions` (S,) and `key_positions` (K,) are int64, on the query's device; None means 0,
    1, 2 and so on. Only bias and dropout look at them.
    """

    mask: torch.Tensor | None = None
    low: int | None = None
    high: int | None = None
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None


class Gradients(NamedTuple):
    """What gradients are added to, with the shapes of the tensors that they are of.

    But `bias` is (B, H, D): samples are added up in the end. None if it is not wanted.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None
