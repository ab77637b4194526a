"""Chooses the variant of PRODUCE_AND_ALL_REDUCE that sums a result, and the chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

import torch

from symm_cp.tensors.alignment import ALIGN, part_offsets
from symm_cp.tensors.shards import Split

# Bytes that a rank would read in one shot, from which on two shots are faster if it has more than
# one peer (as in csrc/exchange/exchange.h). A smaller number synchronises twice for small results;
# a larger one reads each contribution W - 1 times where once would do. Results are computed in
# slots, so that two ranks gain nothing by two shots.
_TWO_SHOTS_FROM = 192 << 10


class AllReduceVariant(Enum):
    """Variants of PRODUCE_AND_ALL_REDUCE."""

    CHUNKS = ""
    WHOLE = "whole"
    ONE_SHOT = "one_shot"

    @property
    def options(self) -> dict[str, bool]:
        """The options of the variant."""
        return {self.value: True} if self.value else {}

    def offsets(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """Returns where chunks of these sizes begin in a slot; the last entry is its size."""
        if self is AllReduceVariant.CHUNKS:
            return part_offsets(chunks)
        return tuple(itertools.accumulate((0, *chunks)))


def in_one_shot(nbytes: int, ranks: int) -> bool:
    """Whether every rank sums all of a result that ranks produce as a whole."""
    return ranks <= 2 or nbytes * (ranks - 1) < _TWO_SHOTS_FROM


def all_reduce_variant(
    out: torch.Tensor, split: Split | None, ranks: int
) -> tuple[AllReduceVariant, tuple[int, ...]]:
    """Returns the variant for a result, and the bytes of each rank's chunk of it.

    `split` divides its first dimension; None: ranks produce all of it at once.
    """
    nbytes = out.numel() * out.element_size()
    if split is not None:
        row = nbytes // out.shape[0] if out.shape[0] else 0
        return AllReduceVariant.CHUNKS, tuple(size * row for size in split.sizes)
    # Whole cache lines, so that no line is written by two ranks.
    size = -(-nbytes // (ranks * ALIGN)) * ALIGN
    chunks = tuple(max(0, min(size, nbytes - rank * size)) for rank in range(ranks))
    one_shot = in_one_shot(nbytes, ranks)
    return (AllReduceVariant.ONE_SHOT if one_shot else AllReduceVariant.WHOLE), chunks
