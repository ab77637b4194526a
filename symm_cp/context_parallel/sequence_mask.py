"""Masks of a sequence that is spread over ranks, described by positions in the whole sequence.

Shapes: B samples, S positions of the whole sequence, S_k positions of a sequence of keys. A
`SequenceMask` has the options of attention ops, and says the rest of a mask by a function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.context_parallel.block_mask import blocks_of_sample
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.layouts import encoded
from symm_cp.ops.attention.masks import MaskOptions, row_of


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceMask(MaskOptions):
    """Which keys a query sees: all keys that every option, and the rest of the mask, allow."""

    #: The rest of the mask, evaluated tile by tile.
    mask_mod: Modifier | None = None
    #: The rest of the mask as blocks of the whole sequence, or as those of this rank's queries.
    block_mask: BlockMask | None = None
    #: The rest of the mask as a matrix of bool, or as numbers that are added to scores:
    #: (B or 1, H or 1, S, S_k).
    matrix: torch.Tensor | None = None
    #: The region that made the mask: attention that a checkpoint recomputes outside of the region
    #: finds it here.
    region: ParallelRegion | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: only attention within a region supports this mask."""
        name = getattr(func, "__name__", repr(func))
        raise RuntimeError(
            f"{name}: got an attention mask that a model of transformers made with "
            'attn_implementation="symm_cp" within context_parallel, but the model attends with '
            "another implementation now. If a checkpoint recomputes outside of the context, run "
            'the backward pass within it, or call model.set_attn_implementation("symm_cp") once '
            "instead of passing the model to context_parallel"
        )

    @property
    def is_function(self) -> bool:
        """Whether the mask is more than its options say."""
        by_matrix = self.matrix is not None and self.matrix.dtype == torch.bool
        return by_matrix or self.mask_mod is not None or self.block_mask is not None

    @property
    def whole_blocks(self) -> BlockMask | None:
        """The block mask of the whole sequence, also if `block_mask` was cut from it."""
        return getattr(self.block_mask, "symm_cp_global", self.block_mask)

    @property
    def score_mod(self) -> Modifier | None:
        """Adds a floating `matrix` to the scores."""
        if self.matrix is None or self.matrix.dtype == torch.bool:
            return None
        entry = self._entry

        def biased(score: torch.Tensor, *indices: Any) -> torch.Tensor:
            return score + entry(*indices)

        return biased

    def _entry(self, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        matrix = self.matrix
        assert matrix is not None
        batch, heads = matrix.shape[:2]  # a size of 1 applies to all
        return matrix[b.clamp(max=batch - 1), h.clamp(max=heads - 1), q, kv]

    def sample(self, index: int) -> SequenceMask:
        """Returns the mask of one sample of the batch."""
        blocks, matrix = self.whole_blocks, self.matrix
        return replace(
            super().sample(index),
            mask_mod=of_sample(self.mask_mod, index),
            block_mask=None if blocks is None else blocks_of_sample(blocks, index),
            matrix=None if matrix is None else row_of(matrix, index),
        )

    def as_mask_mod(self) -> Modifier:
        """Returns the whole mask as one function of sample, head, query and key indices."""
        parts = [] if self.mask_mod is None else [self.mask_mod]
        if self.whole_blocks is not None:
            parts.append(self.whole_blocks.mask_mod)
        if self.matrix is not None and self.matrix.dtype == torch.bool:
            parts.append(self._entry)
        if self.is_given or not parts:
            parts.append(super().as_mask_mod())
        first, *others = parts
        if not others:
            return first

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> Any:
            seen = first(b, h, q, kv)
            for other in others:
                seen = seen & other(b, h, q, kv)
            return seen

        return visible


def of_sample(modifier: Modifier | None, sample: int, *, score: bool = False) -> Modifier | None:
    """Returns a `mask_mod`, or a `score_mod`, for one sample of the batch."""
    if modifier is None:
        return None

    def of_score(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return modifier(score, b + sample, h, q, kv)

    def of_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return modifier(b + sample, h, q, kv)

    return of_score if score else of_mask


def runs(*ids: torch.Tensor) -> torch.Tensor:
    """Numbers the runs of contiguous positions in which none of the (B or 1, S) tensors changes."""
    changes = [torch.diff(each, prepend=each[:, :1]) != 0 for each in ids]
    changed = changes[0]
    for other in changes[1:]:
        changed = changed | other
    return changed.cumsum(-1)


def gather_sequence(
    op: str, name: str, shard: torch.Tensor, region: ParallelRegion, lengths: tuple[int, int]
) -> torch.Tensor:
    """Returns a tensor (B, S) of the whole sequence from this rank's part of it. Collective.

    `name` is the argument's name, for errors. `lengths`: the numbers of queries, and of positions
    of the shard's sequence, that this rank holds. Raises `ValueError` if the number of columns is
    not the load balancer's for this rank.
    """
    sent = region.real(shard, 1) if shard.dim() == 2 else shard
    sent = sent.to(torch.uint8) if sent.dtype == torch.bool else sent
    layouts = region.layouts_in_graph(shard.device)
    if layouts is not None:
        whole_length = region.whole_length(lengths[1])
        whole = torch.ops.symm_mem._gather_sequence(sent, layouts, whole_length, region.group)
        return whole.to(shard.dtype)  # type: ignore[no-any-return]
    balancer = region.layout_of_keys(*lengths)
    assert balancer is not None
    held, rank = balancer.lengths, region.rank
    if sent.dim() != 2 or sent.shape[1] != held[rank]:
        raise ValueError(
            f"{op}: {name} has shape {list(shard.shape)}, must be (batch, {held[rank]}), this "
            f"rank's part of the {balancer.seq_length} positions: symm_cp.shard_batch cuts a batch"
        )
    samples = balancer.samples
    if samples and len(samples) != len(shard):
        raise ValueError(f"{op}: {name} has {len(shard)} samples, {balancer} is for {len(samples)}")
    parts = [(sent[b : b + 1], own) for b, own in enumerate(samples)] or [(sent, balancer)]
    rows = [
        torch.ops.symm_mem._gather_sequence(
            part, encoded((own.layout,)), own.seq_length, region.group
        )
        for part, own in parts
    ]
    return torch.cat(rows).to(shard.dtype)
