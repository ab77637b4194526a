"""Which dimension of a tensor is the sequence, told by its length.

A region knows how many positions of each sequence this rank holds. A dimension of that length is
the sequence; where several are, the usual one: (batch, sequence, ...), (batch, heads, sequence,
features). Tokens of all samples may share dimension 0, as mixtures of experts have them.

What has no such dimension is the same on all ranks (conditions, pooled results, depths of layers),
but for activations of other rows than the batch has: those are tokens that a router picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel.layouts import last_cut
from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer, positions_on
from symm_cp.ops.position_noise import Place, without_sequence

_ORDER = {1: (0,), 2: (1, 0), 3: (1, 0, 2), 4: (2, 1, 0, 3)}
_CPU = torch.device("cpu")


@dataclass
class Seen:
    """What sequences of a region have had so far: samples, and lengths of this rank's parts."""

    batches: dict[int, None] = field(default_factory=dict)
    lengths: dict[int, None] = field(default_factory=dict)

    def saw_queries(self, query: torch.Tensor) -> None:
        """Remembers the samples and rows of attention's queries (B, H, S, E)."""
        self.batches[int(query.shape[0])] = None
        self.lengths[int(query.shape[2])] = None

    def saw_samples(self, samples: int, tokens: int) -> None:
        """Remembers the samples of tokens that have no dimension of them."""
        self.batches[samples] = None
        self.lengths[tokens // samples] = None


class Sequences:
    """The sequences of a region on one rank.

    Without load balancers they are the layouts cut on the group, or that attention has `seen`;
    `choose` is a function of the length of this rank's part.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        world_size: int,
        balancers: Sequence[LoadBalancer],
        choose: Callable[[int], LoadBalancer] | None = None,
        seen: Seen | None = None,
    ) -> None:
        self._seen = Seen() if seen is None else seen
        self._group, self._rank, self._world_size = group, rank, world_size
        self._by_length = {balancer.lengths[rank]: balancer for balancer in balancers}
        self._known = bool(balancers)
        self._choose = choose

    def place(self, shape: Sequence[int], *, activations: bool = False, dims: int = 0) -> Place:
        """Returns where the numbers of a tensor lie.

        `activations` are dropped; they may be tokens of this rank that a router picked.
        `dims`: numbers are drawn for the first dimensions only, and shared by the others.
        """
        shape = tuple(int(size) for size in shape)
        drawn = shape[:dims] if dims else shape
        if len(shape) > 2 and all(size == 1 for size in shape[1:]):
            return without_sequence(drawn)
        found = self._sequence(shape)
        if found is None:
            alike = not activations or self._alike(shape)
            return without_sequence(drawn, 0 if alike else self._rank + 1)
        dim, folded, balancer = found
        if len(shape) > 2 and dim > 0:
            self._seen.batches[shape[0]] = None
        if dim >= len(drawn):
            return without_sequence(drawn)
        samples = math.prod(drawn[:dim]) * folded
        positions = positions_on(_CPU, balancer, self._rank)
        if positions.dim() == 1:
            positions = positions[None]
        elif samples % len(positions) != 0:  # of each sample: this is none of them
            return without_sequence(drawn, self._rank + 1)
        features = math.prod(drawn[dim + 1 :])
        return Place(samples, features, positions, balancer.seq_length)

    def _alike(self, shape: tuple[int, ...]) -> bool:
        """Whether activations without a sequence are taken for the same on all ranks."""
        if len(shape) < 2:
            return True
        if 0 in shape:  # of a rank without positions, or of an expert without tokens
            return len(shape) > 2 or self._of(0) is not None
        batches = self._seen.batches
        return len(shape) == 2 and (not batches or shape[0] in batches)

    def _sequence(self, shape: tuple[int, ...]) -> tuple[int, int, LoadBalancer] | None:
        """Returns the dimension of the sequence, how many samples it holds, and its layout."""
        if 0 in shape or math.prod(shape) == 1:
            return None
        if len(shape) == 2 and shape[0] % shape[1] == 0 and (balancer := self._of(shape[1])):
            # Tokens of all samples, with as many features as there are positions.
            return 0, shape[0] // shape[1], balancer
        for dim in _ORDER.get(len(shape), range(1, len(shape))):
            if balancer := self._of(shape[dim]):
                return dim, 1, balancer
        if len(shape) < 2:
            return None
        batches = self._seen.batches
        for length in self._lengths():
            samples, rest = divmod(shape[0], length)
            usual = samples in batches if batches else samples > 0
            if rest == 0 and usual and (balancer := self._of(length)):
                return 0, samples, balancer
        if not self._known and not self._lengths() and len(shape) == 3 and shape[1] % 2 == 0:
            # Nothing was cut here and nothing has attended: as attention will take it.
            return 1, 1, HeadTail(shape[1] * self._world_size, self._world_size)
        return None

    def _lengths(self) -> Iterable[int]:
        return self._by_length if self._known else self._seen.lengths

    def _of(self, length: int) -> LoadBalancer | None:
        """The layout of a sequence of which this rank holds so many positions, if there is one."""
        if self._known or length in self._by_length:
            return self._by_length.get(length)
        found = self._asked(length)
        if found is not None:
            self._by_length[length] = found
        return found

    def _asked(self, length: int) -> LoadBalancer | None:
        group = _resolve_process_group(self._group)  # type: ignore[arg-type]
        was_cut = last_cut(group, length)
        attended = length in self._seen.lengths
        if self._choose is None:
            if was_cut is not None or not attended or length % 2 != 0:
                return was_cut
            return HeadTail(length * self._world_size, self._world_size)
        if was_cut is None and not attended:
            return None
        chosen = self._choose(length)
        fits = isinstance(chosen, LoadBalancer) and chosen.lengths[self._rank] == length
        return chosen if fits else None
