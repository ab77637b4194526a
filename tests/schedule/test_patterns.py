"""The registered patterns, and properties that ``check`` does not cover: order, counts, reads."""

import pickle
from collections import Counter

import pytest

from symm_cp.schedule import Compute, Copy, Region, Schedule, Signal, Step, Wait, accesses, peers
from symm_cp.schedule import patterns as registry
from symm_cp.schedule.patterns import (
    ALL_GATHER_AND_CONSUME,
    ALL_GATHER_AND_POLL,
    BACKGROUND_ALL_GATHER,
    BACKGROUND_REDUCE_SCATTER,
    CONSUME_AND_REDUCE_SCATTER,
    PATTERNS,
    PRODUCE_AND_ALL_REDUCE,
    PRODUCE_AND_REDUCE_SCATTER,
    TWO_SHOT_ALL_REDUCE,
    Variant,
)
from tests.schedule.calls import PLACES, Place

#: Variants with kernels that compare the number of a call.
BY_EPOCH = (
    ALL_GATHER_AND_POLL.staged(),
    ALL_GATHER_AND_POLL.staged(keep=True),
    PRODUCE_AND_REDUCE_SCATTER.staged(together=True),
)
STAGED = [place for place in PLACES if place.workspace.form == "staged"]


def steps_of(schedule: Schedule) -> list[Step]:
    return [step for lane in schedule.lanes.values() for step in lane]


def schedules(place: Place, world_size: int) -> tuple[Schedule, ...]:
    return place.variant.schedules(world_size, place.workspace.slots)


def kernels(schedule: Schedule) -> list[Compute]:
    return [step for step in steps_of(schedule) if isinstance(step, Compute)]


# The registry.


def test_the_registry_lists_each_variant_once() -> None:
    listed = [place.variant for place in PLACES if place.workspace.slots == 2]
    assert len({str(variant) for variant in listed}) == len(listed)
    assert {variant.name for variant in listed} == {pattern.name for pattern in PATTERNS}
    assert {name for name in dir(registry) if name.isupper()} == {
        *(pattern.name for pattern in PATTERNS),
        "PATTERNS",
    }


def test_which_variants_run_on_one_slot() -> None:
    """CUDA graphs run staged variants that are not in place and whose kernels compare no epochs."""
    for form in ("direct", "staged"):
        for channel in ("sync", "async"):
            one, two = (set(registry.variants(channel, form, slots)) for slots in (1, 2))
            assert one == {
                variant
                for variant in two
                if variant.form == "staged"
                and "in_place" not in variant.options
                and variant not in BY_EPOCH
            }


def test_unregistered_combinations_are_refused() -> None:
    message = r"ALL_GATHER_AND_CONSUME: staged\(bounded=True, keep=True\) is not registered"
    with pytest.raises(ValueError, match=message):
        ALL_GATHER_AND_CONSUME.staged(bounded=True, keep=True)
    with pytest.raises(ValueError, match=r"direct\(bounded=False\) is not registered"):
        BACKGROUND_ALL_GATHER.direct(bounded=False)
    with pytest.raises(ValueError, match=r"registered: BACKGROUND_ALL_GATHER.direct\(\); "):
        BACKGROUND_ALL_GATHER.direct(in_place=True, ring=True)
    with pytest.raises(ValueError, match=r"registered: no direct form"):
        ALL_GATHER_AND_POLL.direct()
    with pytest.raises(ValueError, match=r"registered: no staged form"):
        TWO_SHOT_ALL_REDUCE.staged()


def test_options_that_are_off_make_no_other_variant() -> None:
    variant = ALL_GATHER_AND_CONSUME.staged(in_place=False, keep=True)
    assert variant is ALL_GATHER_AND_CONSUME.staged(keep=True)
    assert str(variant) == "ALL_GATHER_AND_CONSUME.staged(keep)"
    assert variant.channel == "sync"
    assert BACKGROUND_ALL_GATHER.direct().channel == "async"


