"""Which keys a query sees, by positions in the whole sequence.

`Mask.regions` is the one rule: the tiles that a rank computes and the keys that its peers send it
(tiles.py) both follow from it. A new kind of mask is a field of `Mask` and its part in `regions`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from symm_cp.schedule.layout import Span

# Beyond any position.
_ENDLESS = 1 << 62
_first, _end = itemgetter(0), itemgetter(1)
R = TypeVar("R", bound="tuple[Any, ...]")


class Keys(NamedTuple):
    """Keys [first, end); query i sees key j when -left <= j - i <= right (None: no limit)."""

    first: int
    end: int
    left: int | None
    right: int | None

    def seen_by(self, first: int, last: int) -> tuple[int, int]:
        """Returns the first and the end of the keys that the queries `first` to `last` see."""
        begin = self.first if self.left is None else max(self.first, first - self.left)
        end = self.end if self.right is None else min(self.end, last + self.right + 1)
        return begin, end


class Region(NamedTuple):
    """Queries [first, end) and the keys that they see: ascending, disjoint, in the same range."""

    first: int
    end: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class Mask:
    """Query i sees key j of its document when -left <= j - i <= right (None: no limit).

    It also sees its document's keys before position `prefix`, whatever the limits are. `documents`
    are boundaries, from 0 to the length of the sequence. Queries see only keys in the ranges `keys`
    (first, end; ascending and disjoint).
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
        """Whether the keys that a query sees depend on its position."""
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
        return tuple(Region(*ends, tuple(self._keys_of(*ends))) for ends in documents)

    def _keys_of(self, first: int, end: int) -> Iterator[Keys]:
        """Yields the keys that queries of the document [first, end) see, with their limits."""
        unlimited = first if self.prefix is None else min(max(first, self.prefix), end)
        for begin, stop in self._visible(first, end):
            if begin < unlimited:
                yield Keys(begin, min(stop, unlimited), None, None)
            if unlimited < stop:
                yield Keys(max(begin, unlimited), stop, self.left, self.right)

    def _visible(self, first: int, end: int) -> Sequence[tuple[int, int]]:
        """Returns the ranges of visible keys in [first, end)."""
        if self.keys is None:
            return ((first, end),)
        found = list(overlapping(self.keys, first, end))
        if found:
            found[0] = max(first, found[0][0]), found[0][1]
            found[-1] = found[-1][0], min(end, found[-1][1])
        return found

    def regions_of(self, span: Span) -> Sequence[Region]:
        """Returns the regions that queries of a span are in."""
        return overlapping(self.regions, span.start, span.start + span.length)

    def seen_by(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Returns ascending, disjoint ranges of the keys that queries of the spans see.

        The ranges may be too wide.
        """
        found: list[tuple[int, int]] = []
        for span in spans:
            regions = self.regions_of(span)
            first, last = span.start, span.start + span.length - 1
            for region in {*regions[:1], *regions[-1:]}:
                queries = max(first, region.first), min(last, region.end - 1)
                found += (keys.seen_by(*queries) for keys in region.keys)
            if len(regions) > 2:  # regions within the span see keys in it
                found.append((regions[1].first, regions[-2].end))
        joined: list[tuple[int, int]] = []
        for first, end in sorted(found):
            if first >= end:
                continue
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((first, end))
        return joined


#: Every query sees every key.
NO_MASK = Mask()
#: The mask of `is_causal`.
CAUSAL = Mask(right=0)


def overlapping(ranges: Sequence[R], first: int, end: int) -> Sequence[R]:
    """Returns the ranges that overlap [first, end); `ranges` must be ascending and disjoint."""
    begin = bisect_right(ranges, first, key=_end)
    return ranges[begin : bisect_left(ranges, end, lo=begin, key=_first)]


def within(span: Span, first: int, end: int) -> Span:
    """Returns the part of a span at positions [first, end); of length <= 0 if there is none."""
    begin = max(first, span.start)
    length = min(end, span.start + span.length) - begin
    return Span(begin, length, span.row + begin - span.start)
