"""All ranks finish although all lanes of a rank share one queue, and no other order is as good.

`check_issue_order` must be seen to fail: mutations hand a signal out too late or a wait too early.
"""

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from symm_cp.schedule import (
    Compute,
    Deadlock,
    IssuedCall,
    Signal,
    Step,
    Variant,
    Wait,
    check_issue_order,
    patterns,
)
from symm_cp.schedule.patterns import IssueOrder
from tests.exhaustive import some
from tests.schedule.calls import MIX, PLACES, SIZES, WORKSPACES, Place, Workspace

#: The patterns in which partial sums are exchanged.
EXCHANGING = (
    patterns.CONSUME_AND_REDUCE_SCATTER.name,
    patterns.PRODUCE_AND_REDUCE_SCATTER.name,
    patterns.PRODUCE_AND_ALL_REDUCE.name,
    patterns.EXCHANGE_AND_CONSUME.name,
)


def partial_sums_in_turns(variant: Variant) -> bool:
    """Whether ranks wait for partial sums before the last kernel that others wait for.

    One-shot variants do not: all signals that ranks wait for follow one kernel.
    """
    return variant.name in EXCHANGING and "one_shot" not in variant.options


STAGED = [place for place in PLACES if place.workspace.form == "staged"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_variant_alone_makes_progress_on_1_to_16_ranks(place: Place, sizes: range) -> None:
    slots = place.workspace.slots
    for world_size in sizes:
        call = IssuedCall.of(place.variant, world_size, slots)
        report = check_issue_order([call] * (slots + 2))
        assert report.ok, f"{world_size} ranks: {report}"


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("workspace", WORKSPACES, ids=str)
def test_all_pairs_mix(workspace: Workspace, world_size: int) -> None:
    for pair in combinations(workspace.variants, 2):
        calls = [IssuedCall.of(variant, world_size, workspace.slots) for variant in pair]
        report = check_issue_order([calls[which] for which in MIX])
        assert report.ok, f"{pair[0]} and {pair[1]}: {report}"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("world_size", some(2, 3, 5, of=[2, 3, 5, 16]))
def test_both_channels_share_the_queue(world_size: int, slots: int) -> None:
    pair = Workspace("sync", "staged", slots), Workspace("async", "staged", slots)
    for sync in pair[0].variants:
        for background in pair[1].variants:
            calls = [IssuedCall.of(variant, world_size, slots) for variant in (sync, background)]
            report = check_issue_order([calls[which] for which in MIX])
            assert report.ok, f"{sync} and {background}: {report}"
    everything = (*pair[0].variants, *pair[1].variants)
    chosen = random.Random(world_size).choices(everything, k=60)
    report = check_issue_order([IssuedCall.of(variant, world_size, slots) for variant in chosen])
    assert report.ok, str(report)


def copy_lane_first(order: IssueOrder, rank: int) -> IssueOrder:
    """The first, since replaced, order: lane copy as far as own flags allow, then one kernel."""
    names = ("copy", "compute", "compute2", "signal")
    lanes = {lane: [step for name, step in order if name == lane] for lane in names}
    recorded: set[str] = set()
    result: list[tuple[str, Step]] = []

    def hand_out(lane: str, *, kernels: int) -> None:
        while lanes[lane]:
            step = lanes[lane][0]
            if isinstance(step, Wait) and step.source == rank and step.flag not in recorded:
                return
            if isinstance(step, Compute):
                kernels -= 1
                if kernels < 0:
                    return
            if isinstance(step, Signal) and step.to == rank:
                recorded.add(step.flag)
            if isinstance(step, Compute):
                recorded.update(flag for flag, _ in step.raises)
            result.append((lane, lanes[lane].pop(0)))

    while any(lanes.values()):
        for lane in names:
            hand_out(lane, kernels=1)
    return tuple(result)


@pytest.mark.parametrize("place", STAGED, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_handing_out_the_copy_lane_first_deadlocks_where_partial_sums_are_exchanged(
    place: Place, world_size: int
) -> None:
    """Its waits for partial sums would come before the kernels that the peers wait for."""
    slots = place.workspace.slots
    orders = place.variant.issue_orders(world_size, slots)
    old = tuple(copy_lane_first(order, rank) for rank, order in enumerate(orders))
    assert all(sorted(map(str, a)) == sorted(map(str, b)) for a, b in zip(old, orders, strict=True))
    report = check_issue_order([IssuedCall(place.variant.channel, old)] * 2)
    assert report.ok is not partial_sums_in_turns(place.variant)
    assert all(
        isinstance(p, Deadlock) and p.flag in ("partial", "reduced") for p in report.problems
    )


def is_signal_like(step: Step, rank: int, wait: Wait, world_size: int) -> bool:
    """Whether a step is the counterpart of the signal that ends `wait`: same flag and distance."""
    distance = (rank - wait.source) % world_size
    return (
        isinstance(step, Signal)
        and (step.to - rank) % world_size == distance
        and step.flag == wait.flag
    )


def behind(order: IssueOrder, first: int, last: int) -> IssueOrder:
    """Hands out step ``first`` and later steps of its lane only behind step ``last``."""
    lane = order[first][0]
    late = [item for item in order[first:last] if item[0] == lane]
    early = [item for item in order[first:last] if item[0] != lane]
    return (*order[:first], *early, order[last], *late, *order[last + 1 :])


def late_signals(variant: Variant, world_size: int, slots: int) -> Iterator[list[IssueOrder]]:
    """On all ranks, hands out a kernel's signal behind the wait for the peers' same signals.

    Only where the two are in different lanes: the schedule fixes the order within a lane.
    """
    orders = variant.issue_orders(world_size, slots)
    for at, (lane, step) in enumerate(orders[0]):
        if not isinstance(step, Wait) or step.source == 0 or step.lag:
            continue
        mutants = []
        for rank, order in enumerate(orders):
            wait = order[at][1]
            assert isinstance(wait, Wait)
            (signal,) = (
                index
                for index, (_, other) in enumerate(order)
                if is_signal_like(other, rank, wait, world_size)
            )
            if order[signal][0] != lane:
                assert signal < at
                mutants.append(behind(order, signal, at))
        if mutants:
            yield mutants


@pytest.mark.parametrize("place", STAGED, ids=str)
def test_a_signal_behind_the_wait_for_its_likes_is_noticed(place: Place) -> None:
    tried = 0
    for world_size in (2, 3, 4, 5):
        for mutants in late_signals(place.variant, world_size, place.workspace.slots):
            call = IssuedCall(place.variant.channel, tuple(mutants))
            assert not check_issue_order([call]).ok
            tried += 1
    assert bool(tried) is (place.variant.name in EXCHANGING)


@pytest.mark.parametrize("place", STAGED, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_wait_for_an_own_flag_before_its_signal_is_noticed(place: Place, world_size: int) -> None:
    orders = list(place.variant.issue_orders(world_size, place.workspace.slots))
    tried = 0
    for at, (lane, step) in enumerate(orders[0]):
        if not isinstance(step, Signal) or step.to != 0:
            continue
        # One rank suffices: no other rank can help. Two lanes may wait for the flag.
        wait, *_ = (
            (
                index
                for index, (_, other) in enumerate(orders[0])
                if isinstance(other, Wait) and (other.source, other.flag) == (0, step.flag)
            )
            if not step.flag.startswith("arrived")
            else (len(orders[0]) - 1,)
        )
        assert orders[0][wait][0] != lane
        mutant = behind(orders[0], at, wait)
        report = check_issue_order([IssuedCall(place.variant.channel, (mutant, *orders[1:]))])
        assert any(isinstance(p, Deadlock) and p.site.rank == 0 for p in report.problems)
        tried += 1
    one_lane = place.variant.channel == "async" and "in_place" in place.variant.options
    assert bool(tried) is not one_lane


def test_calls_that_do_not_fit_together_are_refused() -> None:
    variant = patterns.PRODUCE_AND_REDUCE_SCATTER.staged()
    with pytest.raises(ValueError, match=r"all on the same number of ranks"):
        check_issue_order([])
    with pytest.raises(ValueError, match=r"on the same number of ranks; got \[2, 3\]"):
        check_issue_order([IssuedCall.of(variant, 2), IssuedCall.of(variant, 3)])


def test_a_deadlock_names_step_and_flag() -> None:
    waits: IssueOrder = (("copy", Wait(1, "ready")), ("copy", Signal(1, "ready")))
    other: IssueOrder = (("copy", Wait(0, "ready")), ("copy", Signal(0, "ready")))
    report = check_issue_order([IssuedCall("async", (waits, other))])
    assert "rank 0, lane 'copy', call 0, step 0: Wait('ready' from rank 1)" in str(report)
    assert len(report.problems) == 2


def test_epochs_are_those_of_the_channel() -> None:
    def call(rank_0: Step, channel: str) -> IssuedCall:
        assert channel in ("sync", "async")
        orders = ((("copy", rank_0),), (("copy", Signal(0, "ready")),))
        return IssuedCall("sync" if channel == "sync" else "async", orders)

    ready = Wait(1, "ready")
    assert check_issue_order([call(ready, "sync"), call(ready, "async")] * 2).ok
    silent = IssuedCall("sync", ((("copy", ready),), ()))
    # A signal of the other channel does not count.
    assert not check_issue_order([call(ready, "async"), silent]).ok
