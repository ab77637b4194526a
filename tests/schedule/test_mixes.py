"""Every variant is right at every world size, and after every other variant on its workspace."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from symm_cp.schedule import Compute, Copy, Region, Schedule, Signal, Step, Wait, check
from symm_cp.schedule.patterns import Channel
from tests.exhaustive import some
from tests.schedule.calls import (
    CHANNELS,
    LOOPS,
    MIX,
    PLACES,
    SIZES,
    WORKSPACES,
    Place,
    Workspace,
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_variant_alone_is_right_for_1_to_16_ranks(place: Place, sizes: range) -> None:
    slots = place.workspace.slots
    for world_size in sizes:
        # From 9 ranks on, three calls: the larger sizes have no new kind of neighbour.
        calls = slots + 2 if world_size <= 8 else 3
        report = check([place.variant.schedules(world_size, slots)] * calls)
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("place", LOOPS, ids=str)
def test_a_loop_is_right_for_any_number_of_pieces(place: Place) -> None:
    for world_size in (1, 2, 3, 4, 8):
        report = check([place.schedules(world_size)] * (4 if world_size <= 4 else 2))
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("place", LOOPS, ids=str)
def test_the_pieces_of_a_loop_have_the_same_steps(place: Place) -> None:
    """The library runs the steps of one piece, again and again."""
    for world_size in (1, 2, 4):
        whole = place.variant.issue_order(0, world_size, 2, place.pieces)
        one = place.variant.issue_order(0, world_size)
        assert len(whole) == len(one) * place.pieces
        for at, (lane, step) in enumerate(whole):
            piece, index = divmod(at, len(one))
            assert (lane, of_piece(one[index][1], piece)) == (whole[at][0], step)


def of_piece(step: Step, piece: int) -> Step:
    """Returns the step of another piece that corresponds to a step of piece 0."""

    def moved(region: Region) -> Region:
        return replace(region, piece=piece % 2 if region.buffer == "slot" else piece)

    if isinstance(step, Copy):
        return Copy(moved(step.src), moved(step.dst))
    if isinstance(step, Compute):
        reads, writes = map(moved, step.reads), map(moved, step.writes)
        return replace(step, reads=tuple(reads), writes=tuple(writes))
    return replace(step, piece=piece)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_loops_mix_with_all_others(channel: Channel, world_size: int) -> None:
    workspace = Workspace(channel, "direct", 2)
    loops = [place for place in LOOPS if place.workspace == workspace and place.pieces == 3]
    for loop in loops:
        for other in [*map(Place, workspace.variants, [workspace] * 99), *loops]:
            calls = [loop.schedules(world_size), other.schedules(world_size)]
            report = check([calls[which] for which in MIX])
            assert report.ok, f"{loop} and {other}: {report}"


@pytest.mark.parametrize("world_size", some(1, 2, 3, of=[1, 2, 3, 4]))
@pytest.mark.parametrize("workspace", WORKSPACES, ids=str)
def test_all_pairs_mix(workspace: Workspace, world_size: int) -> None:
    for pair in combinations(workspace.variants, 2):
        calls = [variant.schedules(world_size, workspace.slots) for variant in pair]
        report = check([calls[which] for which in MIX])
        assert report.ok, f"{pair[0]} and {pair[1]}: {report}"


@pytest.mark.parametrize("workspace", WORKSPACES, ids=str)
def test_a_long_random_mix(workspace: Workspace) -> None:
    chosen = random.Random(str(workspace)).choices(workspace.variants, k=40)
    report = check([variant.schedules(4, workspace.slots) for variant in chosen])
    assert report.ok, str(report)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_each_call_exchanges_signals_between_all_pairs(place: Place) -> None:
    """Two slots are enough because of this."""
    for world_size in range(1, 9):
        for schedule in place.variant.schedules(world_size, place.workspace.slots):
            steps = [step for lane in schedule.lanes.values() for step in lane]
            rank = schedule.rank
            peers = set(range(world_size)) - {rank}
            assert {step.to for step in steps if isinstance(step, Signal)} - {rank} == peers
            waits = [step for step in steps if isinstance(step, Wait) and not step.lag]
            assert {step.source for step in waits} - {rank} == peers


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_call_without_the_exchange_makes_two_slots_unsafe(channel: Channel) -> None:
    for variant in Workspace(channel, "direct", 2).variants:
        call = variant.schedules(3)
        (lane,) = call[0].lanes
        silent = [Schedule("silent", rank, 3, {lane: ()}, 2) for rank in range(3)]
        # In place, the first exchange comes before the first write to the slot, if there is one.
        writes_slot_unasked = "in_place" not in variant.options
        assert check([call, silent, call]).ok is not writes_slot_unasked, str(variant)
