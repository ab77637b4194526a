"""Positions in chunks, and the decay between the positions of a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from symm_cp.ops.recurrent.documents import Seen


def counts_of(lengths: Sequence[int], chunk_size: int) -> list[int]:
    """Returns the number of chunks of each fragment."""
    return [(length + chunk_size - 1) // chunk_size for length in lengths]


def in_chunks(
    tensor: torch.Tensor, lengths: Sequence[int], chunk_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """(B, S, H, ...) as (B * H, N, C, ...), with zeros after the last position of a fragment."""
    rows = tensor.transpose(1, 2).to(dtype)
    within, missing = (0, 0) * (tensor.dim() - 3), [-length % chunk_size for length in lengths]
    if len(lengths) == 1:
        rows = F.pad(rows, (*within, 0, missing[0]))
    elif any(missing):
        parts = zip(rows.split(list(lengths), 2), missing, strict=True)
        rows = torch.cat([F.pad(part, (*within, 0, more)) for part, more in parts], 2)
    chunks = sum(counts_of(lengths, chunk_size))
    return rows.reshape(tensor.shape[0] * tensor.shape[2], chunks, chunk_size, *tensor.shape[3:])


def out_of_chunks(chunks: torch.Tensor, lengths: Sequence[int], batch: int) -> torch.Tensor:
    """(B * H, N, C, V) as (B, S, H, V), without the padding of a fragment's last chunk."""
    size = chunks.shape[2]
    rows = chunks.flatten(1, 2)
    rows = rows.reshape(batch, len(rows) // batch, *rows.shape[1:])
    counts = counts_of(lengths, size)
    if len(lengths) == 1:
        rows = rows[:, :, : lengths[0]]
    elif any(length % size for length in lengths):
        parts = rows.split([count * size for count in counts], 2)
        rows = torch.cat([p[:, :, :n] for p, n in zip(parts, lengths, strict=True)], 2)
    return rows.transpose(1, 2)


def pairs(
    lefts: Sequence[torch.Tensor], right: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns for each left [.., t, s] = left[.., t] @ right[.., s] * (decay[t] - decay[s]).exp().

    The result is 0 for s > t. Shapes: left and right (R, N, C, K), decay (R, N, C, 1).
    """
    size = right.shape[-2]
    # exp of entries above the diagonal could overflow.
    above = torch.ones(size, size, dtype=torch.bool, device=right.device).triu(1)
    since = (decay - decay.transpose(-1, -2)).masked_fill(above, -math.inf).exp()
    return tuple((left @ right.transpose(-1, -2)) * since for left in lefts)


def pairs_by_feature(
    lefts: Sequence[torch.Tensor], right: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Like `pairs`, for a decay of each feature, (R, N, C, K); C is a power of 2.

    Such a decay multiplies the rows, not their product: the earlier row decays up to a position
    between both, the later row from there, so that no exponent is above 0. Blocks of 2, 4, 8, ...
    positions share that position: the last of their first half.
    """
    size, rows = right.shape[-2], torch.stack([*lefts])
    blocks = (rows * right).sum(-1)[..., None, None]
    half = 1
    while half < size:
        at = decay.unflatten(-2, (-1, 2, half))
        begins, ends = at[..., 0, :, :], at[..., 1, :, :]
        middle = begins[..., -1:, :]
        later = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :] * (ends - middle).exp()
        earlier = right.unflatten(-2, (-1, 2, half))[..., 0, :, :] * (middle - begins).exp()
        both = blocks.unflatten(-3, (-1, 2))
        first, second = both[..., 0, :, :], both[..., 1, :, :]
        between = later @ earlier.transpose(-1, -2)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([upper, torch.cat([between, second], -1)], -2)
        half *= 2
    return blocks.squeeze(-3).unbind()


class Decay:
    """How much is left of a state between positions: factors, 0 across documents.

    Shapes: `since_begin`, `before` and `to_end` (R, N, C, 1 or K), `at_end` (R, N) or (R, N, K).
    """

    def __init__(self, g: torch.Tensor, seen: Seen | None) -> None:
        """`g`, (R, N, C) or (R, N, C, K), has the logarithm of each position's factor."""
        summed = g.cumsum(2)
        self._summed = summed if g.dim() == 4 else summed.unsqueeze(-1)
        self._seen = seen
        #: From before the chunk to each position, with its own factor.
        self.since_begin = self._summed.exp()
        #: From behind each position to the end of its chunk, and from before the chunk.
        self.to_end = (self._summed[..., -1:, :] - self._summed).exp()
        at_end = self._summed[..., -1, :].exp()
        if seen is not None:
            self.since_begin, self.to_end = self.since_begin * seen.begin, self.to_end * seen.end
            at_end = at_end * seen.both
        self.at_end = at_end if g.dim() == 4 else at_end.squeeze(-1)

    @property
    def before(self) -> torch.Tensor:
        """From before the chunk to each position, without its own factor."""
        earlier = F.pad(self._summed[:, :, :-1], (0, 0, 1, 0)).exp()
        return earlier if self._seen is None else earlier * self._seen.begin

    def pairs(self, lefts: Sequence[torch.Tensor], right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns for each left [.., t, s] = left[.., t] @ right[.., s] * (factors after s to t).

        The result is 0 for s > t. Shapes: left and right (R, N, C, K).
        """
        decayed = pairs if self._summed.shape[-1] == 1 else pairs_by_feature
        found = decayed(lefts, right, self._summed)
        return found if self._seen is None else tuple(each * self._seen.pairs for each in found)

    def pairs_before(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Returns the same with the factors after s to t - 1; 0 for s >= t."""
        (found,) = self.pairs((F.pad(left[:, :, 1:], (0, 0, 0, 1)),), right)
        found = F.pad(found[:, :, :-1], (0, 0, 1, 0))
        return found if self._seen is None else found * self._seen.pairs
