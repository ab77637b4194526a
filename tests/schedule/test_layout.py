"""Layouts: which positions each rank holds."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.schedule.layout import Span, among, even_lengths, pooled


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 7, 16, 31])
def test_each_position_is_held_once(world_size: int, length: int) -> None:
    for layout in (sequential(length, world_size), head_tail(length, world_size)):
        held = [list(layout.positions(rank)) for rank in range(world_size)]
        assert sorted(i for shard in held for i in shard) == list(range(length))
        assert tuple(map(len, held)) == layout.lengths
        assert layout.length == length
        assert max(layout.lengths) - min(layout.lengths) <= 2


def test_sequential_and_head_tail() -> None:
    assert sequential(7, 3).chunk_lengths == (3, 2, 2)
    assert [list(sequential(7, 3).positions(r)) for r in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert head_tail(8, 2).chunk_order == (0, 3, 1, 2)
    assert list(head_tail(8, 2).positions(0)) == [0, 1, 6, 7]
    # What adjoins in the sequence is one span.
    assert head_tail(8, 2).spans(1) == (Span(2, 4, 0),)
    assert head_tail(8, 2).spans(0) == (Span(0, 2, 0), Span(6, 2, 2))


def test_empty_chunks_have_no_span() -> None:
    layout = SequenceLayout(2, (2, 0, 1, 3), (0, 2, 3, 0))
    assert layout.spans(0) == (Span(2, 3, 0),)
    assert layout.spans(1) == (Span(0, 2, 0),)
    assert SequenceLayout(2, (0, 1), (0, 0)).spans(0) == ()


@given(st.integers(0, 40), st.booleans(), st.randoms())
def test_ranks_that_pool_what_they_hold(length: int, by_halves: bool, random: Random) -> None:
    layout = head_tail(length, 6) if by_halves else sequential(length, 6)
    ranks = list(range(6))
    random.shuffle(ranks)
    teams = [ranks[:2], ranks[2:4], ranks[4:]]
    together = pooled(layout, teams)
    for team, members in enumerate(teams):
        held = [list(layout.positions(rank)) for rank in members]
        positions = sorted(position for rows in held for position in rows)
        assert list(together.positions(team)) == positions
        within = among(layout, members)
        assert [[positions[i] for i in within.positions(m)] for m in range(2)] == held


@given(st.integers(0, 200), st.integers(1, 20))
def test_even_lengths(length: int, chunks: int) -> None:
    lengths = even_lengths(length, chunks)
    assert sum(lengths) == length
    assert len(lengths) == chunks
    assert list(lengths) == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, (0,), (1,)), "world_size=0"),
        ((2, (0, 1, 2), (1, 1, 1)), "3 chunks, must have a positive multiple of world size 2"),
        ((2, (), ()), "0 chunks"),
        ((2, (0, 2), (1, 1)), r"chunk_order=\[0, 2\] must be a permutation of 0..1"),
        ((2, (0, 0), (1, 1)), "must be a permutation"),
        ((2, (0, 1), (1,)), "1 entries for 2 chunks"),
        ((2, (0, 1), (1, -1)), r"chunk_lengths=\[1, -1\] must not be negative"),
    ],
)
def test_inconsistent_layouts_are_refused(
    arguments: tuple[int, tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLayout(*arguments)
    with pytest.raises(ValueError, match="must not be negative"):
        even_lengths(-1, 2)