def test_variants_and_schedules_are_hashable_and_survive_pickling() -> None:
    variant = BACKGROUND_ALL_GATHER.direct(in_place=True)
    schedule = variant.schedule(1, 3)
    assert schedule is variant.schedule(1, 3)
    for original in (variant, schedule):
        twin = pickle.loads(pickle.dumps(original))
        assert twin == original
        assert hash(twin) == hash(original)
    assert variant != BACKGROUND_ALL_GATHER.direct()
    assert schedule != BACKGROUND_ALL_GATHER.direct().schedule(1, 3)
    with pytest.raises(TypeError):
        schedule.lanes["copy"] = ()  # type: ignore[index]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_places_out_of_range_are_refused(place: Place) -> None:
    variant, slots = place.variant, place.workspace.slots
    for build in (variant.schedule, variant.issue_order):
        with pytest.raises(ValueError, match=r"world_size=0 must be at least 1"):
            build(0, 0, slots)
        with pytest.raises(ValueError, match=r"rank=4 must be in 0\.\.3 for world_size=4"):
            build(4, 4, slots)
        with pytest.raises(ValueError, match=r"rank=-1 must be in 0\.\.3"):
            build(-1, 4, slots)
        with pytest.raises(ValueError, match=rf"{variant.name}.*slots=0 must be at least"):
            build(0, 4, 0)


def test_in_place_needs_two_slots() -> None:
    variant = ALL_GATHER_AND_CONSUME.staged(in_place=True)
    with pytest.raises(ValueError, match=r"staged\(in_place\): slots=1 must be at least 2"):
        variant.schedule(0, 2, slots=1)


# Order and lanes.


def test_peers_start_after_oneself_and_wrap() -> None:
    assert peers(2, 4) == (3, 0, 1)
    assert peers(0, 1) == ()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_lanes_follow_from_the_issue_order(place: Place, world_size: int) -> None:
    slots, background = place.workspace.slots, place.workspace.channel == "async"
    for rank, schedule in enumerate(schedules(place, world_size)):
        order = place.variant.issue_order(rank, world_size, slots)
        for lane, steps in schedule.lanes.items():
            assert steps == tuple(step for name, step in order if name == lane)
        assert sum(map(len, schedule.lanes.values())) == len(order)
        assert (schedule.rank, schedule.world_size, schedule.slots) == (rank, world_size, slots)
        assert schedule.name == str(place.variant)
        staged = place.workspace.form == "staged"
        lanes = {"copy"} if background else {"compute"}
        if staged and (background or world_size > 1):
            lanes = {"compute", "copy"} if background else {"compute", "copy", "signal"}
            lanes |= {"compute2"} if "lanes" in place.variant.options else set()
        assert schedule.lanes.keys() <= lanes


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_one_rank_waits_for_no_peer(place: Place) -> None:
    (schedule,) = schedules(place, 1)
    synchronising = [step for step in steps_of(schedule) if isinstance(step, Signal | Wait)]
    if place.workspace.form == "direct" or place.workspace.channel == "sync":
        assert not synchronising
    else:  # only its two lanes, unless it reads in place
        in_place = "in_place" in place.variant.options
        own = [] if in_place else [Signal(0, "copied"), Wait(0, "copied")]
        assert synchronising == own
    written = [write.buffer for step in steps_of(schedule) for write in accesses(step)[1]]
    assert "output" in written or written == ["symmetric"]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_waits_visit_peers_in_order(place: Place) -> None:
    """Shards come from the ranks ahead, partial sums of kernels from those behind, in turn."""
    for schedule in schedules(place, 5):
        waits = [s for s in steps_of(schedule) if isinstance(s, Wait) and s.source != schedule.rank]
        ahead = peers(schedule.rank, 5)
        for flag, lag in {(wait.flag, wait.lag) for wait in waits}:
            order = tuple(w.source for w in waits if (w.flag, w.lag) == (flag, lag))
            assert order in (ahead, ahead[::-1], ahead[: len(order)], ahead[::-1][: len(order)])
            if flag in ("ready", "ready in place", "reduced"):
                assert order == ahead[: len(order)]


