"""Chooses the variant of PRODUCE_AND_ALL_REDUCE that sums a result, and the chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

import torch

from symm_cp.schedule.patterns.produce_and_all_reduce import in_one_shot
from symm_cp.tensors.alignment import ALIGN, part_offsets
from symm_cp.tensors.shards import Split


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
