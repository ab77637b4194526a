"""Documents packed into a sequence that is spread over ranks in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from symm_cp.ops.common import rank_in, world_size_of


class Seen(NamedTuple):
    """Which positions of a chunk are of one document, as 0 or 1.

    Shapes: `pairs` (N, C, C), of a position and another one; `begin` and `end` (N, C, 1), of a
    position and the last one before the chunk, or of the chunk; `both` (N, 1), of those two.
    """

    pairs: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    both: torch.Tensor


def documents_of(
    op: str,
    cu_seqlens: torch.Tensor | Sequence[int],
    sizes: Sequence[int] | None,
    length: int,
    group_name: str,
    device: torch.device,
    before: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ranks must agree on, and the documents of this rank's positions.

    The documents are numbers, `before` more than there are positions: those of the positions before
    this rank's come first. Raises `ValueError` or `TypeError` for what does not fit.
    """
    ranks, rank = world_size_of(group_name), rank_in(group_name)
    lengths = [length] * ranks if sizes is None else list(sizes)
    if len(lengths) != ranks or lengths[rank] != length:
        raise ValueError(
            f"{op}: sizes={lengths} must have {ranks} numbers, for rank {rank} the {length} "
            "positions of its part"
        )
    edges = torch.as_tensor(cu_seqlens)
    if edges.dim() != 1 or edges.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: cu_seqlens of shape {list(edges.shape)} and {edges.dtype} must be a sequence "
            "of ints, or a 1-D tensor of int32 or int64"
        )
    if not torch.compiler.is_compiling():
        known, total = edges.tolist(), sum(lengths)
        if known[:1] != [0] or known[-1] != total or known != sorted(known):
            raise ValueError(
                f"{op}: cu_seqlens {known} must ascend from 0 to the {total} positions of the "
                "whole sequence"
            )
    begin = sum(lengths[:rank])
    positions = torch.arange(begin - before, begin + length, device=device)
    edges = edges.to(torch.int64)
    agreed = torch.cat([torch.tensor(lengths, device=edges.device), edges])
    return agreed, torch.searchsorted(edges[1:].to(device), positions, right=True)


def seen_within(documents: torch.Tensor, chunks: int, size: int) -> Seen:
    """Returns which of the positions in chunks of `size` are of one document.

    `documents`: of this rank's positions and the one before them.
    """
    after = chunks * size + 1 - len(documents)  # what fills the last chunk is of the last document
    filled = torch.cat([documents, documents[-1:].expand(after)])
    inside, before = filled[1:].view(chunks, size), filled[:-1:size][:chunks, None]
    last = inside[:, -1:]
    return Seen(
        inside[:, :, None] == inside[:, None, :],
        (inside == before)[..., None],
        (inside == last)[..., None],
        last == before,
    )
