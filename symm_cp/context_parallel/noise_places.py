"""Finds the dimension of a tensor that is the sequence, by its length.

A region stores how many positions of each sequence this rank holds. A dimension of that length is
the sequence; if there are several, the usual one is: (batch, sequence, ...), (batch, heads,
sequence, features). Tokens of all samples may share dimension 0, as in mixtures of experts.

A tensor without such a dimension is the same on all ranks (conditions, pooled results, depths of
layers), except activations with another number of rows than the batch: tokens that a router picked.
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
    """Numbers of samples, and lengths of this rank's parts, seen in a region so far."""

    batches: dict[int, None] = field(default_factory=dict)
    lengths: dict[int, None] = field(default_factory=dict)

    def saw_queries(self, query: torch.Tensor) -> None:
        """Records the numbers of samples and rows of attention's queries (B, H, S, E)."""
        self.batches[int(query.shape[0])] = None
        self.lengths[int(query.shape[2])] = None

    def saw_samples(self, samples: int, tokens: int) -> None:
        """Records the number of samples of tokens without a sample dimension."""
        self.batches[samples] = None
        self.lengths[tokens // samples] = None


class Sequences:
    """The sequences of a region on one rank.

    Without load balancers, layouts are found from cuts on the group, or lengths that attention has
    `seen`; `choose` is a function of the length of this rank's part.
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
        """Returns the place of a tensor's numbers.

        `activations`: a dropout's input, which may be tokens of this rank that a router picked.
        `dims`: numbers are drawn for the first `dims` dimensions, and shared by the others.
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
        elif samples % len(positions) != 0:  # each sample has a layout, but these are not samples
            return without_sequence(drawn, self._rank + 1)
        features = math.prod(drawn[dim + 1 :])
        return Place(samples, features, positions, balancer.seq_length)

    def _alike(self, shape: tuple[int, ...]) -> bool:
        """Whether activations without a sequence are assumed to be the same on all ranks."""
        if len(shape) < 2:
            return True
        if 0 in shape:  # a rank without positions, or an expert without tokens
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
            # Nothing was cut and no attention ran yet: assumes attention's default layout.
            return 1, 1, HeadTail(shape[1] * self._world_size, self._world_size)
        return None

    def _lengths(self) -> Iterable[int]:
        return self._by_length if self._known else self._seen.lengths

    def _of(self, length: int) -> LoadBalancer | None:
        """Returns the layout of a sequence of which this rank holds `length` positions, if any."""
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
