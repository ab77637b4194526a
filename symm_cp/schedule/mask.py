"""Which keys a query sees, by positions in the whole sequence.

`Mask.regions` is the one rule: the tiles that a rank computes and the keys that its peers send it
(tiles.py) both follow from it. A new kind of mask is a field of `Mask` and its part in `regions`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

from symm_cp.schedule.layout import Span

# The end of what has no end: more than any position.
_ENDLESS = 1 << 62


class Keys(NamedTuple):
    """Keys [first, end); query i sees key j when -left <= j - i <= right (None: no limit)."""

    first: int
    end: int
    left: int | None
    right: int | None

    def seen_by(self, first: int, last: int) -> tuple[int, int]:
        """Returns the first key that one of the queries `first` to `last` sees, and their end."""
        begin = self.first if self.left is None else max(self.first, first - self.left)
        end = self.end if self.right is None else min(self.end, last + self.right + 1)
        return begin, end


class Region(NamedTuple):
    """Queries [first, end) and the keys that they see: ascending and apart."""

    first: int
    end: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class Mask:
    """Query i sees key j of its document when -left <= j - i <= right (None: no limit).

    It also sees the keys before `prefix` of its document, whatever the limits are. `documents` are
    boundaries, from 0 to the length of the sequence. Only keys in one of the ranges `keys` (first,
    end; ascending and apart) are seen by any query.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None
    keys: tuple[tuple[int, int], ...] | None = None
    prefix: int | None = None

    def __bool__(self) -> bool:
        return self != NO_MASK

    @property
    def relates_positions(self) -> bool:
        """Whether what a query sees depends on its position."""
        return (self.left, self.right, self.documents) != (None, None, None)

    @property
    def is_causal(self) -> bool:
        """Whether it is the causal mask of one sequence, and nothing else."""
        return self == CAUSAL

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """All queries, in regions that ascend and do not overlap, with the keys that they see."""
        if self.documents is None:
            documents = [(0, _ENDLESS)]
        else:
            documents = [(a, b) for a, b in pairwise(self.documents) if a < b]
        visible = ((0, _ENDLESS),) if self.keys is None else self.keys
        return tuple(
            Region(first, end, tuple(self._keys_of(first, end, visible)))
            for first, end in documents
        )

    def _keys_of(self, first: int, end: int, visible: Sequence[tuple[int, int]]) -> Iterator[Keys]:
        """Yields the keys that queries of the document [first, end) see, with their limits."""
        unlimited = first if self.prefix is None else min(max(first, self.prefix), end)
        place = bisect_right(visible, first, key=_end_of)
        for begin, stop in islice(visible, place, None):
            if begin >= end:
                return
            begin, stop = max(begin, first), min(stop, end)
            if begin < min(stop, unlimited):
                yield Keys(begin, min(stop, unlimited), None, None)
            if max(begin, unlimited) < stop:
                yield Keys(max(begin, unlimited), stop, self.left, self.right)

    def regions_of(self, span: Span) -> Iterator[tuple[Region, Span]]:
        """Yields each region that has queries of a span, with that part of the span."""
        end = span.start + span.length
        place = bisect_right(self.regions, span.start, key=_end_of_region)
        for region in islice(self.regions, place, None):
            if region.first >= end:
                return
            if (part := within(span, region.first, region.end)) is not None:
                yield region, part

    def seen_by(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Returns ranges of keys that queries of some spans see, ascending and apart.

        They may be too wide.
        """
        found = sorted(
            keys.seen_by(part.start, part.start + part.length - 1)
            for span in spans
            for region, part in self.regions_of(span)
            for keys in region.keys
        )
        joined: list[tuple[int, int]] = []
        for first, end in found:
            if first >= end:
                continue
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((first, end))
        return joined


#: Every query sees every key.
NO_MASK = Mask()
#: What is_causal means.
CAUSAL = Mask(right=0)


def within(span: Span, first: int, end: int) -> Span | None:
    """Returns the part of a span at positions [first, end); None if it is empty."""
    begin, stop = max(first, span.start), min(end, span.start + span.length)
    return Span(begin, stop - begin, span.row + begin - span.start) if begin < stop else None


def _end_of(keys: tuple[int, int]) -> int:
    return keys[1]


def _end_of_region(region: Region) -> int:
    return region.end
