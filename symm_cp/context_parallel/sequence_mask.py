"""Masks of a sequence that is spread over ranks, described by positions in the whole sequence.

Shapes: B samples, S positions of the whole sequence, S_k positions of a sequence of keys. A
`SequenceMask` holds no matrix, only the options of attention ops, and a function for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.layouts import encoded
from symm_cp.ops.attention.masks import MaskOptions

_NO_MATRIX = (
    "context_parallel: a model uses {!r} of its attention mask, which is not a matrix within "
    "context_parallel: attention that changes its mask by the content of this rank's part of the "
    "sequence is not supported"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceMask(MaskOptions):
    """Which keys a query sees: all keys that every option and `mask_mod` allow."""

    #: The rest of the mask, evaluated tile by tile.
    mask_mod: Modifier | None = None
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

    def __getattr__(self, name: str) -> Any:
        """Refuses the methods of tensors: some models read their mask, or change it."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotImplementedError(_NO_MATRIX.format(name))

    def __getitem__(self, _index: Any) -> Any:
        """Raises like `__getattr__`."""
        raise NotImplementedError(_NO_MATRIX.format("[...]"))

    def sample(self, index: int) -> SequenceMask:
        """Returns the mask of one sample of the batch."""
        mask_mod = self.mask_mod

        def own(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> Any:
            assert mask_mod is not None
            return mask_mod(b + index, h, q, kv)

        return replace(super().sample(index), mask_mod=None if mask_mod is None else own)

    def as_mask_mod(self) -> Modifier:
        """Returns the whole mask as one function of sample, head, query and key indices."""
        by_options, mask_mod = super().as_mask_mod(), self.mask_mod
        if mask_mod is None:
            return by_options

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> Any:
            return by_options(b, h, q, kv) & mask_mod(b, h, q, kv)

        return visible


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