@pytest.mark.parametrize("place", STAGED, ids=str)
def test_what_peers_wait_for_is_handed_out_first(place: Place) -> None:
    """The own shard is published before the first kernel and before any wait for this call."""
    for rank, order in enumerate(place.variant.issue_orders(4, place.workspace.slots)):
        published = [
            at for at, (_, s) in enumerate(order) if isinstance(s, Signal) and s.to != rank
        ]
        ready = [at for at in published if order[at][1].flag.startswith("ready")]  # type: ignore[union-attr]
        late = [
            at
            for at, (_, step) in enumerate(order)
            if isinstance(step, Compute)
            or (isinstance(step, Wait) and step.source != rank and not step.lag)
        ]
        assert not ready or max(ready) < min(late)


def test_pulls_are_handed_out_before_the_kernels_that_they_overlap() -> None:
    for variant in (
        ALL_GATHER_AND_CONSUME.staged(),
        ALL_GATHER_AND_CONSUME.staged(bounded=True),
        ALL_GATHER_AND_CONSUME.staged(lanes=True),
        CONSUME_AND_REDUCE_SCATTER.staged(),
        CONSUME_AND_REDUCE_SCATTER.staged(ring=True),
    ):
        steps = [step for _, step in variant.issue_order(0, 6)]
        consumed = [
            at for at, s in enumerate(steps) if isinstance(s, Compute) and s.kernel == "consume"
        ]
        for turn in range(5):
            # The own shard and turn - 1 shards of peers are consumed while this one is pulled.
            assert steps.index(Signal(0, f"pulled{turn}")) < consumed[turn]


@pytest.mark.parametrize("place", STAGED, ids=str)
def test_no_kernel_waits_for_a_signal_to_a_peer(place: Place) -> None:
    """Copy engines may delay a signal, so the lane that signals holds no other lane up."""
    for world_size in range(1, 6):
        for schedule in schedules(place, world_size):
            rank, lanes = schedule.rank, schedule.lanes
            signals = lanes.get("signal", ())
            computing = [*lanes.get("compute", ()), *lanes.get("compute2", ())]
            own = {s.flag for s in computing if isinstance(s, Signal)} if signals else set()
            own |= {f for kernel in kernels(schedule) for f, _ in kernel.raises}
            for step in signals:
                if isinstance(step, Wait):
                    assert step.source == rank
                    assert step.flag in own
                else:
                    assert isinstance(step, Signal)
                    assert step.to != rank
            # A launch relies on this: the lane waits for nothing else at the call's beginning.
            assert all(isinstance(step, Wait) for step in signals[:1])
            for step in computing:
                assert not isinstance(step, Signal) or step.to == rank


# Counts.


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_how_many_signals_a_call_costs(place: Place) -> None:
    variant = place.variant
    per_peer = 1
    two_shot = variant.name.endswith("TWO_SHOT_ALL_REDUCE") or (
        variant.name == "PRODUCE_AND_ALL_REDUCE" and "one_shot" not in variant.options
    )
    if "in_place" in variant.options and not two_shot:
        per_peer += 1  # "done"
    if variant.name == "CONSUME_AND_REDUCE_SCATTER" or two_shot:
        per_peer += 1  # the shard, then the sum
    if place.workspace.slots == 1:
        per_peer += 1  # "done"
    for world_size in range(2, 7):
        for schedule in schedules(place, world_size):
            sent = [
                s for s in steps_of(schedule) if isinstance(s, Signal) and s.to != schedule.rank
            ]
            if "ring" in variant.options:
                # "taken" goes to all but two peers, "ready" not to the late ones.
                assert len(sent) <= (per_peer + 1) * (world_size - 1)
            else:
                assert len(sent) == per_peer * (world_size - 1)


@pytest.mark.parametrize("place", STAGED, ids=str)
def test_flags_can_be_taken_back(place: Place) -> None:
    """With one slot every flag between two ranks is signalled as often as it is awaited.

    Two lanes may wait for one of a rank's own flags, which are events.
    """
    for world_size in range(2, 7):
        raised: Counter[tuple[object, ...]] = Counter()
        awaited: Counter[tuple[object, ...]] = Counter()
        for schedule in schedules(place, world_size):
            for step in steps_of(schedule):
                if isinstance(step, Signal):
                    raised[step.flag, schedule.rank, step.to] += 1
                elif isinstance(step, Wait):
                    awaited[step.flag, step.source, schedule.rank] += 1
                elif isinstance(step, Compute):
                    awaited.update((flag, schedule.rank, schedule.rank) for flag, _ in step.awaits)
                    raised.update((flag, schedule.rank, schedule.rank) for flag, _ in step.raises)
        assert raised.keys() == awaited.keys()
        assert max(raised.values()) == 1
        assert all(awaited[f, source, to] == 1 for f, source, to in raised if source != to)


