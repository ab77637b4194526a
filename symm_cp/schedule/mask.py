"""Which keys a query sees, by positions in the whole sequence.

`sees` is the one rule. `Mask.regions` applies it to ranges of keys: the tiles that a rank computes
and the keys that its peers send it (tiles.py) follow from the regions. Masks as functions
(`MaskOptions.as_mask_mod`) apply it to tensors of positions. A new kind of mask is a field of
`Mask` and an argument of `sees`, so both must pass it.
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


def sees(*, limited: Any, in_prefix: Any, one_document: Any, shown: Any) -> Any:
    """Whether a query sees a key, of booleans or tensors of them.

    `limited`: the key is within the limits of distance; or these `Limits` themselves, and then the
    result is the limits that remain. `one_document`: query and key are in one document.
    """
    return (limited | in_prefix) & one_document & shown


@dataclass(frozen=True)
class Limits:
    """Query i sees key j when -left <= j - i <= right (None: no limit)."""

    left: int | None
    right: int | None

    def hold(self, distance: Any) -> Any:
        """Whether a query sees keys at a distance j - i, or at each of a tensor of distances."""
        seen = distance == distance
        if self.left is not None:
            seen = seen & (distance >= -self.left)
        if self.right is not None:
            seen = seen & (distance <= self.right)
        return seen

    def __or__(self, other: bool) -> Limits:
        """The limits of keys that are seen within the limits, or anyway."""
        return Limits(None, None) if other else self

    def __and__(self, other: bool) -> Limits | None:
        """The limits of keys that are seen within the limits, or not at all."""
        return self if other else None


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


class MaskRegion(NamedTuple):
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
    def regions(self) -> tuple[MaskRegion, ...]:
        """All queries, in regions that ascend and do not overlap, with the keys that they see."""
        if self.documents is None:
            documents = [(0, _ENDLESS)]
        else:
            documents = [(a, b) for a, b in pairwise(self.documents) if a < b]
        return tuple(MaskRegion(*ends, tuple(self._keys_of(*ends))) for ends in documents)

    def _keys_of(self, first: int, end: int) -> Iterator[Keys]:
        """Yields the keys that queries of the document [first, end) see, with their limits."""
        prefix, limits = self.prefix or 0, Limits(self.left, self.right)
        for begin, stop in self._visible(first, end):
            # Within each part, the rule is the same for all keys.
            for part in pairwise(sorted({begin, stop, min(max(begin, prefix), stop)})):
                seen = sees(
                    limited=limits, in_prefix=part[0] < prefix, one_document=True, shown=True
                )
                yield Keys(*part, seen.left, seen.right)

    def _visible(self, first: int, end: int) -> Sequence[tuple[int, int]]:
        """Returns the ranges of visible keys in [first, end)."""
        if self.keys is None:
            return ((first, end),)
        found = list(overlapping(self.keys, first, end))
        if found:
            found[0] = max(first, found[0][0]), found[0][1]
            found[-1] = found[-1][0], min(end, found[-1][1])
        return found

    def regions_of(self, span: Span) -> Sequence[MaskRegion]:
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
