"""Tiles: exactly the pairs that a mask leaves, in few pieces."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_cp.schedule import tiles as module
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential
from symm_cp.schedule.tiles import Mask, Tile, pairs, tiles

CAUSAL = Mask(right=0)


def wanted(layout: SequenceLayout, mask: Mask, rank: int, owner: int) -> set[tuple[int, int]]:
    def document(position: int) -> int:
        return sum(edge <= position for edge in mask.documents or ())

    return {
        (row, key)
        for row, i in enumerate(layout.positions(rank))
        for key, j in enumerate(layout.positions(owner))
        if (mask.left is None or j - i >= -mask.left)
        and (mask.right is None or j - i <= mask.right)
        and document(i) == document(j)
    }


def covered(found: tuple[Tile, ...]) -> set[tuple[int, int]]:
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
def problems(draw: st.DrawFn) -> tuple[SequenceLayout, Mask]:
    world_size = draw(st.integers(1, 4))
    chunks = world_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks))
    layout = SequenceLayout(world_size, tuple(draw(st.permutations(range(chunks)))), tuple(lengths))
    side = st.none() | st.integers(0, 12)
    edges = st.none() | st.lists(st.integers(0, layout.length), max_size=4)
    inner = draw(edges)
    documents = None if inner is None else tuple(sorted([0, *inner, layout.length]))
    return layout, Mask(draw(side), draw(side), documents)


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([2, 5, 256]))
def test_tiles_are_exactly_what_the_mask_leaves(
    problem: tuple[SequenceLayout, Mask], rows: int
) -> None:
    layout, mask = problem
    before = module._BAND_ROWS
    module._BAND_ROWS = rows  # so that small examples are cut as large ones are
    try:
        tiles.cache_clear()
        ranks = range(layout.world_size)
        for rank, owner in itertools.product(ranks, ranks):
            assert covered(tiles(layout, mask, rank, owner)) == wanted(layout, mask, rank, owner)
    finally:
        module._BAND_ROWS = before
        tiles.cache_clear()


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
    found = tiles(layout, mask, 0, 0)
    area = sum((t.q_end - t.q_begin) * (t.k_end - t.k_begin) for t in found)
    assert pairs(layout, mask, 0) <= area <= 1.6 * pairs(layout, mask, 0)


def test_many_documents_are_cut_in_time() -> None:
    edges = tuple(range(0, 20001, 10))
    layout = sequential(20000, 2)
    assert len(tiles(layout, Mask(right=0, documents=edges), 0, 0)) == 1000
