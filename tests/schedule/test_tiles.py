"""Tiles: exactly the pairs that a mask leaves, in few pieces."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp.schedule import Mask, SequenceLayout, head_tail, sequential
from symm_cp.schedule.tiles import (
    Tile,
    for_samples,
    in_bands,
    in_rows,
    most_parts,
    pairs,
    seen_by_peers,
    squares,
    tiles,
)

CAUSAL = Mask(right=0)


def visible(mask: Mask, position: int) -> bool:
    return mask.keys is None or any(first <= position < end for first, end in mask.keys)


def wanted(layout: SequenceLayout, mask: Mask, rank: int, owner: int) -> set[tuple[int, int]]:
    def document(position: int) -> int:
        return sum(edge <= position for edge in mask.documents or ())

    return {
        (row, key)
        for row, i in enumerate(layout.positions(rank))
        for key, j in enumerate(layout.positions(owner))
        if (
            (mask.prefix is not None and j < mask.prefix)
            or (
                (mask.left is None or j - i >= -mask.left)
                and (mask.right is None or j - i <= mask.right)
            )
        )
        and document(i) == document(j)
        and visible(mask, j)
    }


def covered(found: Iterable[Tile]) -> set[tuple[int, int]]:
    seen: set[tuple[int, int]] = set()
    for tile in found:
        own = {
            (tile.q_begin + i, tile.k_begin + j)
            for i in range(tile.q_end - tile.q_begin)
            for j in range(tile.k_end - tile.k_begin)
            if (tile.low is None or j - i >= tile.low) and (tile.high is None or j - i <= tile.high)
        }
        assert own, f"nothing is in {tile}"
        assert len(own) == tile.pairs
        assert not seen & own, f"{tile} overlaps"
        seen |= own
    return seen


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    world_size = draw(st.integers(1, 4))
    chunks = world_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks))
    return SequenceLayout(world_size, tuple(draw(st.permutations(range(chunks)))), tuple(lengths))


@st.composite
def masks(draw: st.DrawFn, length: int) -> Mask:
    side = st.none() | st.integers(0, 12)
    inner = draw(st.none() | st.lists(st.integers(0, length), max_size=4))
    documents = None if inner is None else tuple(sorted([0, *inner, length]))
    ends = draw(st.none() | st.sets(st.integers(0, length), max_size=6))
    keys = None if ends is None else tuple(zip(*[iter(sorted(ends))] * 2, strict=False))
    prefix = draw(st.none() | st.integers(0, length + 3))
    return Mask(draw(side), draw(side), documents, keys, prefix)  # type: ignore[arg-type]


problems = layouts().flatmap(lambda layout: st.tuples(st.just(layout), masks(layout.length)))


@settings(max_examples=300, deadline=None)
@given(problems, st.sampled_from([2, 5, 256]))
@pytest.mark.exhaustive
def test_tiles_are_exactly_what_the_mask_leaves(
    problem: tuple[SequenceLayout, Mask], rows: int
) -> None:
    layout, mask = problem
    ranks = range(layout.world_size)
    for rank, owner in itertools.product(ranks, ranks):
        found = tiles(layout, mask, rank, owner)
        assert covered(found) == wanted(layout, mask, rank, owner)
        in_parts = [part for tile in found for part in in_rows(tile, rows)]
        assert covered(in_parts) == covered(found)
        assert all(part.q_end - part.q_begin <= rows for part in in_parts)
        assert covered(part for tile in found for part in in_bands(tile, rows)) == covered(found)
        assert covered(part for tile in found for part in squares(tile)) == covered(found)


@settings(deadline=None)
@given(problems, st.integers(0, 9))
def test_queries_of_another_sequence_see_ranges_of_keys(
    problem: tuple[SequenceLayout, Mask], rows: int
) -> None:
    layout, mask = problem
    for owner in range(layout.world_size):
        seen = {
            (row, key)
            for row in range(rows)
            for key, j in enumerate(layout.positions(owner))
            if visible(mask, j)
        }
        assert covered(tiles(layout, Mask(keys=mask.keys), 0, owner, rows=rows)) == seen


def test_neighbours_with_equal_masks_share_tiles() -> None:
    layout = sequential(20, 2)
    packed, padded = Mask(right=0, documents=(0, 4, 20)), Mask(right=0, keys=((3, 20),))
    batch = [packed, packed, padded, packed]
    found = for_samples(batch, lambda mask: tiles(layout, mask, 1, 0))
    assert {(tile.b_begin, tile.b_end) for tile in found} == {(0, 2), (2, 3), (3, 4)}
    for sample, mask in enumerate(batch):
        own = [t for t in found if sample in range(*t.samples.indices(len(batch)))]
        assert covered(own) == wanted(layout, mask, 1, 0)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_head_tail_gives_every_rank_the_same_work(world_size: int) -> None:
    length = 2 * world_size * 12
    layout = head_tail(length, world_size)
    work = {pairs(layout, CAUSAL, rank) for rank in range(world_size)}
    assert len(work) == 1
    assert work.pop() * world_size == length * (length + 1) // 2
    # One kernel call for each rank's keys.
    for rank, owner in itertools.product(range(world_size), repeat=2):
        assert len(tiles(layout, CAUSAL, rank, owner)) == 1


def test_sequential_skips_later_ranks() -> None:
    layout = sequential(40, 4)
    for rank, owner in itertools.product(range(4), repeat=2):
        (*found,) = tiles(layout, CAUSAL, rank, owner)
        assert bool(found) == (owner <= rank)
        assert all(tile.full for tile in found) == (owner != rank)
    assert [pairs(layout, CAUSAL, rank) for rank in range(4)] == [55, 155, 255, 355]


def test_documents_and_windows_skip_whole_pairs_of_chunks() -> None:
    layout = sequential(40, 4)
    by_document = Mask(documents=(0, 20, 40))
    near = Mask(left=5, right=0)
    for rank, owner in itertools.product(range(4), repeat=2):
        assert bool(tiles(layout, by_document, rank, owner)) == (rank // 2 == owner // 2)
        assert bool(tiles(layout, near, rank, owner)) == (owner in (rank, rank - 1))
    # Documents need no mask.
    assert all(tile.full for tile in tiles(layout, by_document, 0, 1))
    assert all(
        tile.full or tile.causal
        for tile in tiles(layout, Mask(right=0, documents=(0, 7, 20, 40)), 0, 0)
    )


def test_windows_waste_little() -> None:
    layout = sequential(8192, 1)
    mask = Mask(left=511, right=0)
    (whole,) = tiles(layout, mask, 0, 0)
    found = in_bands(whole)
    area = sum((t.q_end - t.q_begin) * (t.k_end - t.k_begin) for t in found)
    assert pairs(layout, mask, 0) <= area <= 1.6 * pairs(layout, mask, 0)


def test_many_documents_are_cut_in_time() -> None:
    edges = tuple(range(0, 20001, 10))
    layout = sequential(20000, 2)
    assert len(tiles(layout, Mask(right=0, documents=edges), 0, 0)) == 1000


@settings(max_examples=200, deadline=None)
@given(problems)
@pytest.mark.exhaustive
def test_peers_see_no_other_rows(problem: tuple[SequenceLayout, Mask]) -> None:
    layout, mask = problem
    for owner, (first, end) in enumerate(seen_by_peers(layout, (mask,))):
        assert 0 <= first <= end <= layout.lengths[owner]
        for rank in set(range(layout.world_size)) - {owner}:
            for tile in tiles(layout, mask, rank, owner):
                assert first <= tile.k_begin <= tile.k_end <= end


#: Values of each field of a mask, for a sequence of a length: a kind of mask is a field.
KINDS: dict[str, Callable[[int], tuple[object, ...]]] = {
    "left": lambda length: (0, 3, length),
    "right": lambda length: (0, 2, length),
    "documents": lambda length: ((0, length // 3, length // 2, length),),
    "keys": lambda length: (((1, length // 4), (length // 2, length - 1)), ()),
    "prefix": lambda length: (length // 2 + 1,),
}


def check_sent(layout: SequenceLayout, queries: SequenceLayout | None, mask: Mask) -> None:
    """Every key of a tile is sent."""
    for owner, (first, end) in enumerate(seen_by_peers(layout, (mask,), queries)):
        for rank in set(range(layout.world_size)) - {owner}:
            for tile in tiles(layout, mask, rank, owner, queries):
                assert first <= tile.k_begin <= tile.k_end <= end, (mask, layout, rank, owner)


def test_peers_are_sent_the_keys_of_every_kind_of_mask() -> None:
    fields = [field.name for field in dataclasses.fields(Mask)]
    for name in fields:
        assert name in KINDS, (
            f"Mask.{name} is new: add values of it to KINDS, so that its tiles and the keys that "
            "peers are sent are compared"
        )
    for layout in (sequential(24, 2), head_tail(24, 3), sequential(24, 4), head_tail(32, 4)):
        values = [(None, *KINDS[name](layout.length)) for name in fields]
        for each in itertools.product(*values):
            mask = Mask(**dict(zip(fields, each, strict=True)))
            for queries in (None, sequential(layout.length, layout.world_size)):
                check_sent(layout, queries, mask)


def test_peers_see_few_rows_of_windows_and_documents() -> None:
    assert seen_by_peers(sequential(64, 2), (Mask(5, 0),)) == ((27, 32), (0, 0))
    # Rank 0 holds the first and the last quarter.
    assert seen_by_peers(head_tail(64, 2), (Mask(5, 0),)) == ((11, 16), (27, 32))
    assert seen_by_peers(sequential(64, 4), (Mask(0, 3),)) == ((0, 0), *[(0, 3)] * 3)
    documents = Mask(None, 0, (0, 20, 32, 40, 64))
    assert seen_by_peers(sequential(64, 2), (documents,)) == ((0, 0), (0, 0))
    both = (documents, Mask(None, 0, (0, 30, 34, 64)))
    assert seen_by_peers(sequential(64, 2), both) == ((30, 32), (0, 0))
    assert seen_by_peers(sequential(64, 2), (Mask(keys=((3, 9), (40, 41))),)) == ((3, 9), (8, 9))


@settings(max_examples=100, deadline=None)
@given(problems)
def test_most_parts(problem: tuple[SequenceLayout, Mask]) -> None:
    layout, mask = problem
    for rank, length in enumerate(layout.lengths):
        found = [t for owner in range(layout.world_size) for t in tiles(layout, mask, rank, owner)]
        most = max((sum(t.q_begin <= i < t.q_end for t in found) for i in range(length)), default=0)
        assert most_parts(found) == most
