"""Each rank's part of the keys and values in one layer's cache.

Positions are dealt to the ranks in blocks, in turns: block b belongs to rank b % W. So the parts
differ by one block at most, however long the sequence grows.

Shapes: key (B, G, S, E), value (B, G, S, V).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A full part grows by this factor: copying then takes a bounded share of the time.
_GROWTH = 1.5


@dataclass(frozen=True)
class Blocks:
    """The blocks of positions that belong to one rank."""

    rank: int
    world_size: int
    size: int

    def count(self, length: int) -> int:
        """Returns how many of the first `length` positions are this rank's."""
        rounds, rest = divmod(length, self.size * self.world_size)
        return rounds * self.size + min(max(rest - self.rank * self.size, 0), self.size)

    def places(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of this rank's keys with numbers begin to end, ascending."""
        number = torch.arange(begin, end, device=device)
        block = torch.div(number, self.size, rounding_mode="floor")
        return (block * self.world_size + self.rank) * self.size + number % self.size


class SpreadKeys:
    """This rank's part of a layer's keys and values."""

    def __init__(self, blocks: Blocks, capacity: int = 0) -> None:
        """`capacity`: reserves room at once for this many positions of the whole sequence."""
        self.blocks = blocks
        self.length = 0  # of the whole sequence
        self._capacity = capacity
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._places: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """How many keys this rank has."""
        return self.blocks.count(self.length)

    @property
    def keys(self) -> torch.Tensor:
        """This rank's keys, (B, G, count, E)."""
        assert self._keys is not None
        return self._keys.narrow(2, 0, self.count)

    @property
    def values(self) -> torch.Tensor:
        """This rank's values, (B, G, count, V)."""
        assert self._values is not None
        return self._values.narrow(2, 0, self.count)

    @property
    def positions(self) -> torch.Tensor:
        """The positions of this rank's keys in the sequence, (count,)."""
        assert self._places is not None
        return self._places.narrow(0, 0, self.count)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores this rank's part of the next positions."""
        begin, first = self.length, self.count
        self.length = begin + key.shape[2]
        self._reserve(key, value, first)
        count = self.count - first
        if count == 0:
            return
        if count == key.shape[2]:
            own_key, own_value = key, value
        else:
            own = self.positions[first:] - begin
            own_key, own_value = key.index_select(2, own), value.index_select(2, own)
        self.keys.narrow(2, first, count).copy_(own_key)
        self.values.narrow(2, first, count).copy_(own_value)

    def crop(self, length: int) -> None:
        """Drops all positions after the first `length`."""
        self.length = min(length, self.length)

    def take_samples(self, samples: torch.Tensor) -> None:
        """Keeps the samples with these numbers, in their order; they may repeat."""
        if self._keys is None or self._values is None:
            return
        samples = samples.to(self._keys.device)
        self._keys = self._keys.index_select(0, samples)
        self._values = self._values.index_select(0, samples)

    def reset(self) -> None:
        """Drops all keys and values."""
        self.length = 0
        self._keys = self._values = self._places = None

    def _reserve(self, key: torch.Tensor, value: torch.Tensor, used: int) -> None:
        """Makes room for this rank's part of `self.length` positions; keeps its `used` keys."""
        held = 0 if self._keys is None else self._keys.shape[2]
        if self._keys is not None and self.count <= held:
            return
        most = max(self.count, int(held * _GROWTH), self.blocks.count(self._capacity))
        room = -(-most // self.blocks.size) * self.blocks.size

        def grown(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
            B, G, _, features = like.shape
            new = like.new_empty(B, G, room, features)
            if old is not None:
                new.narrow(2, 0, used).copy_(old.narrow(2, 0, used))
            return new

        self._keys, self._values = grown(self._keys, key), grown(self._values, value)
        self._places = self.blocks.places(0, room, key.device)
