"""Documents packed into a sequence that is spread over ranks in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from symm_cp.ops.recurrent.fragments import Fragments


class Seen(NamedTuple):
    """Whether two positions are of one document, as 0 or 1.

    Shapes: `pairs` (N, C, C), for two positions of a chunk; `begin` and `end` (N, C, 1), for a
    position and the last one before the chunk, or in it; `both` (N, 1), for those last two.
    """

    pairs: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    both: torch.Tensor


def documents_of(
    op: str,
    cu_seqlens: torch.Tensor | Sequence[int],
    fragments: Fragments,
    device: torch.device,
    before: int = 1,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns numbers that ranks must agree on, and each fragment's documents by position.

    A fragment's documents are numbers, for `before` positions before it and for its own. Raises
    `ValueError` or `TypeError` for arguments that do not fit.
    """
    edges = cu_seqlens
    if not isinstance(edges, torch.Tensor):
        edges = torch.tensor(edges, device="cpu")
    if edges.dim() != 1 or edges.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: cu_seqlens of shape {list(edges.shape)} and {edges.dtype} must be a sequence "
            "of ints, or a 1-D tensor of int32 or int64"
        )
    if not torch.compiler.is_compiling():
        known, total = edges.tolist(), fragments.total
        if known[:1] != [0] or known[-1] != total or known != sorted(known):
            raise ValueError(
                f"{op}: cu_seqlens {known} must ascend from 0 to the {total} positions of the "
                "whole sequence"
            )
    edges = edges.to(torch.int64)
    agreed = torch.cat([torch.tensor(fragments.agreed, device=edges.device), edges])
    ends = edges[1:].to(device)
    documents = []
    for begin, length in zip(fragments.starts, fragments.lengths, strict=True):
        positions = torch.arange(begin - before, begin + length, device=device)
        documents.append(torch.searchsorted(ends, positions, right=True))
    return agreed, documents


def seen_within(documents: list[torch.Tensor], counts: list[int], size: int) -> Seen:
    """Returns which positions in chunks of `size` are of one document.

    `documents` holds, for each fragment, the documents of the position before it and of its own
    positions; `counts` holds the fragments' numbers of chunks.
    """
    each = [_seen(own, n, size) for own, n in zip(documents, counts, strict=True)]
    return each[0] if len(each) == 1 else Seen(*map(torch.cat, zip(*each, strict=True)))


def _seen(documents: torch.Tensor, chunks: int, size: int) -> Seen:
    after = chunks * size + 1 - len(documents)  # padding counts as the last document
    filled = torch.cat([documents, documents[-1:].expand(after)])
    inside, before = filled[1:].view(chunks, size), filled[:-1:size][:chunks, None]
    last = inside[:, -1:]
    return Seen(
        inside[:, :, None] == inside[:, None, :],
        (inside == before)[..., None],
        (inside == last)[..., None],
        last == before,
    )