# Where kernels read and write.


@pytest.mark.parametrize("place", STAGED, ids=str)
def test_kernels_touch_only_memory_of_their_rank(place: Place) -> None:
    """Only copy engines access peers' memory."""
    for schedule in schedules(place, 4):
        for kernel in kernels(schedule):
            reads, writes = accesses(kernel)
            assert {region.rank for region in (*reads, *writes)} == {schedule.rank}
        copies = [step for step in schedule.lanes.get("copy", ()) if isinstance(step, Copy)]
        assert {step.dst.rank for step in copies} == {schedule.rank}  # pulled, not pushed
        assert all(
            step.src.buffer == "input" and step.dst.rank == schedule.rank
            for step in schedule.lanes.get("compute", ())
            if isinstance(step, Copy)
        )
        if place.workspace.channel == "sync":
            assert not any(isinstance(step, Copy) for step in schedule.lanes.get("compute", ()))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_reductions_read_in_rank_order(place: Place) -> None:
    """So results do not depend on timing."""
    for schedule in schedules(place, 5):
        for kernel in kernels(schedule):
            if kernel.kernel in ("reduce", "combine"):
                owners = [r.rank if r.rank != schedule.rank else r.chunk for r in kernel.reads]
                if place.workspace.form == "direct":
                    owners = [region.rank for region in kernel.reads]
                assert owners == [0, 1, 2, 3, 4]


def test_ring_adds_in_the_order_of_the_ring() -> None:
    found = kernels(CONSUME_AND_REDUCE_SCATTER.staged(ring=True).schedule(0, 4))
    assert [step.index for step in found if step.kernel == "add"] == [3, 2, 1]
    written = [w.chunk for s in found if s.kernel == "consume" and s.index for w in s.writes]
    assert written == [0, 1, 0]


@pytest.mark.parametrize("in_place", [False, True])
def test_where_consume_finds_a_shard(in_place: bool) -> None:
    """The own shard is in the caller's tensor; a peer's where it was pulled to."""

    def reads(variant: Variant) -> list[tuple[Region, ...]]:
        return [kernel.reads for kernel in kernels(variant.schedule(1, 4))]

    mine = (Region(1, "symmetric" if in_place else "input"),)
    staged = reads(ALL_GATHER_AND_CONSUME.staged(in_place=in_place))
    assert staged == [mine, *((Region(1, "gathered", peer),) for peer in (2, 3, 0))]
    bounded = reads(ALL_GATHER_AND_CONSUME.staged(in_place=in_place, bounded=True))
    assert bounded == [mine, *((Region(1, "gathered", place),) for place in (0, 1, 0))]
    kept = reads(ALL_GATHER_AND_CONSUME.staged(in_place=in_place, keep=True))
    assert kept[:-1] == staged[:-1]
    assert set(kept[-1]) == {Region(1, "gathered", owner) for owner in range(4)}


def test_where_a_polling_kernel_finds_the_shards() -> None:
    (kernel,) = kernels(ALL_GATHER_AND_POLL.staged().schedule(1, 3))
    assert kernel.reads == (Region(1, "input"),)
    assert kernel.awaits == (
        ("arrived0", Region(1, "gathered", 2)),
        ("arrived1", Region(1, "gathered", 0)),
    )


def test_flags_that_a_kernel_polls_are_raised_in_the_order_of_the_pulls() -> None:
    """So a program that has seen a shard's flag may read the shard, whatever other flags say."""
    for variant in BY_EPOCH[:2]:
        for schedule in variant.schedules(5):
            (kernel,) = kernels(schedule)
            copy = schedule.lanes["copy"]
            places = [
                copy.index(step)
                for flag, pulled in kernel.awaits
                for step in (
                    next(s for s in copy if isinstance(s, Copy) and s.dst == pulled),
                    Signal(schedule.rank, flag),
                )
            ]
            assert places == sorted(places)


