"""How the features of a linear are divided over the ranks; the world size need not divide them.

Parameters are DTensors with torch's `Shard`, which divides n features as `torch.chunk` does: each
rank has `ceil(n / W)`, the last ones fewer or none. So all that torch does with DTensors is correct
for them: optimizers, `clip_grad_norm_`, `full_tensor()`, `torch.distributed.checkpoint` (which
loads them at any other world size).

Linears compute with the features that they store, except where that would split a unit of
`multiple_of` features (an attention head). Then units are divided nearly equally, the first ranks
having one more, and the forward pass gathers the weight and takes this rank's units of it; the
gradients go back to where they are stored. That costs an all-gather of the weight in each forward
and a reduce-scatter in each backward. Units that other units share (the key heads of grouped
queries) may be fewer than ranks: then each rank takes the units that its own part of the others
(query heads) needs, in the same way, and the gradients of all ranks that took a unit are summed.

Other representations were rejected: DTensors support no other division (custom placements compare
equal to `Shard`, and get lost in ops), and `clip_grad_norm_` and checkpoints silently treat plain
tensors as replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symm_cp.ops.matmul import all_gather_matmul
from symm_cp.tensors.shards import Split


def chunks(length: int, ranks: int) -> Split:
    """Returns the division of `Shard`: like `torch.chunk`, with empty parts for further ranks."""
    size = -(-length // ranks)
    return Split(tuple(min(size, max(0, length - rank * size)) for rank in range(ranks)))


@dataclass(frozen=True)
class Features:
    """Features as their parameters store them, and as a linear computes with them."""

    stored: Split
    computed: Split
    rank: int
    #: The runs of features that this rank computes, where ranks share some.
    shared: tuple[range, ...] = ()

    @classmethod
    def divided(
        cls, length: int, rank: int, ranks: int, multiple_of: int = 1, shared_by: int = 1
    ) -> Features:
        """Divides features into units of `multiple_of`, which `shared_by` other units share."""
        stored, count = chunks(length, ranks), length // multiple_of
        if shared_by > 1 and count < ranks:
            taken = [_taken(r, ranks, count, shared_by) for r in range(ranks)]
            computed = Split(tuple(len(units) * multiple_of for units in taken))
            runs = (range(u * multiple_of, (u + 1) * multiple_of) for u in taken[rank])
            return cls(stored, computed, rank, tuple(runs))
        if all(size % multiple_of == 0 for size in stored.sizes):
            return cls(stored, stored, rank)
        units = Split.nearly_equal(length // multiple_of, ranks)
        return cls(stored, Split(tuple(size * multiple_of for size in units.sizes)), rank)

    @property
    def count(self) -> int:
        """The number of features that this rank computes."""
        sizes = self.computed.sizes
        if type(self.rank) is int:
            return sizes[self.rank]
        if len(set(sizes)) > 1:  # `rank` stands for all ranks
            raise NotImplementedError(
                f"LocalTensorMode: {self.length} features must divide equally, not into {sizes}"
            )
        return sizes[0]

    @property
    def length(self) -> int:
        """The number of features of all ranks together."""
        return sum(self.stored.sizes)  # torch.compile traces no cached property

    @property
    def as_stored(self) -> bool:
        """Whether every rank computes the features that it stores."""
        return not self.shared and (self.computed is self.stored or self.computed == self.stored)

    def own(self, stored: torch.Tensor, dim: int, group: str) -> torch.Tensor:
        """Returns the features that this rank computes, given the stored ones. May communicate."""
        if self.as_stored:
            return stored
        shard = stored.unsqueeze(1) if stored.dim() == 1 else stored
        sizes = self.stored.sizes
        gathered, _ = all_gather_matmul(
            shard, [], gather_dim=dim, group=group, sizes=sizes, return_gathered=True
        )
        if self.shared:
            runs = [gathered.narrow(dim, run.start, len(run)) for run in self.shared]
            part = torch.cat(runs, dim)
        else:
            part = gathered.narrow(dim, self.computed.start(self.rank), self.count)
        return part.squeeze(1) if stored.dim() == 1 else part


def _taken(rank: int, ranks: int, count: int, shared_by: int) -> list[int]:
    """Returns which of `count` units a rank's part of the `count * shared_by` others needs.

    One unit or, if the part needs several, one entry for each of the others in the part: units may
    repeat, and not equally often.
    """
    parts = Split.nearly_equal(count * shared_by, ranks)
    start = parts.start(rank)
    needed = [unit // shared_by for unit in range(start, start + parts.sizes[rank])]
    return needed[:1] if len(set(needed)) == 1 else needed


def check_units(
    style: str, name: str, length: int, ranks: int, multiple_of: int, shared_by: int = 1
) -> None:
    """Raises `ValueError` unless the features are whole units, and enough for all ranks."""
    if length % multiple_of != 0:
        raise ValueError(f"{style}: {name}={length} is not a multiple of {multiple_of=}")
    units = length // multiple_of
    if multiple_of > 1 and units * shared_by < ranks:
        raise ValueError(
            f"{style}: {name}={length} has {units} units of {multiple_of=}, which is less than one "
            f"for each of {ranks} ranks; use a mesh of at most {units * shared_by} ranks or, for "
            "key heads, give the number of query heads that share each as shared_by="
        )