def test_one_kernel_produces_for_all_ranks() -> None:
    (kernel, reduce) = kernels(PRODUCE_AND_REDUCE_SCATTER.staged(together=True).schedule(1, 3))
    assert kernel.writes == (Region(1, "partials", 1),)
    assert kernel.raises == (
        ("counted0", Region(1, "slot", 2)),
        ("counted1", Region(1, "slot", 0)),
    )
    plain = kernels(PRODUCE_AND_REDUCE_SCATTER.staged().schedule(1, 3))
    assert reduce == plain[-1]


@pytest.mark.parametrize("place", [place for place in PLACES if place.variant.looped], ids=str)
def test_an_exchange_in_the_caller_is_the_one_in_the_background(place: Place) -> None:
    """With one exception: a background reduce-scatter copies its own chunk away first."""
    if place.variant.channel == "sync" and place.variant.name != "JOINING_ALL_TO_ALL":
        twin = getattr(registry, f"BACKGROUND_{place.variant.name}")
        options = dict.fromkeys(place.variant.options, True)
        for rank in range(3):
            caller = steps_of(place.variant.schedule(rank, 3))
            background = steps_of(twin.direct(**options).schedule(rank, 3))
            same = place.variant.name != "REDUCE_SCATTER" or "in_place" in options
            assert (caller == background) is same


def test_a_joining_all_to_all_takes_from_all_in_one_pass() -> None:
    """It makes the same copies as an all-to-all."""
    for rank in range(4):
        joining = steps_of(registry.JOINING_ALL_TO_ALL.direct().schedule(rank, 4))
        kinds = [type(step) for step in joining]
        assert kinds == [Copy] * 3 + [Signal] * 3 + [Wait] * 3 + [Copy] * 4
        assert set(joining) == set(steps_of(registry.ALL_TO_ALL.direct().schedule(rank, 4)))


def test_the_own_chunk_is_produced_last() -> None:
    for pattern in (PRODUCE_AND_REDUCE_SCATTER, PRODUCE_AND_ALL_REDUCE):
        found = kernels(pattern.staged().schedule(1, 4))
        assert [k.index for k in found if k.kernel == "produce"] == [2, 3, 0, 1]


def test_the_background_gather_waits_for_all_before_it_pulls() -> None:
    steps = BACKGROUND_ALL_GATHER.staged(in_place=True).schedule(1, 4).lanes["copy"]
    names = [type(step).__name__ for step in steps]
    signals, waits, copies = ["Signal"] * 3, ["Wait"] * 3, ["Copy"] * 4
    assert names == [*signals, *waits, *copies, *signals, *waits]


BACKGROUND = pytest.mark.parametrize(
    "pattern", [BACKGROUND_ALL_GATHER, BACKGROUND_REDUCE_SCATTER], ids=str
)


@BACKGROUND
def test_in_the_background_the_input_is_read_before_the_signals(pattern: registry.Pattern) -> None:
    """Once they are sent, the caller may use its input again."""
    for variant in pattern.variants("direct"):
        if "in_place" in variant.options:
            continue
        steps = variant.schedule(1, 4).lanes["copy"]
        first = next(index for index, step in enumerate(steps) if isinstance(step, Signal))
        readers = [
            index
            for index, step in enumerate(steps)
            if any(region.buffer == "input" for region in accesses(step)[0])
        ]
        assert readers
        assert max(readers) < first


@BACKGROUND
@pytest.mark.parametrize("slots", [1, 2])
def test_in_the_background_the_callers_lane_waits_for_no_peer(
    pattern: registry.Pattern, slots: int
) -> None:
    """No other lane reads the input, so the caller may overwrite it."""
    for world_size in (1, 2, 4):
        (plain,) = (v for v in pattern.variants("staged") if "in_place" not in v.options)
        lanes = plain.schedule(0, world_size, slots).lanes
        assert not [step for step in lanes["compute"] if isinstance(step, Wait)]
        readers = {
            lane
            for lane, steps in lanes.items()
            for step in steps
            if any(region.buffer == "input" for region in accesses(step)[0])
        }
        assert readers == {"compute"}
